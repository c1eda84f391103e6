"""Arguments of the decode attention kernels as they read them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.packed import Packed


class Plan(NamedTuple):
    """Static facts about a kernel."""

    dim: int
    """Dimension of the values."""
    rows: int
    """Queries of a head of keys, padded."""
    splits: int
    softcap: float | None
    keys: Any
    values: Any
    interpret: Any
    turned: int = 0
    """Dimension of keys whose codes are of vectors before they turn; else 0."""
    latent: bool = False
    """True if a key has its value as its last coordinates, with the codes of the values."""
    heads: int = 1
    """Heads of keys."""
    parts: int = 1
    """Parts in which the queries of a head are; each has a head of the kernel."""

    @property
    def scored(self) -> tuple[Any, ...]:
        """Codes whose products with queries make scores, those with most products first: before there are scores."""
        return (self.values, self.keys) if self.latent else (self.keys,)

    def tables(self, keys: Packed, values: Packed) -> tuple[jax.Array, jax.Array]:
        """Returns the levels of keys and of values as the kernel reads them."""
        return self.keys.table(keys.levels), self.values.table(values.levels)


class Arrays(NamedTuple):
    """Arrays of `Packed` that are read block by block; in the kernel their refs."""

    sections: tuple[Any, ...]
    scales: Any
    biases: Any


class Operands(NamedTuple):
    """Operands that are read block by block."""

    keys: Arrays
    values: Arrays
    shift: Any
    """(n, rows, T), if it differs from token to token."""
    begins: Any = None
    """Turns of keys at the first of each 64 tokens, see `turning.Turned`; None if keys do not turn."""


def share(begin: jax.Array, end: jax.Array, split: Any, splits: int, block: int) -> tuple[jax.Array, jax.Array]:
    """The first block of tokens, and their number, of one of `splits` shares."""
    first = begin // block
    blocks = jnp.where(end > begin, (end + block - 1) // block - first, 0)
    each = (blocks + splits - 1) // splits
    return first + split * each, jnp.clip(blocks - split * each, 0, each)
