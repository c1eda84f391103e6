"""Strategies of caches by name, those whose quantizers learn from data among them: "klt_trellis_3"."""

import rqjax
from rqjax.cache.strategies import parsed, with_bits
from rqjax.nn.calibration import checked


def check(name: str) -> None:
    """Raises `UnknownName` with the nearest names for what is no strategy and no recipe that learns."""
    checked(name)


def learns(name: str) -> bool:
    """Whether the quantizer of keys or of values learns from data."""
    return any(with_bits(part)[0] in rqjax.FITTED for part in parsed(name)[0])
