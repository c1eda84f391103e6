"""RotorQuant's fused kernel: sandwich, quantize and sandwich back in one launch."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import quantize, stages
from pallas_kernels.gpu.launch import (
    copy_out,
    fill_tables,
    launch,
    level_arrays,
    norm_memory,
    of_tile,
    stage_arrays,
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
    rows, whole = tile.rows, tile

    def body(m, start, _, following, carry):
        tile = whole._replace(once=m["one"][0, 0])
        norm = quantize.norm(whole, m["x of tile"], m).astype(norm_dtype).astype(jnp.float32)
        values = quantize.readable(rows, m["table of levels"])
        nearest = quantize.nearest(rows, m["table of boundaries"], bits, symmetric, norm)

        def quantized(lane):
            fields = stages.rotor(tile, m["x of tile"], m["table0"], lane)
            return [[quantize.look_up(rows, values, nearest(x)) * norm for x in xs] for xs in fields]

        tile.for_lanes(quantized, functools.partial(tile.write, m["levels of tile"]))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        rows.synchronize()
        following()
        back = functools.partial(stages.rotor, tile, m["levels of tile"], m["table1"])
        tile.for_lanes(back, functools.partial(tile.write, m["x of tile"]))
        copy_out(rows.by_token(m["x of tile"]), of_tile(m["out"], start, tile))

    memory = {
        "levels of tile": rows.swizzled(dim, jnp.float32),
        **norm_memory(tile),
        **table_memory(tile, names, 2**bits),
    }
    inputs = {"x": rows.blocks(x), **level_arrays(levels, step), **arrays}
    out = {"out": inputs["x"]}
    options = {"copied": ("x",), "prepare": functools.partial(fill_tables, tile, names)}
    return launch(body, inputs, out, memory, tile, n, interpret, "rotor_roundtrip", **options)[0].reshape(n, dim)
