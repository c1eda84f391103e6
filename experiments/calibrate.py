"""Quantizers fitted to the keys and values of a language model, in a file beside its checkpoint.

    python -m experiments.calibrate --model=llama-d128 --strategy=klt_trellis_2+pre_rope
    python -m experiments.generate --model=llama-d128 --strategy=klt_trellis_2+pre_rope

The text is training text of the models of `results/models`, else what --corpus holds.
"""

import sys
import time

import jax
import jax.numpy as jnp
from absl import app, flags

import experiments
from experiments.data import text
from experiments.models import fitted, models
from rqjax.core import check_int
from rqjax.nn import save_calibration

MODEL = flags.DEFINE_string(
    "model", "llama-d128", "Of results/models, smollm2-135m, a folder, a GGUF file, or a name on Hugging Face."
)
STRATEGY = flags.DEFINE_string(
    "strategy", "klt_trellis_2+pre_rope", "As in experiments.generate; recipes that learn, too. +turned has its mean."
)
CORPUS = flags.DEFINE_string(
    "corpus", "", "Folder or file with text, or prose, code, dialogue or mixed; Python's standard library by default."
)
TOKENS = flags.DEFINE_integer("tokens", 8192, "Tokens to fit to.")
CONTEXT = flags.DEFINE_integer("context", 2048, "Tokens that the model reads at a time.")
SEED = flags.DEFINE_integer("seed", 0, "Of the quantizers.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}; flags begin with --")
    try:
        fitted.check(STRATEGY.value)
        context = check_int("context", CONTEXT.value, 2, 2**20)
        count = -(-check_int("tokens", TOKENS.value, 2, 2**24) // context)
        decoder, tokenizer = models.load(MODEL.value)
        tokens = jnp.asarray(text.sample(CORPUS.value, "seen", tokenizer, context, count)[:, :-1])
        start = time.perf_counter()
        strategies = jax.block_until_ready(decoder.calibrate(tokens, STRATEGY.value, jax.random.key(SEED.value)))
        seconds = time.perf_counter() - start
        path = save_calibration(strategies, decoder, models.folder(MODEL.value), STRATEGY.value)
    except (ValueError, TypeError, LookupError, OSError) as error:
        sys.exit(f"error: {experiments.one_line(error)}")
    print(f"{len(strategies)} layers fitted to {tokens.size} tokens in {seconds:.1f} s: {path}")


if __name__ == "__main__":
    app.run(main, flags_parser=experiments.flags_parser)
