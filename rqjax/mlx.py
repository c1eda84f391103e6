"""MLX's fused kernels on Apple GPUs, as jax-mps offers them: the implementation "mps".

Affine groups are stored bit for bit in MLX's layout, so that codes meet queries and weights in one kernel and are never
unpacked. All other codes stand for levels in int8; those are looked up, a byte each, and an 8-bit grid of step 1 holds
them as they are: the same kernel multiplies by them, exactly. jax-metal has no such kernels.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int8, Shaped

from rqjax import kernels, platforms
from rqjax.affine import Affine
from rqjax.combinators import Rotated
from rqjax.lanes import as_float32
from rqjax.quantizer import Codes

BITS, GROUPS = (4, 8), (32, 64, 128)
"""That jax-mps 0.11 and MLX take."""
OFFSET = 128
"""What an index of 8 bits is above its level."""


def operations() -> Any:
    """The module of jax-mps with the kernels, which are those of MLX.

    Raises:
      Unsupported: this is another platform, or there is no such module.
    """
    if platforms.platform() != "mps":
        raise kernels.Unsupported(f"mps kernels need jax-mps on an Apple GPU, this is {platforms.platform()}")
    try:
        return importlib.import_module("jax_plugins.mps.ops")
    except ImportError:
        raise kernels.Unsupported("this jax-mps has no jax_plugins.mps.ops") from None


def chosen() -> Any:
    """`operations`, or None where XLA alone is to be used."""
    return kernels.choose(None, mps=operations)


def stores(quantizer: Any) -> bool:
    """Whether a cache on this platform keeps codes in MLX's layout, for its kernels."""
    return platforms.platform() == "mps" and _fits(quantizer)


def takes(quantizer: Any) -> bool:
    """Whether a kernel multiplies by the codes of a quantizer."""
    return _fits(quantizer) and chosen() is not None


def _fits(quantizer: Any) -> bool:
    return isinstance(quantizer, Affine) and quantizer.bits in BITS and quantizer.group_size in GROUPS


def encoder(quantizer: Any, x: Shaped[Array, "*n d"]) -> Any:
    """The kernel (quantizer, vectors) -> codes.

    Raises:
      Unsupported: there is none; the message says why.
    """
    _check(quantizer)
    quantize = operations().quantize

    def run(quantizer: Any, x: Array) -> Codes:
        if isinstance(quantizer, Rotated):
            return run(quantizer.inner, quantizer.rotation(x))
        words, *grid = quantize(as_float32(x), group_size=quantizer.group_size, bits=quantizer.bits)
        return words, *(part.astype(quantizer.dtype) for part in grid)

    return run


def decoder(quantizer: Any, codes: Codes, dtype: Any) -> Any:
    """The kernel (quantizer, codes) -> vectors; raises as `encoder`."""
    _check(quantizer)
    dequantize = operations().dequantize

    def run(quantizer: Any, codes: Codes) -> Array:
        if isinstance(quantizer, Rotated):
            return quantizer.rotation.inverse(run(quantizer.inner, codes))
        return dequantize(*_wide(codes), group_size=quantizer.group_size, bits=quantizer.bits)

    return lambda quantizer, codes: run(quantizer, codes).astype(dtype)


def roundtripper(quantizer: Any, x: Shaped[Array, "*n d"]) -> Any:
    """The kernels (quantizer, vectors) -> decoded vectors, one after the other; raises as `encoder`."""
    encode = encoder(quantizer, x)

    def run(quantizer: Any, x: Array) -> Array:
        codes = encode(quantizer, x)
        return decoder(quantizer, codes, x.dtype)(quantizer, codes)

    return run


def _check(quantizer: Any) -> None:
    """Raises `Unsupported` for other than an `Affine` that MLX takes, alone or within rotations."""
    inner = quantizer
    while isinstance(inner, Rotated):
        inner = inner.inner
    if not _fits(inner):
        raise kernels.Unsupported(
            f"mps kernels are for Affine of {BITS} bits and groups of {GROUPS}, alone or rotated, "
            f"not for {kernels.nest(quantizer)}"
        )


def products(quantizer: Affine, y: Float[Array, "b h r n"], codes: Codes, *, transpose: bool) -> Array:
    """y times the decoded vectors (b, h, t, d), or times their transposes, of codes in MLX's layout."""
    options = {"transpose": transpose, "group_size": quantizer.group_size, "bits": quantizer.bits}
    return _batched(functools.partial(operations().quantized_matmul, **options))(y, *_wide(codes))


def dot(quantizer: Affine, operands: tuple[Float[Array, "*m d"], Codes]) -> Float[Array, "*mn"]:
    """`quantizer.dot(*operands)`."""
    y, codes = operands
    lead = codes[0].shape[:-1]
    flat = [part.reshape(1, 1, -1, part.shape[-1]) for part in codes]
    found = products(quantizer, y.reshape(1, 1, -1, y.shape[-1]), flat, transpose=True)
    return found.reshape(*y.shape[:-1], *lead)


def level_products(y: Float[Array, "b h r n"], levels: Int8[Array, "b h m n"]) -> Float[Array, "b h r m"]:
    """Inner products with levels. In float32, as Apple's devices multiply no integers."""
    group = next((size for size in GROUPS[::-1] if levels.shape[-1] % size == 0), None)
    if group is None or chosen() is None:
        return jnp.einsum("bhrn,bhmn->bhrm", y, levels.astype(jnp.float32), precision=lax.Precision.HIGHEST)
    indices = lax.bitcast_convert_type(levels, jnp.uint8) ^ OFFSET
    words = lax.bitcast_convert_type(indices.reshape(*indices.shape[:-1], -1, 4), jnp.uint32)
    step = jnp.ones((*levels.shape[:-1], levels.shape[-1] // group))
    multiply = functools.partial(operations().quantized_matmul, transpose=True, group_size=group, bits=8)
    return _batched(multiply)(y, words, step, -OFFSET * step)


def attention(
    y: Float[Array, "b h r d"], k: Shaped[Array, "b h t d"], v: Shaped[Array, "b h t d"], seen: Bool[Array, "..."]
) -> Float[Array, "b h r d"]:
    """Softmax attention of scaled queries to the tokens that they see; at least one each."""
    return operations().sdpa(y, as_float32(k), as_float32(v), scale=1.0, mask=seen)


def _batched(function: Callable[..., Array]) -> Callable[..., Array]:
    """`function`, whose operands share their leading axes, under `jax.vmap`: one axis more for all of them."""

    @jax.custom_batching.custom_vmap
    def run(*operands):
        return function(*operands)

    @run.def_vmap
    def rule(axis_size, in_batched, *operands):
        each = zip(operands, in_batched, strict=True)
        spread = [x if batched else jnp.broadcast_to(x, (axis_size, *x.shape)) for x, batched in each]
        return run(*spread), True

    return run


def _wide(codes: Codes) -> Codes:
    return codes[0], *map(as_float32, codes[1:])
