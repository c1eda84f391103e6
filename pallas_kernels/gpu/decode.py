"""Unpack, look up, rotate back and scale in one launch: codes are read once, vectors written once."""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import packing, quantize
from pallas_kernels.gpu.launch import (
    Rotation,
    copy_out,
    fill_tables,
    launch,
    level_arrays,
    of_tile,
    padded,
    rotate,
    stage_arrays,
    stage_memory,
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
    rows, whole = tile.rows, tile

    def ahead(m, start):
        """The tile's norms and words in registers."""
        count = n - start
        norm = rows.peek(of_tile(m["norm"], start, tile), jnp.minimum(rows.token, count - 1), rows.part * 0)[0]
        return norm, packing.load_words(rows, of_tile(m["words"], start, tile), dim, bits, count)

    def prepare(m, start):
        fill_tables(tile, names, m)
        return ahead(m, start)

    def body(m, start, _, following, carry):
        tile = whole._replace(once=m["one"][0, 0])
        norm, words = carry
        packing.store_words(rows, m["words of tile"], words, dim, bits)
        rows.synchronize()
        carry = ahead(m, following())
        levels, norm = quantize.readable(rows, m["table of levels"]), norm.astype(jnp.float32)

        def unpacked(lane):
            sections = packing.sections(bits)
            words = packing.read_lanes(rows, m["words of tile"], lane, tile.width, dim, bits)

            def level(k, i):
                parts = [(word[i] >> (b * k)) & ((1 << b) - 1) for word, b in zip(words, sections, strict=True)]
                index = functools.reduce(operator.or_, [part << (4 * s) for s, part in enumerate(parts)])
                return quantize.look_up(rows, levels, index) * norm

            return [[level(k, i) for i in range(tile.width)] for k in range(8)]

        tile.for_lanes(unpacked, functools.partial(tile.write, m["levels of tile"]))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        rows.synchronize()
        tile.for_lanes(rotate(tile, names, m, m["levels of tile"]), functools.partial(tile.write, m["tile"]))
        copy_out(rows.by_token(m["tile"]), of_tile(m["out"], start, tile))
        return carry

    memory = {
        "levels of tile": rows.swizzled(dim, jnp.float32),
        "tile": rows.swizzled(dim, dtype),
        **stage_memory(tile, names, jnp.float32),
        "words of tile": padded(tile, packing.words_per_vector(dim, bits)),
        **table_memory(tile, names, 2**bits, boundaries=False),
    }
    inputs = {"norm": norm[:, None], "words": words, **level_arrays(levels, step), **arrays}
    out = {"out": jax.eval_shape(rows.blocks, jax.ShapeDtypeStruct((n, dim), dtype))}
    name = "_".join(["decode", *names])
    return launch(body, inputs, out, memory, tile, n, interpret, name, prepare=prepare)[0].reshape(n, dim)
