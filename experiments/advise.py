"""The strategy of each layer of a language model, keys and values apart, that loses least in a budget of memory.

    python -m experiments.advise --model=llama-d128 --family=klt_trellis+pre_rope --budget=2.5
    python -m experiments.advise --model=llama-d128 --family=eden --budget=20MB --context=32768
    python -m experiments.advise --model=llama-d128 --family=eden --budget=100000tokens/GB
    python -m experiments.generate --model=llama-d128 --strategy=klt_trellis+pre_rope@2.5

The losses from the keys, and from the values, of each layer are measured once. The text is training text of the models
of `results/models`, or what --corpus holds. The strategies go to a file beside the checkpoint, the frontier to a plot.
"""

import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
from absl import app, flags

import experiments
from experiments.data import text
from experiments.models import models
from experiments.models.advice import frontier, parse, table, under
from rqjax.core import check_int
from rqjax.nn import save_calibration
from rqjax.nn.advise import sensitivities

MODEL = flags.DEFINE_string(
    "model", "llama-d128", "Of results/models, smollm2-135m, a folder, a GGUF file, or a name on Hugging Face."
)
FAMILY = flags.DEFINE_string(
    "family", "klt_trellis+pre_rope", "A recipe without its bits, or KEYS/VALUES; options behind it as in a strategy."
)
BUDGET = flags.DEFINE_string(
    "budget", "2.5", "2.5: stored bits a number, scales included; 20MB: of a cache of --context tokens; 40000tokens/GB."
)
CORPUS = flags.DEFINE_string(
    "corpus", "", "Folder or file with text, or prose, code, dialogue or mixed; Python's standard library by default."
)
TOKENS = flags.DEFINE_integer("tokens", 2048, "Tokens to measure with.")
WINDOW = flags.DEFINE_integer("window", 1024, "Tokens that the model reads at a time.")
CONTEXT = flags.DEFINE_integer("context", 8192, "Tokens of the cache that a budget in bytes is for.")
SEED = flags.DEFINE_integer("seed", 0, "Of the quantizers.")
PLOT = flags.DEFINE_string("plot", "runs/advise.png", "Where the frontier goes.")

SIZES = (8192, 32_768)
"""Tokens of the caches whose bytes are shown."""


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}; flags begin with --")
    try:
        _advise()
    except (ValueError, TypeError, LookupError, OSError) as error:
        sys.exit(f"error: {experiments.one_line(error)}")


def _advise() -> None:
    budget = parse(BUDGET.value, check_int("context", CONTEXT.value, 1, 2**30))
    window = check_int("window", WINDOW.value, 2, 2**20)
    count = -(-check_int("tokens", TOKENS.value, 2, 2**24) // window)
    decoder, tokenizer = models.load(MODEL.value)
    tokens = jnp.asarray(text.sample(CORPUS.value, "seen", tokenizer, window, count)[:, :-1])
    key, start = jax.random.key(SEED.value), time.perf_counter()
    found = sensitivities(decoder, tokens, key, family=FAMILY.value)
    advice, strategies = under(found, decoder, budget, lambda names: decoder.calibrate(tokens, names, key))
    seconds = time.perf_counter() - start
    path = save_calibration(strategies, decoder, models.folder(MODEL.value), f"{FAMILY.value}@{BUDGET.value}")
    print(table(advice))
    print(f"{advice.bits:.3f} bits a number, scales included; KL about {advice.kl.sum():.2g} nats a token")
    for size in SIZES:
        print(f"  {size:6,} tokens {decoder.cache_nbytes(strategies, 1, size) / 1e6:8.2f} MB")
    print(f"{seconds:.0f} s on {tokens.size} tokens; {path}")
    print(frontier(found, advice, Path(PLOT.value)))


if __name__ == "__main__":
    app.run(main, flags_parser=experiments.flags_parser)
