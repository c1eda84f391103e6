"""One new token of each sequence into a cache's rings, and the tokens out of them that may become codes, at once.

A block of threads has the keys or the values of a head. A thread reads only columns that it wrote, so that none waits.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.gpu.attention_prologue import Window
from pallas_kernels.gpu.mosaic import in_place
from pallas_kernels.gpu.registers import THREADS
from pallas_kernels.gpu.rows import Rows, spread

AT_ONCE = 16
"""Tokens that are on their way to a thread at once."""


def append_token(
    keys: jax.Array,
    values: jax.Array,
    key: jax.Array,
    value: jax.Array,
    lengths: jax.Array,
    count: jax.Array,
    held: jax.Array,
    *,
    window: Window,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Runs the kernel.

    Args:
      keys, values: rings in full precision behind their sinks, (batch, heads, slots, d) in a float dtype.
      key, value: the new token, (batch, heads, 1, d) in a float dtype.
      lengths, held: int32 (batch,) of the cache, with the new token.
      count: int32 (batch,), 0 for sequences that have no new token, else 1.
      window: which tokens are in full precision.

    Returns:
      The rings, which take the place of those given, and float32 (2 batch, heads, unit, d): keys, then values of the
      unit of tokens that become codes next.
    """
    batch, heads, slots, dim = keys.shape
    n, rows = batch * heads, Rows(THREADS, bool(interpret))
    new = [x.reshape(n, 1, dim) for x in (key, value)]

    def kernel(_, __, key_ref, value_ref, lengths_ref, count_ref, held_ref, keys_ref, values_ref, out_ref):
        i, side = lax.axis_index("n"), lax.axis_index("side")
        sequence, zero = lax.div(i, heads), rows.full(0, jnp.int32)
        length, count = lengths_ref[sequence], count_ref[sequence]
        there = rows.full(count, jnp.int32) > 0
        behind = jnp.maximum(length - count - window.sinks - window.window, 0)
        first = jnp.maximum(lax.div(behind, window.unit) * window.unit, held_ref[sequence])

        def slot(t):
            in_ring = window.sinks + lax.rem(jnp.maximum(t - window.sinks, 0), slots - window.sinks)
            return rows.full(jnp.where(t < window.sinks, t, in_ring), jnp.int32)

        def move(ring, new, out):
            for column, own in spread(rows, dim):
                x = [rows.block(new, zero, column)[0][0].astype(jnp.float32).astype(ring.dtype)]
                rows.poke(ring, slot(jnp.maximum(length - 1, 0)), column, x, there if own is None else own & there)
                for start in range(0, window.unit, AT_ONCE):
                    tokens = range(start, min(start + AT_ONCE, window.unit))
                    x = [rows.block(ring, slot(window.sinks + first + t), column)[0][0] for t in tokens]
                    for t, number in zip(tokens, x, strict=True):
                        rows.poke(out, rows.full(t, jnp.int32), column, [number.astype(jnp.float32)], own)

        for k, (ring_ref, new_ref) in enumerate(((keys_ref, key_ref), (values_ref, value_ref))):

            @pl.when(side == k)
            def _(k=k, ring_ref=ring_ref, new_ref=new_ref):
                move(ring_ref.at[i], new_ref.at[i], out_ref.at[k * batch + sequence, lax.rem(i, heads)])

    operands = [*(x.reshape(n, slots, dim) for x in (keys, values)), *new, lengths, count, held]
    out = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands[:2]]
    out.append(jax.ShapeDtypeStruct((2 * batch, heads, window.unit, dim), jnp.float32))
    grid = {"grid": (n, 2), "grid_names": ("n", "side")}
    call = in_place(kernel, out, aliases={0: 0, 1: 1}, name="append_token", interpret=interpret, **grid)
    *rings, unit = call(*operands)
    keys, values = (ring.reshape(keys.shape) for ring in rings)
    return keys, values, unit
