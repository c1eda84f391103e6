"""The strategy of each layer of a language model, keys and values apart, that loses least in a budget of memory.

    python -m experiments.advise --model=llama-d128 --family=klt_trellis+pre_rope --budget=2.5
    python -m experiments.advise --model=llama-d128 --family=eden --budget=20MB --context=32768
    python -m experiments.advise --model=llama-d128 --family=eden --budget=100000tokens/GB
    python -m experiments.generate --model=llama-d128 --strategy=klt_trellis+pre_rope@2.5

What the keys, and the values, of each layer cost is measured once, on training text of the models of `results/models`
or on what --corpus holds. The strategies go to a file beside the checkpoint, and the frontier to a plot.
"""

import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

import experiments
from experiments.data import text
from experiments.harness import plot
from experiments.language import models
from rqjax import Strategy
from rqjax.core import check_int
from rqjax.nn import Decoder, save_calibration
from rqjax.nn.advise import Advice, Sensitivities, sensitivities

MODEL = flags.DEFINE_string("model", "llama-d128", "Of results/models, a folder, or a name on Hugging Face.")
FAMILY = flags.DEFINE_string(
    "family", "klt_trellis+pre_rope", "A recipe without its bits, or KEYS/VALUES; options behind it as in a strategy."
)
BUDGET = flags.DEFINE_string(
    "budget", "2.5", "2.5: stored bits a number, scales included; 20MB: of a cache of --context tokens; 40000tokens/GB."
)
CORPUS = flags.DEFINE_string("corpus", "", "Folder or file with text; files of Python's standard library by default.")
TOKENS = flags.DEFINE_integer("tokens", 2048, "Tokens to measure with.")
WINDOW = flags.DEFINE_integer("window", 1024, "Tokens that the model reads at a time.")
CONTEXT = flags.DEFINE_integer("context", 8192, "Tokens of the cache that a budget in bytes is for.")
SEED = flags.DEFINE_integer("seed", 0, "Of the quantizers.")
PLOT = flags.DEFINE_string("plot", "runs/advise.png", "Where the frontier goes.")

BYTES = {"KB": 1e3, "MB": 1e6, "GB": 1e9}
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
    tokens = jnp.asarray(text.windows(text.seen(CORPUS.value, tokenizer), window, count)[:, :-1])
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


def parse(budget: str, context: int) -> tuple[float, int | None]:
    """Bits and None, or bytes and the tokens that they are for."""
    match = re.fullmatch(r"(\d+\.?\d*)(bits|KB|MB|GB|tokens/GB)?", budget)
    if match is None or not float(match[1]):
        raise ValueError(f"expected a budget like 2.5, 20MB or 40000tokens/GB, got {budget!r}")
    number, unit = float(match[1]), match[2] or "bits"
    if unit == "tokens/GB":
        return 1e9, check_int("tokens", int(number), 1, 2**30)
    return (number, None) if unit == "bits" else (number * BYTES[unit], context)


def under(
    found: Sensitivities,
    decoder: Decoder,
    budget: tuple[float, int | None],
    make: Callable[[list[str]], list[Strategy]],
) -> tuple[Advice, list[Strategy]]:
    """What keeps to a budget; one in bytes counts all that a cache of so many tokens holds."""
    amount, tokens = budget
    if tokens is None:
        advice = found.under(amount)
        return advice, make(advice.names)
    least = found.under(float(found.bits[..., 0].mean()))
    fixed = decoder.cache_nbytes(make(least.names), 1, tokens)
    shape = decoder.config
    a_bit = 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim * tokens / 8
    if fixed > amount:
        raise ValueError(
            f"expected a budget of at least {fixed / 1e6:.4g} MB for {tokens:,} tokens, the least of {found.family},"
            f" got {amount / 1e6:.4g} MB"
        )
    advice, strategies, bits = least, make(least.names), least.bits + (amount - fixed) / a_bit
    while True:  # quantizers with more bits have larger tables, so that the first guess may be too much
        advice = found.under(max(bits, least.bits))
        strategies = make(advice.names)
        over = decoder.cache_nbytes(strategies, 1, tokens) - amount
        if over <= 0 or advice.names == least.names:
            return advice, strategies
        bits = min(bits, advice.bits) - over / a_bit


def table(advice: Advice) -> str:
    """A line for each layer."""
    lines = ["layer  bits of keys  of values   share of the loss"]
    shares = 100 * advice.kl / advice.kl.sum()
    for layer, ((keys, values), (of_keys, of_values)) in enumerate(zip(advice.rates, shares, strict=True)):
        lines.append(f"{layer:5} {keys:13g} {values:10g} {of_keys:7.1f} % + {of_values:4.1f} %")
    return "\n".join(lines)


def frontier(found: Sensitivities, advice: Advice, path: Path) -> Path:
    """The expected loss by bits: advised, and of equal bits in all layers."""
    bits = found.bits.mean(axis=(0, 1))
    rows: list[dict[str, Any]] = [
        {"point": {"bits": "the same in all layers"}, "metrics": {"stored_bits": b, "divergence": kl}}
        for b, kl in zip(bits, found.kl.sum(axis=(0, 1)), strict=True)
    ]
    best = [found.under(b) for b in np.linspace(bits[0], bits[-1], 25)]
    rows += [
        {"point": {"bits": "advised"}, "metrics": {"stored_bits": one.bits, "divergence": one.kl.sum()}} for one in best
    ]
    chosen = {"stored_bits": advice.bits, "divergence": advice.kl.sum()}
    rows.append({"point": {"bits": f"chosen: {advice.bits:.3g} bits"}, "metrics": chosen})
    path.parent.mkdir(parents=True, exist_ok=True)
    return plot.curves(rows, path, x="stored_bits", y="divergence", series="bits", log=True)


if __name__ == "__main__":
    app.run(main, flags_parser=experiments.flags_parser)
