"""Arrays of codes with an axis of tokens, as caches hold them."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, Shaped

from rqjax.core import platforms
from rqjax.core.pytree import pytree, static

PAGE = 128
"""Tokens by which the capacity of a cache grows: what a page holds, and what a GPU kernel takes at a time."""


@pytree
class TokenArray:
    """An array with an axis of tokens, `tokens_per_entry` to an entry.

    Numbers of 16 bits are held as bits: XLA's CPU backend would write a bfloat16 by way of a float32 copy of the whole,
    up to jaxlib 0.10.
    """

    bits: Shaped[Array, "..."]
    axis: int = static()
    tokens_per_entry: int = static()
    dtype: str = static()

    @classmethod
    def of(cls, x: Shaped[Array, "..."], axis: int, tokens_per_entry: int = 1) -> "TokenArray":
        return cls(
            lax.bitcast_convert_type(x, jnp.uint16) if x.dtype.itemsize == 2 else x,
            axis,
            tokens_per_entry,
            x.dtype.name,
        )

    def empty(self, tokens: int) -> "TokenArray":
        """Makes zeros of the same form, for `tokens` tokens."""
        shape = [*self.bits.shape]
        shape[self.axis] = tokens // self.tokens_per_entry
        return dataclasses.replace(self, bits=jnp.zeros(shape, self.bits.dtype))

    def read(
        self, start: Int[Array, ""] | int, tokens: int, tables: Int[Array, "batch pages"] | None = None
    ) -> Shaped[Array, "..."]:
        """The entries of some tokens from token `start` on: of sequences, or by their tables of pages, on axis 0."""
        entries, bits = tokens // self.tokens_per_entry, self.bits
        if tables is not None:
            bits = self._gathered(lax.dynamic_slice_in_dim(tables, start // PAGE, tokens // PAGE, 1))
        elif entries < bits.shape[self.axis]:  # a slice of all would still be a copy
            bits = lax.dynamic_slice_in_dim(bits, start // self.tokens_per_entry, entries, self.axis)
        return lax.bitcast_convert_type(bits, self.dtype)

    def _gathered(self, pages: Int[Array, "batch pages"]) -> Shaped[Array, "batch ..."]:
        """Gathers pages side by side. Where tokens come last a CPU copies them one by one: a gather with short runs
        takes it 20 times as long. On a GPU each copy would be a launch."""
        batch, count = pages.shape
        shape = [batch, *self.bits.shape[1:]]
        shape[self.axis] *= count
        if self.axis < self.bits.ndim - 1 or platforms.on_gpu():
            return jnp.moveaxis(self.bits[jnp.maximum(pages, 0)], 1, self.axis).reshape(shape)

        def copied(i: Array, out: Array) -> Array:
            at = [i // count, *[jnp.zeros_like(i)] * (out.ndim - 1)]
            at[self.axis] = i % count * self.bits.shape[self.axis]
            page = lax.dynamic_slice_in_dim(self.bits, jnp.maximum(pages[i // count, i % count], 0), 1)
            return lax.dynamic_update_slice(out, page, at)

        return lax.fori_loop(0, batch * count, copied, jnp.zeros(shape, self.bits.dtype))

    def write(
        self,
        new: "TokenArray",
        start: Int[Array, "batch"],
        active: Bool[Array, "batch units"],
        tables: Int[Array, "batch pages"] | None = None,
    ) -> "TokenArray":
        """Writes units of `new`, each within a page, from token `start[b]` on in each sequence b, those that are
        active: by one scatter, without a read of what was there.

        The scatter has an index for each axis, or XLA would transpose the array, a copy of the cache. Where tokens come
        last, a GPU writes those of a single unit one by one: a launch of its own would transpose a unit.
        """
        batch, units = active.shape
        axis, rank, shape = self.axis, self.bits.ndim, new.bits.shape
        alone = units == 1 and axis == 3 and platforms.on_gpu()
        if alone:
            units, active = shape[axis], jnp.repeat(active, shape[axis], axis=1)
        entries = shape[axis] // units
        token = start[:, None] + entries * self.tokens_per_entry * jnp.arange(units)
        row = jnp.broadcast_to(jnp.arange(batch)[:, None], token.shape)
        if tables is not None:
            row = jnp.take_along_axis(tables, jnp.minimum(token // PAGE, tables.shape[1] - 1), axis=1)
            active, token = active & (row >= 0), token % PAGE
        at = [jnp.zeros_like(token)] * rank
        at[0], at[axis] = jnp.where(active, row, len(self.bits)), token // self.tokens_per_entry
        updates = new.bits if alone else new.bits.reshape(*shape[:axis], units, entries, *shape[axis + 1 :])
        numbers = lax.ScatterDimensionNumbers(
            update_window_dims=tuple(i for i in range(updates.ndim) if i not in (0, axis)),
            inserted_window_dims=(0, axis) if alone else (0,),
            scatter_dims_to_operand_dims=tuple(range(rank)),
        )
        mode = lax.GatherScatterMode.FILL_OR_DROP  # rows out of range are dropped
        places = jnp.stack(at, axis=-1)
        bits = lax.scatter(self.bits, places, updates, numbers, unique_indices=True, mode=mode)
        return dataclasses.replace(self, bits=bits)

    def row(self, b: Int[Array, ""]) -> "TokenArray":
        """The array of one sequence, or page, alone."""
        return dataclasses.replace(self, bits=lax.dynamic_slice_in_dim(self.bits, b, 1))

    def extend(self, tokens: int) -> "TokenArray":
        """Adds room for `tokens` more tokens."""
        widths = [(0, 0)] * self.bits.ndim
        widths[self.axis] = (0, tokens // self.tokens_per_entry)
        return dataclasses.replace(self, bits=jnp.pad(self.bits, widths))

    @classmethod
    def is_one(cls, x: Any) -> bool:
        return isinstance(x, cls)
