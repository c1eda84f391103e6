"""Queries, keys and values of a language model at work.

    python -m experiments.capture --model=llama-d128 --tokens=4096 --out=runs/kv.safetensors

Tensors are layers.<i>.<q, k or v>, (tokens, heads, head_dim), after the rotary embedding: what a cache receives. They
serve as vectors to quantize: `--config.grid.data="('file:runs/kv.safetensors#layers.0.k',)"`.
"""

import sys
from pathlib import Path

from absl import app, flags

import experiments
from experiments.models.models import captured
from rqjax.core import check_int
from rqjax.core.treefile import replacing

MODEL = flags.DEFINE_string(
    "model", "llama-d128", "Of results/models, smollm2-135m, a folder, a GGUF file, or a name on Hugging Face."
)
CORPUS = flags.DEFINE_string(
    "corpus", "", "Folder or file with text, or prose, code, dialogue or mixed; Python's standard library by default."
)
TOKENS = flags.DEFINE_integer("tokens", 4096, "Tokens of held-out text.")
OUT = flags.DEFINE_string("out", "runs/kv.safetensors", "File to write.")


def main(argv: list[str]) -> None:
    from safetensors.flax import save_file

    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}; flags begin with --")
    try:
        _, arrays = captured(MODEL.value, CORPUS.value, check_int("tokens", TOKENS.value, 1, 2**20))
        path = Path(OUT.value)
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            save_file(arrays, file)
    except (ValueError, TypeError, LookupError, OSError) as error:
        sys.exit(f"error: {experiments.one_line(error)}")
    print(f"{len(arrays)} tensors of {TOKENS.value} tokens: {path}, {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    app.run(main, flags_parser=experiments.flags_parser)
