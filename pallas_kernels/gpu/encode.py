"""Rotate, quantize and pack in one launch: vectors are read once, norms and codes written once."""

import functools
import itertools
import operator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import packing, quantize, stages
from pallas_kernels.gpu.launch import (
    STAGES,
    Rotation,
    fill_tables,
    lane_memory,
    launch,
    level_arrays,
    norm_memory,
    of_tile,
    rotate,
    stage_arrays,
    stage_memory,
    table_memory,
    tile_of,
)
from pallas_kernels.packed import LONGEST


def encode(
    x: jax.Array,
    rotation: Rotation,
    levels: jax.Array,
    step: jax.Array,
    *,
    symmetric: bool,
    scaled: str | None = None,
    minus: jax.Array | None = None,
    norm_dtype: Any = jnp.bfloat16,
    tokens: int | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """Norms and packed indices of vectors (TurboQuant, Algorithm 1; RotorQuant, section 3).

    With `minus`, two levels and a matrix for the rotation it is the sketch of a residual (TurboQuant, Algorithm 2).

    Args:
      x: (n, d) in one of `launch.DTYPES`, d one of `launch.DIMS` (of `launch.DENSE_DIMS` with a dense stage).
      rotation: stages, as in `launch`.
      levels: (2**bits,) whole numbers or floats, ascending, 1 to 8 bits: an index is the number of boundaries, in the
        middle between levels, below x / |x|.
      step: () float32, by which levels are multiplied.
      symmetric: whether levels[::-1] == -levels.
      scaled: "mse" or "unbiased", to store the norm times the best scale of the levels (EDEN) in the place of the norm.
      minus: (n, d) float32, which is subtracted from x first.
      norm_dtype: of the norms.
      tokens: of a tile: 128, 64 or 32; `launch.tile_tokens`, if not given.
      interpret: `mosaic.interpreter()` to run on a CPU.

    Returns:
      Norms, or scales, (n,) and words (n, words) uint32 in the layout of `packing`.
    """
    (n, dim), bits, most = x.shape, (levels.shape[0] - 1).bit_length(), float(jnp.finfo(norm_dtype).max)
    names, arrays = stage_arrays(rotation)
    dense = "dense" in names
    tile = tile_of("encode", 64 if dense else tokens, n, dim, interpret)
    rows, whole = tile.rows, tile

    def body(m, start, count, following, _):
        tile = whole._replace(once=m["one"][0, 0])
        if not dense:
            following()
        source = m["x of tile"]
        if minus is not None:
            source = m["minus of tile"]
            difference = functools.partial(_difference, tile, m["x of tile"], source)
            tile.for_lanes(difference, functools.partial(tile.write, source))
            rows.synchronize()
        norm = quantize.norm(whole, source, m)
        if scaled is None:  # directions are relative to the norm as it is stored
            norm = jnp.where((norm > most) & (norm < jnp.inf), most, norm).astype(norm_dtype).astype(jnp.float32)
        values = quantize.readable(rows, m["table of levels"])

        def pack(token, norm):
            """Returns what packs some lanes of a token and adds up their levels."""
            nearest = quantize.nearest(rows, m["table of boundaries"], bits, symmetric, norm)

            def of_lanes(lane, fields, sums):
                indices = [[nearest(value) for value in some] for some in fields]
                if scaled is not None:
                    for value, index in zip(*(itertools.chain(*part) for part in (fields, indices)), strict=True):
                        level = quantize.look_up(rows, values, index)
                        sums = sums[0] + level * value, sums[1] + level * level
                for section, width in enumerate(packing.sections(bits)):
                    parts = indices
                    if bits > 4:
                        parts = [[(v >> 4 * section) & jnp.uint32((1 << width) - 1) for v in some] for some in indices]
                    # A sum of products takes one instruction a field, shifts and ors two.
                    parts = [[v * jnp.uint32(1 << (width * k)) for v in some] for k, some in enumerate(parts)]
                    words = [functools.reduce(operator.add, column) for column in zip(*parts, strict=True)]
                    rows.poke(m["lanes"], token, section * tile.lanes + lane, words)
                return sums

            return of_lanes

        zeros = () if scaled is None else (rows.full(0.0), rows.full(0.0))
        if dense:
            halves, zero = (m["high halves"], m["low halves"]), rows.part * 0
            rows.poke(m["of tokens"], zero, rows.token, [norm])  # read behind the barrier of the product
            numbers = rows.of_products(stages.dense(tile, source, m["stage0.0"], halves, following))
            sums = []
            for h in range(2):
                token = (rows.thread >> 5) * 16 + ((rows.thread >> 2) & 7) + 8 * h
                of_lanes = pack(token, rows.peek(m["of tokens"], zero, token)[0])
                total = zeros
                for j in range(groups := tile.lanes // 8):
                    fields = [numbers[k * groups + j][h] for k in range(8)]
                    total = of_lanes(8 * j + 2 * (rows.thread & 3), fields, total)
                for k, part in enumerate(total):
                    rows.poke(m["of tokens"], zero + (1 + k), token, [rows.over_lanes(operator.add, part, 4)])
            rows.synchronize()
            norm = rows.peek(m["of tokens"], zero, rows.token)[0]  # it took a register during the product otherwise
            if scaled is not None:
                sums = [rows.peek(m["of tokens"], zero + k, rows.token)[0] for k in (1, 2)]
        else:
            produce, of_lanes = rotate(tile, names, m, source), pack(rows.token, norm)
            sums = tile.over_lanes(lambda lane, sums: of_lanes(lane, produce(lane), sums), zeros)
            plgpu.commit_smem()  # the vectors have been read, so others may be copied to their place
            sums = [quantize.across(rows, m["partial"], operator.add, total) for total in sums]
        if scaled is not None:  # as `Scaled` has it: squares of norms may leave float32
            product, square = sums
            cosine = jnp.where(norm > 0, product / norm, 0.0)
            least = jnp.maximum(cosine, quantize.square_root(square) * (1 / LONGEST))
            best = cosine / square if scaled == "mse" else 1 / least
            norm = norm * jnp.where(cosine > 0, best, 0.0)
            norm = jnp.where(norm > most, most, norm)  # so that NaN stays
        own = (rows.part == 0) & (rows.token < count)
        rows.poke(of_tile(m["norm"], start, tile), rows.token, rows.part * 0, [norm.astype(norm_dtype)], own)
        packing.write_words(rows, m["lanes"], of_tile(m["words"], start, tile), dim, bits, count)

    copied = ("x",) if minus is None else ("x", "minus")
    inputs = {"x": rows.blocks(x), **level_arrays(levels, step), **arrays}
    memory = {
        **stage_memory(tile, names, x.dtype if minus is None else jnp.float32, len(copied)),
        **lane_memory(tile, bits),
        **norm_memory(tile),
        **table_memory(tile, names, 2**bits),
    }
    if dense:
        memory["of tokens"] = plgpu.SMEM((3, rows.tokens), jnp.float32)
    if minus is not None:
        inputs["minus"] = rows.blocks(minus)
    out = {
        "norm": jax.ShapeDtypeStruct((n, 1), norm_dtype),
        "words": jax.ShapeDtypeStruct((n, packing.words_per_vector(dim, bits)), jnp.uint32),
    }
    options = {
        "copied": copied,
        "stages": 1 if dense else STAGES,
        "prepare": functools.partial(fill_tables, tile, names),
    }
    norm, words = launch(body, inputs, out, memory, tile, n, interpret, "_".join(["encode", *names]), **options)
    return norm[:, 0], words


def _difference(tile, a, b, lane):
    pairs = zip(tile.read(a, lane), tile.read(b, lane), strict=True)
    return [[x - y for x, y in zip(*pair, strict=True)] for pair in pairs]
