"""All RULER-style tasks of `configs/language/ruler.py` on the byte-level decoders of `results/models`, at 512 bytes.

    python -m experiments.run --config=configs/language/ruler_text.py

Trained on six million bytes of Python's library, `llama-d128` answers none of them in float32. The grid shows whether a
small model reads at all before its caches are compared. No table of it is committed.
"""

from ml_collections import ConfigDict

from configs.language import ruler


def get_config() -> ConfigDict:
    config = ruler.get_config()
    models, strategies = ("llama-d128", "qwen2-d64", "gemma3-d256"), ("float32", "eden_2")
    config.update({"examples": 4, "seeds": 2, "chunk": 64})
    config.update({"grid": {"model": models, "tokens": (512,), "strategy": strategies}})
    return config
