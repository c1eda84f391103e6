"""A 3B-parameter checkpoint, made on the spot, loads and makes a token within 10 GB on two cores, in bfloat16.

To see: while weights are loaded, resident memory grows by no more than 1.3 times their bytes. This also holds for a
mixture of experts, whose experts are 768 tensors in the file and 6 arrays in memory.

    python -m experiments.run --config=configs/language/model_memory.py

A prompt of 16 at once takes at most 0.3 GB more than tokens one by one. Needs 7 GB in the folder for temporary files.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    models = "Llama 3.2 3B", "Qwen3 30B-A3B, two layers"
    return ConfigDict({"experiment": "model_memory", "grid": {"model": models, "strategy": ("v3_4",)}})
