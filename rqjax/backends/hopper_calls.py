"""Calls of the kernels for NVIDIA GPUs that encode and decode, and rotations as their stages."""

import importlib
from contextvars import ContextVar
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from rqjax.backends.nests import RotatedScalar
from rqjax.core import Codes, Quantizer
from rqjax.core.dispatch import CONTEXT
from rqjax.core.products import rounded_to
from rqjax.quantizers.combinators import Normalized, Residual, Rotated, Scaled
from rqjax.quantizers.scalar import Scalar
from rqjax.quantizers.trellis import Trellis
from rqjax.rotations import Chain, Dense, Hadamard, Rotor

INTERPRET: ContextVar[Any] = ContextVar("interpret", default=False)
"""Interpreter of kernels on a CPU, `pallas_kernels.gpu.mosaic.interpreter()`, or False."""
CONTEXT.append(INTERPRET.get)


def kernel(module: str) -> Any:
    """Imports a module of `pallas_kernels.gpu` on first use: jax.experimental.pallas takes a second."""
    return importlib.import_module(f"pallas_kernels.gpu.{module}")


def with_sketch(quantizer: Quantizer) -> tuple[Normalized, Normalized] | None:
    """Takes Normalized(Residual(first, sketch)) apart into Normalized(first) and the one-bit sketch; None for other
    nests."""
    match quantizer:
        case Normalized(
            inner=Residual(first=first, second=Normalized(inner=Rotated(inner=Scalar(bits=1))) as sketch), dtype=dtype
        ):
            return Normalized(first, dtype=dtype), sketch
    return None


def encode(quantizer: Quantizer, x: Array) -> Codes:
    if pair := with_sketch(quantizer):
        return _with_residual(*pair, x)
    assert isinstance(quantizer, Normalized | Scaled)
    scaled = quantizer.mode if isinstance(quantizer, Scaled) else None
    norm, words = _coded(quantizer, x, scaled=scaled, norm_dtype=quantizer.dtype)
    return norm.reshape(x.shape[:-1]), words.reshape(*x.shape[:-1], -1)


def _with_residual(first: Normalized, sketch: Normalized, x: Array) -> Codes:
    """Encodes with a sketch of the residual in the units of x; its norm is stored relative to that of x."""
    norm, words = encode(first, x)
    rest, signs = _coded(sketch, x, minus=_rows(first.decode((norm, words))), norm_dtype=jnp.float32)
    size = norm.astype(jnp.float32)
    rest = rest.reshape(norm.shape) / jnp.where(size > 0, size, 1)
    return norm, (words, (rounded_to(rest, sketch.dtype), signs.reshape(*norm.shape, -1)))


def _coded(quantizer: Quantizer, x: Array, **options: Any) -> tuple[Array, Array]:
    found = RotatedScalar.of(quantizer)
    options |= {"symmetric": found.leaf.symmetric, "interpret": INTERPRET.get()}
    return kernel("encode").encode(_rows(x), stages(found.rotations[0]), *_levels(found), **options)


def encode_trellis(quantizer: Trellis, x: Array) -> Array:
    values = quantizer.values.astype(jnp.float32)
    words = kernel("trellis").encode(_rows(x), values, bits=quantizer.bits, interpret=INTERPRET.get())
    return words.reshape(*x.shape[:-1], -1)


def decode(quantizer: Quantizer, codes: Codes, *, dtype: DTypeLike | None = None) -> Array:
    found, (norm, words) = RotatedScalar.of(quantizer), codes
    out = kernel("decode").decode(
        norm.reshape(-1),
        _rows(words),
        inverse_stages(found.rotations[0]),
        *_levels(found),
        dim=quantizer.dim,
        dtype=dtype or jnp.float32,
        interpret=INTERPRET.get(),
    )
    return out.reshape(*norm.shape, quantizer.dim)


def roundtrip(quantizer: Normalized, x: Array) -> Array:
    found = RotatedScalar.of(quantizer)
    out = kernel("roundtrip").rotor_roundtrip(
        _rows(x),
        _arrays(found.rotations[0]),
        *_levels(found),
        symmetric=found.leaf.symmetric,
        norm_dtype=quantizer.dtype,
        interpret=INTERPRET.get(),
    )
    return out.reshape(x.shape)


def _rows(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


def _levels(found: RotatedScalar) -> tuple[Array, Array]:
    return jnp.asarray(found.leaf.levels), jnp.asarray(found.leaf.step, jnp.float32)


def stages(rotation: Any) -> tuple[tuple[str, tuple[Array, ...]], ...]:
    """A rotation as the kernels' stages."""
    if isinstance(rotation, Chain):
        return tuple(stage for part in rotation.rotations for stage in stages(part))
    return ((type(rotation).__name__.lower(), _arrays(rotation)),)


def inverse_stages(rotation: Any) -> tuple[tuple[str, tuple[Array, ...]], ...]:
    """The inverse of a rotation as the kernels' stages."""
    return tuple((f"{name}_inverse", arrays) for name, arrays in reversed(stages(rotation)))


def _arrays(rotation: Rotor | Hadamard | Dense) -> tuple[Array, ...]:
    match rotation:
        case Rotor():
            return rotation.bivectors, rotation.tail
        case Hadamard():
            return (rotation.signs,)
    return (rotation.matrix,)
