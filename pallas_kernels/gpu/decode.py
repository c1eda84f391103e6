"""Unpack, look up, rotate back and scale in one launch: codes are read once, vectors written once."""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.gpu import packing, quantize
from pallas_kernels.gpu.launch import (
    Rotation,
    copy_out,
    fill_tables,
    lane_memory,
    launch,
    level_arrays,
    of_tile,
    rotate,
    stage_arrays,
    stage_memory,
    start_of,
    table_memory,
    tile_of,
)


def decode(
    norm: jax.Array,
    words: jax.Array,
    rotation: Rotation,
    levels: jax.Array,
    step: jax.Array,
    *,
    dim: int,
    dtype: Any = jnp.float32,
    tokens: int | None = None,
    interpret: Any = False,
) -> jax.Array:
    """The vectors (n, d) that norms and packed indices stand for.

    Args:
      norm: (n,) of a float dtype.
      words: (n, words) uint32, in the layout of `packing`.
      rotation: stages of the inverse rotation, as in `launch`; not dense.
      levels, step: as in `encode.encode`.
      dim: of the vectors.
      dtype: of the vectors, one of `launch.DTYPES`.
      tokens, interpret: as in `encode.encode`.
    """
    names, arrays = stage_arrays(rotation)
    n, bits = words.shape[0], (levels.shape[0] - 1).bit_length()
    tile = tile_of("decode", tokens, n, dim, interpret)
    rows = tile.rows

    def body(m):
        start, count = start_of(tile, n)
        fill_tables(tile, names, m)
        packing.read_lanes(rows, of_tile(m["words"], start, tile), m["lanes"], dim, bits, count)
        rows.synchronize()
        levels = quantize.readable(rows, m["table of levels"])
        token = jnp.minimum(rows.token, count - 1)
        norm = rows.peek(of_tile(m["norm"], start, tile), token, rows.part * 0)[0].astype(jnp.float32)

        def unpacked(lane):
            sections = packing.sections(bits)
            first = [lane + section * tile.lanes for section in range(len(sections))]
            words = [rows.peek(m["lanes"], rows.token, at, tile.width) for at in first]

            def level(k, i):
                parts = [(word[i] >> (b * k)) & ((1 << b) - 1) for word, b in zip(words, sections, strict=True)]
                index = functools.reduce(operator.or_, [part << (4 * s) for s, part in enumerate(parts)])
                return quantize.look_up(rows, levels, index) * norm

            return [[level(k, i) for i in range(tile.width)] for k in range(8)]

        tile.for_lanes(unpacked, functools.partial(tile.write, m["levels of tile"]))
        rows.synchronize()
        tile.for_lanes(rotate(tile, names, m, m["levels of tile"]), functools.partial(tile.write, m["tile"]))
        copy_out(rows.by_token(m["tile"]), of_tile(m["out"], start, tile))

    memory = {
        "levels of tile": rows.swizzled(dim, jnp.float32),
        "tile": rows.swizzled(dim, dtype),
        **stage_memory(tile, names, jnp.float32),
        **lane_memory(tile, bits),
        **table_memory(tile, names, 2**bits, boundaries=False),
    }
    inputs = {"norm": norm[:, None], "words": words, **level_arrays(levels, step), **arrays}
    out = {"out": jax.eval_shape(rows.blocks, jax.ShapeDtypeStruct((n, dim), dtype))}
    return launch(body, inputs, out, memory, tile, n, interpret, "_".join(["decode", *names]))[0].reshape(n, dim)
