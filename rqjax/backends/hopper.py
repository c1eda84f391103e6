"""Which nests of quantizers have a fused kernel on NVIDIA GPUs, and why not the others.

A kernel gives what plain JAX gives, up to values within rounding of a boundary between two levels.
"""

import functools
import importlib.util
import math
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Shaped

from rqjax.arrays import norms
from rqjax.backends.hopper_stages import inverse_stages, kernel, listed, refusal_of_rotation, stages
from rqjax.backends.nests import RotatedScalar
from rqjax.core import Codes, Quantizer, nest, platforms
from rqjax.core.dispatch import CONTEXT, Refusal, Unsupported, register
from rqjax.quantizers.combinators import Normalized, Residual, Rotated, Scaled
from rqjax.quantizers.scalar import Scalar
from rqjax.rotations import Rotor

INTERPRET: ContextVar[Any] = ContextVar("interpret", default=False)
"""Set to `pallas_kernels.gpu.mosaic.interpreter()` to run kernels on a CPU."""
CONTEXT.append(INTERPRET.get)


def refusal_of_device() -> Refusal | None:
    """Why kernels cannot run, if they cannot: they need a Hopper GPU and jax 0.10.2."""
    if jax.__version_info__ < (0, 10, 2):
        return Refusal(f"mosaic_gpu kernels need jax 0.10.2 or newer, this is {jax.__version__}")
    if not INTERPRET.get():
        capability = getattr(jax.devices()[0], "compute_capability", None)
        if platforms.platform() != "gpu" or capability is None or not str(capability).startswith("9."):
            where = platforms.platform() if capability is None else f"compute capability {capability}"
            return Refusal(f"mosaic_gpu kernels need a Hopper GPU (compute capability 9.0), this is {where}")
    if importlib.util.find_spec("absl") is None:
        return Refusal("mosaic_gpu kernels need the package absl-py")
    return None


def _of_one_rotation(quantizer: Quantizer) -> RotatedScalar | Refusal:
    """Normalized or Scaled(Rotated(rotation, Scalar)), if the quantizer is one."""
    match quantizer:
        case (Normalized() | Scaled()) as outer if isinstance(outer.inner, Rotated):
            if isinstance(outer.inner.inner, Scalar):
                return RotatedScalar.of(quantizer)
    return Refusal(
        "mosaic_gpu kernels are for Normalized or Scaled(Rotated(rotation, Scalar)) and, to encode, "
        f"Normalized(Residual(Rotated(rotation, Scalar), sketch)), not for {nest(quantizer)}"
    )


def _with_sketch(quantizer: Quantizer) -> tuple[Normalized, Normalized] | None:
    """Normalized(first) and the sketch of Normalized(Residual(first, sketch)), if it is one: of one bit."""
    match quantizer:
        case Normalized(inner=Residual(first=first, second=Normalized() as sketch), dtype=dtype):
            found = _of_one_rotation(sketch)
            if isinstance(found, RotatedScalar) and found.leaf.bits == 1:
                return Normalized(first, dtype=dtype), sketch
    return None


@register("mosaic_gpu", "encode", Normalized, Scaled, rows=True)
def encoder(quantizer: Quantizer, x: Shaped[Array, "*n d"]) -> Callable[[Any, Any], Codes] | Refusal:
    """The kernel (quantizer, vectors) -> codes for such a nest and vectors."""
    pair = _with_sketch(quantizer)
    parts = [quantizer] if pair is None else pair
    if refusal := refusal_of_device() or _refusal_of_vectors(x.shape, x.dtype):
        return refusal
    for part in parts:
        if refusal := _refusal(part):
            return refusal
    return _encode if pair is None else _encode_with_sketch


@register("mosaic_gpu", "decode", Normalized, Scaled, rows=True)
def decoder(quantizer: Quantizer, codes: Codes, *, dtype: DTypeLike | None = None) -> Callable[..., Array] | Refusal:
    """The kernel (quantizer, codes) -> vectors for such a nest and codes."""
    if refusal := refusal_of_device() or _refusal(quantizer, back=True):
        return refusal
    return _refusal_of_vectors((*codes[1].shape[:-1], quantizer.dim), dtype or "float32") or _decode


@register("mosaic_gpu", "roundtrip", Normalized, Scaled, rows=True)
def roundtripper(quantizer: Quantizer, x: Shaped[Array, "*n d"]) -> Callable[[Any, Any], Array] | Refusal:
    """The kernel (quantizer, vectors) -> decoded vectors, for rotors."""
    if refusal := refusal_of_device() or _refusal(quantizer) or _refusal_of_vectors(x.shape, x.dtype):
        return refusal
    if isinstance(quantizer, Scaled):
        return Refusal("the mosaic_gpu round trip is for Normalized, not for Scaled")
    (rotation,) = RotatedScalar.of(quantizer).rotations
    if not isinstance(rotation, Rotor):
        return Refusal(f"the mosaic_gpu round trip is for Rotor, not for {type(rotation).__name__}")
    return _roundtrip


def _refusal(quantizer: Quantizer, *, back: bool = False) -> Refusal | None:
    """Why there are no kernels for a nest, if there are none."""
    if getattr(quantizer, "dtype", None) == norms.LOGARITHMIC:
        return Refusal("mosaic_gpu kernels are for norms in floating point, not in eight bits")
    found = _of_one_rotation(quantizer)
    return found if isinstance(found, Refusal) else refusal_of_rotation(found.rotations[0], back)


