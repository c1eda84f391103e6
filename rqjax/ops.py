"""The few hot functions, in plain jnp: reference, fallback and oracle for kernels. Only here kernels are chosen,
by what `kernels` knows of them."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped, UInt32

from rqjax import combinators, kernels, mlx, packing, platforms, scalar
from rqjax.lanes import as_float32, planes, stored
from rqjax.quantizer import Codes, Implementation, Quantizer, Vectors, check_vectors
from rqjax.rotations import Chain, Dense, Hadamard

TINY, HUGE = 1e-15, 1e19
"""Norms between these have squares, and sums of squares, that float32 holds with full precision."""
BLOCK = 2**20
"""Coordinates in a block of rows that are processed together: 4 MiB in float32."""


def encode(quantizer: Quantizer, x: Vectors, *, implementation: Implementation | None = None) -> Codes:
    """`quantizer.encode(x)`, by a fused kernel where there is one.

    Args:
      quantizer: any quantizer.
      x: vectors (*n, d).
      implementation: "mosaic_gpu" or "mps" for that kernel, "xla" for none, None for the kernel wherever there is one
        for the quantizer, device, shape and dtype.

    Raises:
      Unsupported: the kernel cannot be used; the message says why.
    """
    x = check_vectors(x, quantizer.dim)
    return _run(_encode, implementation, (kernels.encoder, mlx.encoder), quantizer, x)


def decode(
    quantizer: Quantizer, codes: Codes, *, dtype: Any = None, implementation: Implementation | None = None
) -> Shaped[Array, "*n d"]:
    """`quantizer.decode(codes)`, in a dtype if given, by a fused kernel where there is one; the rest as in `encode`."""
    twin = functools.partial(_decode, dtype=dtype)
    find = [functools.partial(decoder, dtype=dtype or "float32") for decoder in (kernels.decoder, mlx.decoder)]
    return _run(twin, implementation, find, quantizer, codes)


def roundtrip(
    quantizer: Quantizer, x: Vectors, *, implementation: Implementation | None = None
) -> Shaped[Array, "*n d"]:
    """What is decoded of x encoded, in the dtype of x: for rotors by one mosaic_gpu kernel; the rest as in `encode`."""
    x = check_vectors(x, quantizer.dim)

    def twin(quantizer, x):
        return _decode(quantizer, _encode(quantizer, x), x.dtype)

    return _run(twin, implementation, (kernels.roundtripper, mlx.roundtripper), quantizer, x)


def _run(twin: Any, implementation: Implementation | None, find: Any, quantizer: Any, operand: Any) -> Any:
    """The kernel that is found for an operand, for NVIDIA or for Apple, else its twin."""
    mosaic_gpu, mps = (functools.partial(one, quantizer, operand) for one in find)
    kernel = kernels.choose(implementation, mosaic_gpu=mosaic_gpu, mps=mps)
    if kernel is not None:
        return kernels.differentiable(kernel, twin)(quantizer, operand)
    return (kernels.by_xla(twin) if implementation == "xla" else twin)(quantizer, operand)


def _encode(quantizer: Any, x: Array) -> Codes:
    return getattr(quantizer, "plain_encode", quantizer.encode)(x)


def _decode(quantizer: Any, codes: Codes, dtype: Any) -> Array:
    x = getattr(quantizer, "plain_decode", quantizer.decode)(codes)
    return x if dtype is None else x.astype(dtype)


def norm(x: Shaped[Array, "*n d"]) -> Float[Array, "*n 1"]:
    """Euclidean norms of vectors, right wherever the norm itself is a normal number."""

    def size(x, scale):
        return jnp.sqrt(jnp.sum((as_float32(x) * scale) ** 2, axis=-1, keepdims=True)) / scale

    def rescaled(x):
        return size(x, _unit(usual))

    # The squares of huge and of tiny numbers leave float32. Such vectors are rare; on a CPU the others are read only
    # once. Elsewhere a condition would make the device wait for the host.
    usual = size(x, 1)
    if not platforms.on_cpu():
        return rescaled(x)
    return lax.cond(jnp.all((usual > TINY) & (usual < HUGE)), lambda x: usual, rescaled, x)


def _unit(norm: Float[Array, "*n 1"]) -> Float[Array, "*n 1"]:
    """A power of two that makes huge and tiny norms usual ones; 1 for the others."""
    return jnp.where(norm >= HUGE, 2.0**-80, jnp.where(norm <= TINY, 2.0**80, jnp.ones_like(norm)))


def direction(x: Shaped[Array, "*n d"], size: Float[Array, "*n 1"] | None = None) -> Float[Array, "*n d"]:
    """Vectors over their norms, or over `size`, 0 where that is 0.

    XLA divides by a number of each row by multiplying with its reciprocal, which above 8.5e37 is subnormal, and those
    are zero on a CPU: hence the units.
    """
    size = norm(x) if size is None else size
    unit = _unit(size)
    return as_float32(x) * unit / jnp.where(size > 0, size * unit, 1)


def encode_direction(inner: Any, x: Shaped[Array, "*n d"], norm: Float[Array, "*n 1"]) -> Codes:
    """`inner.encode(x / norm)` without the division where `inner` is linear up to its levels: they are scaled."""
    match inner:
        case combinators.Rotated(rotation=(Dense() | Hadamard() | Chain()) as rotation, inner=rotated):
            return in_blocks(lambda x, norm: encode_direction(rotated, rotation(x), norm), x, norm)
        case combinators.Rotated(rotation=rotation, inner=rotated):
            return encode_direction(rotated, rotation(x), norm)
        case scalar.Scalar():
            return encode_levels(x, inner.values, inner.bits, norm, symmetric=inner.symmetric)
        case _:
            return inner.encode(direction(x, norm))


def in_blocks(function: Callable[..., Codes], *arrays: Shaped[Array, "..."], rows: int | None = None) -> Codes:
    """`function(*arrays)` for a function of rows, so many at a time that its temporaries stay in cache, or `rows`.

    On the CPU a large temporary costs more in page faults than in arithmetic; elsewhere blocks are made only where
    `rows` asks for them. The arrays share their leading axes; the last block overlaps the one before where the rows do
    not come out even.
    """
    lead = arrays[0].shape[:-1]
    count, whole = math.prod(lead), rows is None and not platforms.on_cpu()
    rows = rows or max(1, BLOCK // arrays[0].shape[-1])
    if whole or count < 2 * rows:
        return function(*arrays)
    flat = [a.reshape(count, -1) for a in arrays]

    def block(i, out):
        start = jnp.minimum(i * rows, count - rows)
        part = function(*(lax.dynamic_slice_in_dim(a, start, rows) for a in flat))
        return jax.tree.map(lambda o, p: lax.dynamic_update_slice_in_dim(o, p, start, 0), out, part)

    shapes = jax.eval_shape(function, *(a[:rows] for a in flat))
    empty = jax.tree.map(lambda s: jnp.zeros((count, *s.shape[1:]), s.dtype), shapes)
    out = lax.fori_loop(0, -(-count // rows), block, empty)
    return jax.tree.map(lambda o: o.reshape(*lead, *o.shape[1:]), out)


def encode_levels(
    x: Shaped[Array, "*n d"],
    levels: Float[Array, "k"],
    bits: int,
    scale: Float[Array, "*n 1"] | None = None,
    *,
    symmetric: bool = False,
) -> UInt32[Array, "*n words"]:
    """Packed indices of the level nearest to each coordinate of `x / scale`."""
    boundaries = (levels[1:] + levels[:-1]) / 2

    def above(x, boundary):
        return x > (boundary if scale is None else boundary * scale)

    def nearest(x):
        if bits > 4:  # binary search
            index = jnp.zeros(x.shape, jnp.uint32)
            for bit in reversed(range(bits)):
                index = jnp.where(above(x, boundaries[index + (2**bit - 1)]), index + 2**bit, index)
            return index
        if not symmetric:
            return sum((above(x, boundary).astype(jnp.uint32) for boundary in boundaries), jnp.uint32(0))
        half = 2 ** (bits - 1) - 1  # count on |x|; m ^ half is half - m, m ^ (half + 1) is half + 1 + m
        m = sum((above(jnp.abs(x), b).astype(jnp.uint32) for b in boundaries[half + 1 :]), jnp.uint32(0))
        return m ^ jnp.where(x < 0, jnp.uint32(half), jnp.uint32(half + 1))

    return packing.pack_planes([jnp.asarray(nearest(plane)) for plane in planes(x)], bits)


def inner(y: Shaped[Array, "*m d"], x: Float[Array, "*n d"]) -> Float[Array, "*mn"]:
    """Inner products of all queries with all vectors."""
    return jnp.tensordot(as_float32(y), x, axes=(-1, -1), precision=lax.Precision.HIGHEST)


def inner_in_blocks(
    y: Shaped[Array, "*m d"], decode: Callable[[Array], Array], codes: Shaped[Array, "*n size"]
) -> Float[Array, "*mn"]:
    """`inner(y, decode(codes))`, a block of vectors decoded at a time, and only once: a product may decode each
    coordinate as often as it reads it."""
    queries = y.reshape(math.prod(y.shape[:-1]), y.shape[-1])

    def block(codes: Array) -> Array:
        x = decode(codes)
        return inner(stored(x), queries)

    products = in_blocks(block, codes, rows=max(1, BLOCK // y.shape[-1]))
    return jnp.moveaxis(products, -1, 0).reshape(*y.shape[:-1], *codes.shape[:-1])
