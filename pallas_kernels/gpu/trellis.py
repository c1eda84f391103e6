"""Trellis codes in one launch: the Viterbi algorithm with costs of states and survivors in shared memory.

A thread has a family: the 2^b states that differ only in their lowest b bits, which lead to the same 2^b states.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import packing
from pallas_kernels.gpu.launch import lane_memory, launch, of_tile
from pallas_kernels.gpu.rows import THREADS, Rows
from pallas_kernels.gpu.stages import Tile

STATE_BITS, MAX_BITS = 8, 4
IMPOSSIBLE = 1e30
"""The cost of a state that a path may not be in."""


def encode(x: jax.Array, values: jax.Array, *, bits: int, interpret: Any = False) -> jax.Array:
    """Packed codes of the paths nearest to vectors, closed to a ring: those of `rqjax.arrays.viterbi.tail_biting`.

    Args:
      x: (n, d) in one of `launch.DTYPES`, d a multiple of 8.
      values: (256,) float32, the level of each state.
      bits: of a code, 1 to 4.
      interpret: `mosaic.interpreter()` to run on a CPU.

    Returns:
      Words (n, words) uint32 in the layout of `packing`. The coordinate in plane k and lane j is at time 8 j + k.
    """
    (n, dim), branches, families = x.shape, 2**bits, 2 ** (STATE_BITS - bits)
    rows = Rows(THREADS // families, bool(interpret))
    tile, low = Tile(rows, dim), np.uint32(branches - 1)
    window = min(dim // 2, -(-8 * STATE_BITS // bits))
    width = min(branches, 4)

    def body(m, start, count, *_):
        thread = rows.thread
        vector, family = lax.div(thread, families), lax.rem(thread, families)
        levels = [rows.peek(m["values"], thread * 0, c * families + family)[0] for c in range(branches)]

        def read(i, _):
            place = jnp.minimum(thread + i * THREADS, rows.tokens * dim - 1)
            token, column = lax.div(place, dim), lax.rem(place, dim)
            number = rows.peek(of_tile(m["x"], start, tile), jnp.minimum(token, count - 1), column)[0]
            time = 8 * lax.rem(column, tile.lanes) + lax.div(column, tile.lanes)
            rows.poke(m["samples"], token, time, [number.astype(jnp.float32)])

        def begin(costs):
            for c in range(branches):
                rows.poke(m["even"], vector, c * families + family, [costs(c * families + family)])
            rows.synchronize()

        def costs_of(ref, family):
            found = [rows.peek(ref, vector, branches * family + i, width) for i in range(0, branches, width)]
            return [cost for part in found for cost in part]

        def step(k, sample):
            """Computes costs after the k-th sample of some, and returns the lowest bits of the family's best state
            before it.

            The bits take the place of the cost's lowest ones, so that one minimum finds both.
            """
            source, target = (m["even"], m["odd"]) if k % 2 == 0 else (m["odd"], m["even"])
            keys = [(lax.bitcast_convert_type(cost, jnp.uint32) & ~low) | jnp.uint32(i)
                    for i, cost in enumerate(costs_of(source, family))]  # fmt: skip
            best = functools.reduce(jnp.minimum, keys)
            cost = lax.bitcast_convert_type(best & ~low, jnp.float32)
            for c, level in enumerate(levels):
                rows.poke(target, vector, c * families + family, [cost + (sample - level) * (sample - level)])
            rows.synchronize()
            return best & low

        def before_the_seam(i, _):
            for k, sample in enumerate(rows.peek(m["samples"], vector, thread * 0 + (dim - window + 2 * i), 2)):
                step(k, sample)

        def forward(lane, _, steps=8):
            """Takes the samples of a lane and keeps the survivors."""
            word = rows.full(0, jnp.uint32)
            samples = [x for i in (0, 4) for x in rows.peek(m["samples"], vector, thread * 0 + (8 * lane + i), 4)]
            for k, sample in enumerate(samples[:steps]):
                word |= step(k, sample) << jnp.uint32(bits * k)
            rows.poke(m["survivors"], vector, lane * families + family, [word])

        def backward(lane, state, steps=8):
            """Returns the state before the samples of a lane, from that after them, and their codes."""
            word = rows.full(0, jnp.uint32)
            for k in reversed(range(steps)):
                word |= (state >> (STATE_BITS - bits)).astype(jnp.uint32) << jnp.uint32(bits * k)
                now = state & (families - 1)
                survivor = rows.peek(m["survivors"], vector, lane * families + now)[0] >> jnp.uint32(bits * k)
                state = now * branches + (survivor & low).astype(jnp.int32)
            return state, word

        def least(costs):
            """Returns the least cost and its first index."""
            value, index = costs[0], thread * 0
            for i, cost in enumerate(costs[1:]):
                index, value = jnp.where(cost < value, thread * 0 + (i + 1), index), jnp.minimum(cost, value)
            return value, index

        def best_family():
            rows.poke(m["odd"], vector, family, [least(costs_of(m["even"], family))[0]])
            rows.synchronize()

            def four(i, best):
                value, index = least(rows.peek(m["odd"], vector, thread * 0 + 4 * i, 4))
                return jnp.minimum(value, best[0]), jnp.where(value < best[0], index + 4 * i, best[1])

            return lax.fori_loop(0, families // 4, four, (rows.full(jnp.inf), thread * 0))[1]

        def last_state(family):
            return branches * family + least(costs_of(m["even"], family))[1]

        lax.fori_loop(0, -(-rows.tokens * dim // THREADS), read, None)
        # A free path through the samples around the seam finds the family in which both ends of the ring meet.
        begin(lambda state: rows.full(0.0))
        lax.fori_loop(0, window // 2, before_the_seam, None)
        lax.fori_loop(0, window // 8, forward, None)
        if window % 8:
            forward(window // 8, None, window % 8)
        rows.synchronize()
        state = last_state(best_family())
        rows.synchronize()
        if window % 8:
            state, _ = backward(window // 8, state, window % 8)
        state = lax.fori_loop(0, window // 8, lambda i, s: backward(window // 8 - 1 - i, s)[0], state)
        meeting = state >> bits

        begin(lambda state: jnp.where(state >> bits == meeting, 0.0, IMPOSSIBLE))
        lax.fori_loop(0, tile.lanes, forward, None)
        rows.synchronize()

        def written(i, state):
            lane = tile.lanes - 1 - i
            state, word = backward(lane, state)
            rows.poke(m["lanes"], vector, thread * 0 + lane, [word], family == 0)
            return state

        lax.fori_loop(0, tile.lanes, written, last_state(meeting))
        rows.synchronize()
        packing.write_words(rows, m["lanes"], of_tile(m["words"], start, tile), dim, bits, count)

    memory = {
        "samples": plgpu.SMEM((rows.tokens, dim), jnp.float32),
        "even": plgpu.SMEM((rows.tokens, 2**STATE_BITS), jnp.float32),
        "odd": plgpu.SMEM((rows.tokens, 2**STATE_BITS), jnp.float32),
        "survivors": plgpu.SMEM((rows.tokens, tile.lanes * families), jnp.uint32),
        **lane_memory(tile, bits),
    }
    out = {"words": jax.ShapeDtypeStruct((n, packing.words_per_vector(dim, bits)), jnp.uint32)}
    return launch(body, {"x": x, "values": values[None]}, out, memory, tile, n, interpret, "encode_trellis")[0]
