"""Which nests of quantizers have a fused kernel on NVIDIA GPUs, and why not the others; how one is chosen.

A kernel gives what the XLA path gives, up to values within rounding of a boundary between two levels. The XLA path is
also its derivative.
"""

import contextlib
import functools
import importlib
import importlib.util
import math
import time
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from rqjax import combinators, platforms, scalar, sign
from rqjax.quantizer import Implementation, unknown_name
from rqjax.rotations import Chain, Dense, Hadamard, Rotor

INTERPRET: ContextVar[Any] = ContextVar("interpret", default=False)
"""Set to `pallas_kernels.mosaic.interpreter()` to run kernels on a CPU."""

_ONLY_XLA: ContextVar[bool] = ContextVar("only_xla", default=False)


class Unsupported(ValueError):
    """There is no kernel for this, and why."""


def choose(implementation: str | None, **builders: Callable[[], Any]) -> Any:
    """What the builder of a kernel makes, or None for the XLA path.

    Args:
      implementation: "xla", the name of a builder, or None for the first kernel that there is.
      **builders: of "mosaic_gpu" and "mps"; each makes its kernel or raises `Unsupported`.

    Raises:
      Unsupported: a kernel is asked for and cannot be used; the message says why.
      UnknownName: there is no such implementation.
    """
    if implementation is not None and implementation not in get_args(Implementation):
        raise unknown_name("implementation", implementation, get_args(Implementation))
    if implementation == "xla" or _ONLY_XLA.get():
        return None

    def build(name: str) -> Any:
        if name == "mosaic_gpu":
            check_device()
        return builders[name]()

    if implementation is not None:
        return build(implementation)
    for name in builders:
        with contextlib.suppress(Unsupported):
            return build(name)
    return None


