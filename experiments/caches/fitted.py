"""Strategies of caches by name, those whose quantizers learn from data among them: "klt_trellis_3"."""

import re

import jax

import rqjax
from rqjax.core import UnknownName, unknown_name


def recipe(name: str) -> tuple[str, int] | None:
    """The recipe and bits of "rotorquant_learned_3"; None if it is no recipe that learns."""
    match = re.fullmatch(r"(\w+)_(\d)", name)
    return (match[1], int(match[2])) if match and match[1] in rqjax.FITTED else None


def check(name: str) -> None:
    """Raises `UnknownName` with the nearest names for what is no strategy and no recipe that learns."""
    if recipe(name) is None:
        try:
            rqjax.strategy(name, jax.random.key(0), 64)
        except UnknownName:
            raise unknown_name("strategy", name, [*rqjax.STRATEGIES, *rqjax.METHODS, *rqjax.FITTED]) from None
