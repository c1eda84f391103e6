"""RotorQuant's fused kernel: sandwich, quantize and sandwich back in one launch."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.gpu import quantize, stages
from pallas_kernels.gpu.launch import (
    copy_in,
    copy_out,
    fill_tables,
    launch,
    level_arrays,
    norm_memory,
    of_tile,
    stage_arrays,
    start_of,
    table_memory,
    tile_of,
)


def rotor_roundtrip(
    x: jax.Array,
    rotor: tuple[jax.Array, jax.Array],
    levels: jax.Array,
    step: jax.Array,
    *,
    symmetric: bool,
    norm_dtype: Any = jnp.bfloat16,
    tokens: int | None = None,
    interpret: Any = False,
) -> jax.Array:
    """Returns x (n, d) encoded and decoded, in its dtype, without storing codes (RotorQuant, section 4).

    `rotor` has the arrays of a stage, as in `launch`; the other arguments are those of `encode.encode` and
    `decode.decode`.
    """
    (n, dim), bits = x.shape, (levels.shape[0] - 1).bit_length()
    names, arrays = stage_arrays((("rotor", rotor), ("rotor_inverse", rotor)))
    tile = tile_of("roundtrip", tokens, n, dim, interpret)
    rows = tile.rows

    def body(m):
        start, _ = start_of(tile, n)
        of_x = of_tile(m["x"], start, tile)
        copy_in(of_x, rows.by_token(m["tile"]), m, meanwhile=functools.partial(fill_tables, tile, names, m))
        norm = quantize.norm(tile, m["tile"], m).astype(norm_dtype).astype(jnp.float32)
        values = quantize.readable(rows, m["table of levels"])
        nearest = quantize.nearest(rows, m["table of boundaries"], bits, symmetric, norm)

        def quantized(lane):
            fields = stages.rotor(tile, m["tile"], m["table0"], lane)
            return [[quantize.look_up(rows, values, nearest(x)) * norm for x in xs] for xs in fields]

        tile.for_lanes(quantized, functools.partial(tile.write, m["levels of tile"]))
        rows.synchronize()
        back = functools.partial(stages.rotor, tile, m["levels of tile"], m["table1"])
        tile.for_lanes(back, functools.partial(tile.write, m["tile"]))
        copy_out(rows.by_token(m["tile"]), of_tile(m["out"], start, tile))

    memory = {
        "tile": rows.swizzled(dim, x.dtype),
        "levels of tile": rows.swizzled(dim, jnp.float32),
        **norm_memory(tile),
        **table_memory(tile, names, 2**bits),
    }
    inputs = {"x": rows.blocks(x), **level_arrays(levels, step), **arrays}
    out = {"out": inputs["x"]}
    return launch(body, inputs, out, memory, tile, n, interpret, "rotor_roundtrip")[0].reshape(n, dim)