def by_xla(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, but no kernel is chosen in it."""

    def run(*args):
        token = _ONLY_XLA.set(True)
        try:
            return function(*args)
        finally:
            _ONLY_XLA.reset(token)

    return run


def check_device() -> None:
    """Raises `Unsupported` where kernels cannot run: they need a Hopper GPU and jax 0.10.2."""
    if jax.__version_info__ < (0, 10, 2):
        raise Unsupported(f"mosaic_gpu kernels need jax 0.10.2 or newer, this is {jax.__version__}")
    if not INTERPRET.get():
        capability = getattr(jax.devices()[0], "compute_capability", None)
        if platforms.platform() != "gpu" or capability is None or not str(capability).startswith("9."):
            where = platforms.platform() if capability is None else f"compute capability {capability}"
            raise Unsupported(f"mosaic_gpu kernels need a Hopper GPU (compute capability 9.0), this is {where}")
    if importlib.util.find_spec("absl") is None:
        raise Unsupported("mosaic_gpu kernels need the package absl-py")


def kernel(module: str) -> Any:
    """A module of `pallas_kernels`, imported when it is used: jax.experimental.pallas takes a second."""
    return importlib.import_module(f"pallas_kernels.{module}")


class Fused(NamedTuple):
    """The parts of Normalized(Rotated(rotation, Scalar)), or of Scaled, as the kernels take them."""

    rotation: Any
    scalar: Any
    norm_dtype: Any
    mode: str | None
    """Of `Scaled`."""

    @classmethod
    def of(cls, quantizer: Any) -> "Fused":
        match quantizer:
            case (combinators.Normalized() | combinators.Scaled()) as outer:
                match outer.inner:
                    case combinators.Rotated(rotation=rotation, inner=scalar.Scalar() as levels):
                        return cls(rotation, levels, outer.dtype, getattr(outer, "mode", None))
        raise Unsupported(
            "mosaic_gpu kernels are for Normalized or Scaled(Rotated(rotation, Scalar)) and, to encode, "
            f"Normalized(Residual(Rotated(rotation, Scalar), Sign)), not for {nest(quantizer)}"
        )

    @property
    def boundaries(self) -> Array:
        values = self.scalar.values
        return (values[1:] + values[:-1]) / 2


def encoder(quantizer: Any, x: Shaped[Array, "*n d"]) -> Callable[[Any, Any], Any]:
    """The kernel (quantizer, vectors) -> codes for such a nest and vectors."""
    prod = _residual(quantizer)
    fused = Fused.of(quantizer if prod is None else prod[0])
    check_vectors(x, x.dtype)
    _check_stages(stages, fused.rotation)
    if prod is not None:
        _check_stages(stages, prod[1].sketch)
    return _encode if prod is None else _encode_residual


def decoder(quantizer: Any, codes: Any, dtype: Any) -> Callable[[Any, Any], Any]:
    """The kernel (quantizer, codes) -> vectors for such a nest and codes."""
    fused = Fused.of(quantizer)
    check_vectors(jax.ShapeDtypeStruct((*codes[1].shape[:-1], quantizer.dim), jnp.float32), dtype)
    _check_stages(inverse_stages, fused.rotation)
    return functools.partial(_decode, dtype=dtype)


def roundtripper(quantizer: Any, x: Shaped[Array, "*n d"]) -> Callable[[Any, Any], Any]:
    """The kernel (quantizer, vectors) -> decoded vectors, for rotors."""
    fused = Fused.of(quantizer)
    check_vectors(x, x.dtype)
    if fused.mode is not None:
        raise Unsupported("the mosaic_gpu round trip is for Normalized, not for Scaled")
    if not isinstance(fused.rotation, Rotor):
        raise Unsupported(f"the mosaic_gpu round trip is for Rotor, not for {type(fused.rotation).__name__}")
    return _roundtrip


def check_vectors(x: Any, dtype: Any) -> None:
    """Raises `Unsupported` for vectors of a shape or dtype that kernels do not take."""
    launch = kernel("launch")
    if jnp.dtype(dtype).name not in launch.DTYPES:
        raise Unsupported(f"mosaic_gpu kernels take {', '.join(launch.DTYPES)}, not {jnp.dtype(dtype)}")
    if x.shape[-1] not in launch.DIMS:
        raise Unsupported(f"mosaic_gpu kernels take vectors of dimension {_listed(launch.DIMS)}, not {x.shape[-1]}")
    if not 0 < math.prod(x.shape[:-1]) < 2**31 // x.shape[-1]:
        raise Unsupported(f"mosaic_gpu kernels take from 1 vector to 2**31 coordinates, not shape {x.shape}")


def stages(rotation: Any) -> tuple[tuple[str, Array], ...]:
    """A rotation as the kernels' stages."""
    launch = kernel("launch")
    match rotation:
        case Rotor():
            return (("rotor", rotation.coefficients),)
        case Hadamard():
            return (("hadamard", rotation.signs[None].astype(jnp.float32)),)
        case Dense() if rotation.dim in launch.DENSE_DIMS:
            return (("dense", kernel("encode").halves(rotation.matrix)),)
        case Dense():
            dims = _listed(launch.DENSE_DIMS)
            raise Unsupported(f"mosaic_gpu kernels take dense matrices of dimension {dims}, not {rotation.dim}")
        case Chain(rotations=(Rotor() | Hadamard() as first, Rotor() | Hadamard() as second)) if type(
            first
        ) is not type(second):
            return (*stages(first), *stages(second))
    raise Unsupported(f"mosaic_gpu kernels rotate by {ROTATIONS}, not by {nest(rotation)}")


def inverse_stages(rotation: Any) -> tuple[tuple[str, Array], ...]:
    """The inverse of a rotation as the kernels' stages."""
    match rotation:
        case Rotor():
            return (("rotor", rotation.inverted.coefficients),)
        case Hadamard():
            return (("hadamard_inverse", rotation.signs[None].astype(jnp.float32)),)
        case Dense():
            raise Unsupported("mosaic_gpu kernels do not rotate back by a dense matrix")
        case Chain():
            stages(rotation)
            return tuple(stage for part in reversed(rotation.rotations) for stage in inverse_stages(part))
    raise Unsupported(f"mosaic_gpu kernels rotate by {ROTATIONS}, not by {nest(rotation)}")


def _check_stages(make: Callable[[Any], tuple[tuple[str, Array], ...]], rotation: Any) -> None:
    """Raises `Unsupported` where `make(rotation)` would, without its arrays, which the kernel's call makes itself."""
    jax.eval_shape(lambda rotation: [array for _, array in make(rotation)], rotation)


ROTATIONS = "Rotor, Hadamard, Dense, or a Chain of a Rotor and a Hadamard"


def differentiable(run: Callable[..., Any], twin: Callable[..., Any]) -> Callable[..., Any]:
    """`run` with the derivative of `twin`; over a batched first argument (a quantizer a head) it runs one by one."""

    @jax.custom_batching.custom_vmap
    def batched(quantizer, operand):
        return run(quantizer, operand)

    @batched.def_vmap
    def rule(axis_size, in_batched, quantizer, operand):
        if not any(jax.tree.leaves(in_batched[0])):
            out = batched(quantizer, operand)
        else:
            axes = jax.tree.map(lambda b: 0 if b else None, in_batched)
            pick = lambda i: jax.tree.map(lambda x, a: x if a is None else x[i], (quantizer, operand), tuple(axes))  # noqa: E731
            out = jax.lax.map(lambda i: batched(*pick(i)), jnp.arange(axis_size))
        return out, jax.tree.map(lambda _: True, out)

    @jax.custom_vjp
    def function(quantizer, operand):
        return batched(quantizer, operand)

    def backward(operands, cotangent):
        return jax.vjp(by_xla(twin), *operands)[1](cotangent)

    function.defvjp(lambda *operands: (batched(*operands), operands), backward)
    return function


def autotune(quantizer: Any, x: Shaped[Array, "*n d"], *, repeats: int = 20) -> dict[str, int]:
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
    check_device()
    launch, n, dim = kernel("launch"), math.prod(x.shape[:-1]), x.shape[-1]
    codes = encoder(quantizer, x)(quantizer, x)
    found = {}
    for name, find, operand in (
        ("encode", encoder, x),
        ("decode", functools.partial(decoder, dtype=x.dtype), codes),
        ("roundtrip", roundtripper, x),
    ):
        with contextlib.suppress(Unsupported):
            run = find(quantizer, operand)

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


def _rows(x: Array, count: int = 1) -> Array:
    return x.reshape(-1, *x.shape[x.ndim - count :])


def _encode(quantizer: Any, x: Array) -> Any:
    fused = Fused.of(quantizer)
    norm, words = kernel("encode").encode(
        _rows(x),
        stages(fused.rotation),
        fused.boundaries,
        symmetric=fused.scalar.symmetric,
        scaled=None if fused.mode is None else (fused.mode, fused.scalar.values),
        norm_dtype=fused.norm_dtype,
        interpret=INTERPRET.get(),
    )
    return norm.reshape(x.shape[:-1]), words.reshape(*x.shape[:-1], -1)


def _residual(quantizer: Any) -> tuple[Any, Any] | None:
    """Normalized(first) and the sketch of Normalized(Residual(first, Sign)), if it is one."""
    match quantizer:
        case combinators.Normalized(inner=combinators.Residual(first=first, second=sign.Sign() as sketch), dtype=dtype):
            return combinators.Normalized(first, dtype), sketch
    return None


def _encode_residual(quantizer: Any, x: Array) -> Any:
    """The residual is sketched in the units of x; its norm is stored relative to that of x."""
    prod = _residual(quantizer)
    assert prod is not None
    first, sketch = prod
    norm, words = _encode(first, x)
    rest, signs = kernel("encode").encode(
        _rows(x),
        stages(sketch.sketch),
        jnp.zeros(1),
        symmetric=False,
        minus=_rows(first.decode((norm, words))),
        norm_dtype=jnp.float32,
        interpret=INTERPRET.get(),
    )
    size = norm.astype(jnp.float32)
    rest = rest.reshape(norm.shape) / jnp.where(size > 0, size, 1)
    return norm, (words, (rest.astype(sketch.dtype), signs.reshape(*norm.shape, -1)))


def _decode(quantizer: Any, codes: Any, dtype: Any) -> Array:
    fused, (norm, words) = Fused.of(quantizer), codes
    out = kernel("decode").decode(
        norm.reshape(-1),
        _rows(words),
        inverse_stages(fused.rotation),
        fused.scalar.values,
        dtype=dtype,
        interpret=INTERPRET.get(),
    )
    return out.reshape(*norm.shape, quantizer.dim)


def _roundtrip(quantizer: Any, x: Array) -> Array:
    fused = Fused.of(quantizer)
    out = kernel("roundtrip").rotor_roundtrip(
        _rows(x),
        fused.rotation.coefficients,
        fused.rotation.inverted.coefficients,
        fused.boundaries,
        fused.scalar.values,
        symmetric=fused.scalar.symmetric,
        norm_dtype=fused.norm_dtype,
        interpret=INTERPRET.get(),
    )
    return out.reshape(x.shape)


def nest(part: Any) -> str:
    """The names of a nest of quantizers or rotations."""
    inner = [getattr(part, name) for name in ("rotation", "inner", "first", "second", "sketch") if hasattr(part, name)]
    inner += [*getattr(part, "parts", ()), *getattr(part, "rotations", ())]
    return type(part).__name__ + (f"({', '.join(map(nest, inner))})" if inner else "")


def _listed(values: Any) -> str:
    return ", ".join(map(str, values))
