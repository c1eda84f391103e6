"""Budgets that `experiments.advise` takes, and tables and plots of its advice."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness import plot
from rqjax import Strategy
from rqjax.core import check_int
from rqjax.nn import Decoder
from rqjax.nn.advise import Advice, Sensitivities

BYTES = {"KB": 1e3, "MB": 1e6, "GB": 1e9}


def parse(budget: str, context: int) -> tuple[float, int | None]:
    """Parses a budget: bits and None, or bytes and the tokens that they are for."""
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
    """Returns advice and strategies within a budget; bytes count all that a cache of so many tokens holds."""
    amount, tokens = budget
    if tokens is None:
        advice = found.under(amount)
        return advice, make(advice.names)
    least = found.under(float(found.bits[found.measured, :, 0].mean()))
    fixed = decoder.cache_nbytes(make(least.names), 1, tokens)
    a_bit = decoder.config.cached * tokens / 8 * found.measured.mean()
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
    """Returns the advice as a line for each layer."""
    lines = ["layer  bits of keys  of values   share of the loss"]
    shares = 100 * advice.kl / advice.kl.sum()
    for layer, ((keys, values), (of_keys, of_values)) in enumerate(zip(advice.rates, shares, strict=True)):
        lines.append(f"{layer:5} {keys:13g} {values:10g} {of_keys:7.1f} % + {of_values:4.1f} %")
    return "\n".join(lines)


def frontier(found: Sensitivities, advice: Advice, path: Path) -> Path:
    """Plots the expected loss by bits, as advised and with equal bits in all layers."""
    bits = found.bits[found.measured].mean(axis=(0, 1))
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