def _refusal_of_vectors(shape: tuple[int, ...], dtype: DTypeLike) -> Refusal | None:
    """Why kernels do not take vectors of a shape or dtype, if they do not."""
    launch = kernel("launch")
    if jnp.dtype(dtype).name not in launch.DTYPES:
        return Refusal(f"mosaic_gpu kernels take {', '.join(launch.DTYPES)}, not {jnp.dtype(dtype)}")
    if shape[-1] not in launch.DIMS:
        return Refusal(f"mosaic_gpu kernels take vectors of dimension {listed(launch.DIMS)}, not {shape[-1]}")
    if not 0 < math.prod(shape[:-1]) < 2**31 // shape[-1]:
        return Refusal(f"mosaic_gpu kernels take from 1 vector to 2**31 coordinates, not shape {shape}")
    return None


def autotune(quantizer: Quantizer, x: Shaped[Array, "*n d"], *, repeats: int = 20) -> dict[str, int]:
    """Measures every tile size of the kernels for such vectors on this device, and keeps the fastest for this process.

    Functions that were compiled before keep theirs: call it first.

    Args:
      quantizer: one that has kernels.
      x: vectors, as many as there will be.
      repeats: launches that are timed together; the best of three times counts.

    Returns:
      Tokens of a tile for each kernel that there is.

    Raises:
      Unsupported: there is no kernel for the quantizer, the vectors or the device; the message says why.
    """
    encode = encoder(quantizer, x)
    if isinstance(encode, Refusal):
        raise Unsupported(encode.reason)
    launch, n, dim = kernel("launch"), math.prod(x.shape[:-1]), x.shape[-1]
    codes = encode(quantizer, x)
    found = {}
    for name, find, operand, options in (
        ("encode", encoder, x, {}),
        ("decode", decoder, codes, {"dtype": x.dtype}),
        ("roundtrip", roundtripper, x, {}),
    ):
        run = find(quantizer, operand, **options)
        if isinstance(run, Refusal):
            continue
        run = functools.partial(run, **options)

        def seconds(tokens, name=name, run=run, operand=operand):
            launch.TUNED[name, dim, n] = tokens
            compiled = jax.jit(lambda *operands: run(*operands))  # a function of its own is traced anew
            jax.block_until_ready(compiled(quantizer, operand))
            times = []
            for _ in range(3):
                start = time.perf_counter()
                jax.block_until_ready([compiled(quantizer, operand) for _ in range(repeats)])
                times.append(time.perf_counter() - start)
            return min(times)

        found[name] = launch.TUNED[name, dim, n] = min(launch.tile_sizes(dim), key=seconds)
    return found


def _rows(x: Array) -> Array:
    return x.reshape(-1, x.shape[-1])


def _encode(quantizer: Normalized | Scaled, x: Array) -> Codes:
    found = RotatedScalar.of(quantizer)
    norm, words = kernel("encode").encode(
        _rows(x),
        stages(found.rotations[0]),
        found.boundaries,
        symmetric=found.leaf.symmetric,
        scaled=(quantizer.mode, found.leaf.values) if isinstance(quantizer, Scaled) else None,
        norm_dtype=quantizer.dtype,
        interpret=INTERPRET.get(),
    )
    return norm.reshape(x.shape[:-1]), words.reshape(*x.shape[:-1], -1)


def _encode_with_sketch(quantizer: Normalized | Scaled, x: Array) -> Codes:
    """The residual is sketched in the units of x; its norm is stored relative to that of x."""
    pair = _with_sketch(quantizer)
    assert pair is not None
    first, sketch = pair
    norm, words = _encode(first, x)
    found = RotatedScalar.of(sketch)
    rest, signs = kernel("encode").encode(
        _rows(x),
        stages(found.rotations[0]),
        found.boundaries,
        symmetric=found.leaf.symmetric,
        minus=_rows(first.decode((norm, words))),
        norm_dtype=jnp.float32,
        interpret=INTERPRET.get(),
    )
    size = norm.astype(jnp.float32)
    rest = rest.reshape(norm.shape) / jnp.where(size > 0, size, 1)
    return norm, (words, (rest.astype(sketch.dtype), signs.reshape(*norm.shape, -1)))


def _decode(quantizer: Normalized | Scaled, codes: Codes, *, dtype: DTypeLike | None = None) -> Array:
    found, (norm, words) = RotatedScalar.of(quantizer), codes
    out = kernel("decode").decode(
        norm.reshape(-1),
        _rows(words),
        inverse_stages(found.rotations[0]),
        found.leaf.values,
        dtype=dtype or jnp.float32,
        interpret=INTERPRET.get(),
    )
    return out.reshape(*norm.shape, quantizer.dim)


def _roundtrip(quantizer: Normalized | Scaled, x: Array) -> Array:
    found = RotatedScalar.of(quantizer)
    out = kernel("roundtrip").rotor_roundtrip(
        _rows(x),
        found.rotations[0].coefficients,
        found.rotations[0].inverted.coefficients,
        found.boundaries,
        found.leaf.values,
        symmetric=found.leaf.symmetric,
        norm_dtype=quantizer.dtype,
        interpret=INTERPRET.get(),
    )
    return out.reshape(x.shape)
