"""Rotate, quantize and pack vectors, unpack, look up and rotate back, or all at once: Pallas Mosaic TPU.

Vectors stand as columns, coordinates along the sublanes: the planes of `rqjax.arrays.packing` are then whole rows, and
norms one row. Any rotation is a product with its matrix, on the MXU, of two bfloat16 parts each: 16 bits and more.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.packed import LONGEST

DIMS, MAX_BITS, DTYPES = (64, 128, 192, 256, 512), 4, ("float32", "bfloat16")
TILE = 512
"""Vectors of a step."""


class Plan(NamedTuple):
    """Static facts about a quantizer: a norm, or a scale, around a rotation and levels."""

    bits: int
    mode: str | None = None
    """None: the norm is stored; "mse" or "unbiased": the norm times the best scale of the levels."""
    norm_dtype: str = "bfloat16"


def encode(
    x: jax.Array, matrix: jax.Array, values: jax.Array, plan: Plan, *, interpret: Any = False
) -> tuple[jax.Array, jax.Array]:
    """Norms, or scales, (n,) and words (n, words) uint32 of vectors.

    Args:
      x: (n, d) in one of `DTYPES`, d one of `DIMS`.
      matrix: float32 (d, d), the rotation is x -> x matrix^T.
      values: float32 (2**bits,), the levels, ascending and symmetric, 1 to 4 bits.
      plan: what is static.
      interpret: as in `pl.pallas_call`.
    """
    dim = x.shape[1]
    out = [((1, None), plan.norm_dtype), ((_words(dim, plan.bits), None), "uint32")]
    norm, words = _call(_encode, plan, "encode", (x, None, None), matrix, values, out, len(x), interpret)
    return norm[0], words.T


def decode(
    norm: jax.Array, words: jax.Array, matrix: jax.Array, values: jax.Array, plan: Plan, *, dtype: Any, interpret: Any
) -> jax.Array:
    """The vectors (n, d) that norms (n,) and words (n, words) stand for; other arguments as in `encode`."""
    out = [((None, len(matrix)), dtype)]
    operands = None, norm[None], words.T
    return _call(_decode, plan, "decode", operands, matrix, values, out, len(norm), interpret)[0]


def roundtrip(x: jax.Array, matrix: jax.Array, values: jax.Array, plan: Plan, *, interpret: Any) -> jax.Array:
    """The vectors (n, d) that the codes of vectors stand for, as `encode` takes them."""
    out = [((None, x.shape[1]), x.dtype)]
    return _call(_roundtrip, plan, "roundtrip", (x, None, None), matrix, values, out, len(x), interpret)[0]


def _call(body, plan, name, operands, matrix, values, out, count, interpret):
    x, norm, words = operands
    high = lax.reduce_precision(matrix, 8, 7)  # a conversion there and back would be optimized away
    halves = jnp.stack([high, matrix - high]).astype(jnp.bfloat16)
    inputs = [a for a in (x, norm, words) if a is not None]

    def spec(shape):  # None stands for the vectors
        block = tuple(TILE if size is None else size for size in shape)
        return pl.BlockSpec(block, lambda i: (i, 0) if shape[0] is None else (0, i))

    shapes = [(None, a.shape[1]) if a is x else (a.shape[0], None) for a in inputs]
    return pl.pallas_call(
        functools.partial(body, plan),
        grid=(pl.cdiv(count, TILE),),
        in_specs=[
            pl.BlockSpec(memory_space=pltpu.SMEM),
            pl.BlockSpec(halves.shape, lambda i: (0, 0, 0)),
            *map(spec, shapes),
        ],
        out_specs=[spec(shape) for shape, _ in out],
        out_shape=[
            jax.ShapeDtypeStruct(tuple(count if s is None else s for s in shape), dtype) for shape, dtype in out
        ],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
        name=name,
    )(values, halves, *inputs)


def _encode(plan, values, matrix, x, norm_out, words_out):
    norm, indices = _indices(plan, values, matrix, x)
    norm_out[...] = norm
    words_out[...] = _packed(indices, plan.bits)


def _decode(plan, values, matrix, norm, words, out):
    indices = _unpacked(words[...], plan.bits, matrix.shape[1])
    _write(matrix, _levels(values, indices, plan.bits), norm[...], out)


def _roundtrip(plan, values, matrix, x, out):
    norm, indices = _indices(plan, values, matrix, x)
    _write(matrix, _levels(values, indices, plan.bits), norm, out)


def _indices(plan, values, matrix, x):
    """Returns the norm or scale to store beside the indices, (1, n), and these, int32 (d, n)."""
    columns = x[...].astype(jnp.float32).T
    largest = jnp.abs(columns).max(0, keepdims=True)
    unit = jnp.where(largest > 0, largest, 1)  # squares of huge and tiny numbers leave float32
    norm = unit * jnp.sqrt(((columns / unit) ** 2).sum(0, keepdims=True))
    exact = norm if plan.mode else norm.astype(plan.norm_dtype).astype(jnp.float32)
    directions = _product(matrix, columns / jnp.where(exact > 0, exact, 1), transposed=False)
    size, half = jnp.abs(directions), 2 ** (plan.bits - 1)
    above = jnp.zeros(size.shape, jnp.int32)
    for k in range(half, 2 * half - 1):
        above = above + (size > (values[k] + values[k + 1]) * 0.5).astype(jnp.int32)
    indices = jnp.where(directions < 0, half - 1 - above, half + above)
    if plan.mode:
        level = _levels(values, indices, plan.bits)
        product, square = ((level * other).sum(0, keepdims=True) for other in (directions, level))
        unbiased = 1 / jnp.maximum(product, jnp.sqrt(square) * (1 / LONGEST))
        scale = product / square if plan.mode == "mse" else unbiased
        norm = jnp.minimum(norm * jnp.where(product <= 0, 0, scale), float(jnp.finfo(plan.norm_dtype).max))
    return norm.astype(plan.norm_dtype), indices


def _levels(values, indices, bits):
    """Levels float32 (d, n) of indices."""
    half = 2 ** (bits - 1)
    upper = indices >= half
    above = jnp.where(upper, indices - half, half - 1 - indices)
    found = jnp.full(indices.shape, values[half], jnp.float32)
    for k in range(1, half):
        found = jnp.where(above == k, values[half + k], found)
    return jnp.where(upper, found, -found)


def _write(matrix, levels, norm, out):
    out[...] = _product(matrix, levels * norm.astype(jnp.float32), transposed=True).T.astype(out.dtype)


def _product(matrix, columns, *, transposed):
    """The matrix, or its transpose, times columns, float32 (d, n), but for the product of what bfloat16 leaves over."""
    high = columns.astype(jnp.bfloat16)
    low = (columns - high.astype(jnp.float32)).astype(jnp.bfloat16)

    def product(half, x):
        axes = (((0 if transposed else 1,), (0,)), ((), ()))
        return lax.dot_general(matrix[half], x, axes, preferred_element_type=jnp.float32)

    return product(0, high) + (product(0, low) + product(1, high))


def _words(dim: int, bits: int) -> int:
    return dim * bits // 32


def _packed(indices, bits):
    """uint32 (words, n) in the layout of `rqjax.arrays.packing.pack`."""
    lanes = indices.shape[0] // 8
    word = indices[:lanes]
    for k in range(1, 8):
        word = word | indices[k * lanes : (k + 1) * lanes] << bits * k
    size = lanes * bits // 4
    words, rest = word[:size], word[size:]
    if bits == 3:
        extra = jnp.concatenate([_right(rest, shift) & 255 for shift in (0, 8, 16)], axis=0)
        words = words | extra << 24
    elif bits < 3:
        for k in range(1, 4 // bits):
            words = words | rest[(k - 1) * size : k * size] << 8 * bits * k
    return lax.bitcast_convert_type(words, jnp.uint32)


def _unpacked(words, bits, dim):
    """The inverse of `_packed`, int32 (d, n)."""
    words, lanes = lax.bitcast_convert_type(words, jnp.int32), dim // 8
    size = len(words)
    if bits == 3:
        extra, count = _right(words, 24), lanes - size
        rest = [extra[k * count : (k + 1) * count] << 8 * k for k in range(3)]
        word = jnp.concatenate([words & 0xFFFFFF, rest[0] | rest[1] | rest[2]], axis=0)
    elif bits < 3:
        word = jnp.concatenate([_right(words, 8 * bits * k) & 2 ** (8 * bits) - 1 for k in range(4 // bits)], axis=0)
    else:
        word = words
    return jnp.concatenate([_right(word, bits * k) & 2**bits - 1 for k in range(8)], axis=0)


def _right(x, count):
    return lax.shift_right_logical(x, jnp.int32(count)) if count else x
