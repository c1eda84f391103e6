"""Fused kernels for NVIDIA GPUs, Hopper and Blackwell: which quantizers and caches have one.

The implementation is "mosaic_gpu". A kernel gives the results of plain JAX, except for values within rounding of a
boundary between two levels.
"""

import functools
import importlib.util
import math
import time
from collections.abc import Iterable
from typing import Any

import jax
from jaxtyping import Array, Shaped

from rqjax.arrays import norms
from rqjax.backends import finders, hopper_attention, hopper_calls
from rqjax.backends.finders import Entry
from rqjax.backends.hopper_attention import ATTENTION
from rqjax.backends.hopper_calls import INTERPRET, kernel
from rqjax.cache.append import entered
from rqjax.cache.kv import KVCache, attention_constants
from rqjax.core import Quantizer, Unsupported, nest, platforms
from rqjax.core.quantizer import decode, encode, roundtrip
from rqjax.quantizers.combinators import Normalized, Rotated, Scaled
from rqjax.quantizers.scalar import Scalar
from rqjax.quantizers.trellis import Trellis
from rqjax.rotations import Chain, Dense, Hadamard, Rotor

NAME = "mosaic_gpu"
WITH_WGMMA = ("9.0",)
CAPABILITIES = *WITH_WGMMA, "10.0", "10.3"
"""Compute capabilities that kernels compile for; Mosaic does not take 12.0."""
ROTATIONS = "Rotor, Hadamard, Dense, or a Chain of a Rotor and a Hadamard"


def _missing() -> str | None:
    """Returns why kernels cannot run, or None: they need a GPU that Mosaic compiles for, and jax 0.10.2."""
    if reason := finders.old_jax(NAME):
        return reason
    if not INTERPRET.get():
        capability = platforms.compute_capability()
        if platforms.platform() != "gpu" or capability not in CAPABILITIES:
            where = platforms.platform() if capability is None else f"compute capability {capability}"
            need = f"compute capability {_listed(CAPABILITIES)}"
            return f"mosaic_gpu kernels need a Hopper or Blackwell GPU ({need}), this is {where}"
    return None if importlib.util.find_spec("absl") else "mosaic_gpu kernels need the package absl-py"


def _limits_to_encode(quantizer: Quantizer, x: Any) -> str | None:
    parts = hopper_calls.with_sketch(quantizer) or (quantizer,)
    return _limits_of_vectors(x) or next(filter(None, map(_limits_of_nest, parts)), None)


def _limits_of_trellis(quantizer: Trellis, x: Any) -> str | None:
    kernels, state_bits = kernel("trellis"), quantizer.table.state_bits
    if state_bits != kernels.STATE_BITS:
        return f"mosaic_gpu kernels take trellises of {kernels.STATE_BITS} state bits, not {state_bits}"
    if quantizer.bits > kernels.MAX_BITS:
        return f"mosaic_gpu kernels take trellis codes of up to {kernels.MAX_BITS} bits, not {quantizer.bits}"
    return _limits_of_vectors(x)


def _limits_to_decode(quantizer: Quantizer, x: Any) -> str | None:
    return _limits_of_nest(quantizer, back=True) or _limits_of_vectors(x)


def _limits_of_roundtrips(quantizer: Any, x: Any) -> str | None:
    if reason := _limits_of_nest(quantizer) or _limits_of_vectors(x):
        return reason
    if isinstance(quantizer, Scaled):
        return "the mosaic_gpu round trip is for Normalized, not for Scaled"
    kind = type(quantizer.inner.rotation)
    return None if kind is Rotor else f"the mosaic_gpu round trip is for Rotor, not for {kind.__name__}"


def _limits_of_nest(quantizer: Quantizer, *, back: bool = False) -> str | None:
    """Returns why there are no kernels for a nest, or none that rotate `back`; None if there are."""
    if getattr(quantizer, "dtype", None) == norms.LOGARITHMIC:
        return "mosaic_gpu kernels are for norms in floating point, not in eight bits"
    match quantizer:
        case Normalized(inner=Rotated(inner=Scalar()) as rotated) | Scaled(inner=Rotated(inner=Scalar()) as rotated):
            rotation, dims = rotated.rotation, kernel("launch").DENSE_DIMS
        case _:
            return (
                "mosaic_gpu kernels are for Normalized or Scaled(Rotated(rotation, Scalar)) and, to encode, "
                f"Normalized(Residual(Rotated(rotation, Scalar), sketch)), not for {nest(quantizer)}"
            )
    match rotation:
        case Dense() if back:
            return "mosaic_gpu kernels do not rotate back by a dense matrix"
        case Dense() if platforms.compute_capability() not in (None, *WITH_WGMMA):
            return "mosaic_gpu kernels multiply by dense matrices with wgmma, which only Hopper GPUs have"
        case Dense() if rotation.dim not in dims:
            return f"mosaic_gpu kernels take dense matrices of dimension {_listed(dims)}, not {rotation.dim}"
        case Rotor() | Hadamard() | Dense():
            return None
        case Chain(rotations=(Rotor(), Hadamard()) | (Hadamard(), Rotor())):
            return None
    return f"mosaic_gpu kernels rotate by {ROTATIONS}, not by {nest(rotation)}"


def _limits_of_vectors(x: Any) -> str | None:
    """Returns why kernels do not take vectors of this shape or dtype, or None."""
    launch = kernel("launch")
    if x.dtype.name not in launch.DTYPES:
        return f"mosaic_gpu kernels take {_listed(launch.DTYPES)}, not {x.dtype}"
    if x.shape[-1] not in launch.DIMS:
        return f"mosaic_gpu kernels take vectors of dimension {_listed(launch.DIMS)}, not {x.shape[-1]}"
    if not 0 < math.prod(x.shape[:-1]) < 2**31 // x.shape[-1]:
        return f"mosaic_gpu kernels take from 1 vector to 2**31 coordinates, not shape {x.shape}"
    return None


def _listed(values: Iterable[Any]) -> str:
    return ", ".join(map(str, values))


finders.register(
    NAME,
    _missing,
    [
        Entry(Quantizer.encode, (Normalized, Scaled), finders.of_vectors(_limits_to_encode), hopper_calls.encode),
        Entry(Quantizer.encode, (Trellis,), finders.of_vectors(_limits_of_trellis), hopper_calls.encode_trellis),
        Entry(Quantizer.decode, (Normalized, Scaled), finders.of_codes(_limits_to_decode), hopper_calls.decode),
        Entry(roundtrip, (Normalized, Scaled), finders.of_vectors(_limits_of_roundtrips), hopper_calls.roundtrip),
        ATTENTION.entry(NAME)._replace(call=hopper_attention.attend),
        Entry(entered, (KVCache,), hopper_attention.limits_to_enter, hopper_attention.enter, rows=False),
        Entry(
            attention_constants,
            (KVCache,),
            functools.partial(hopper_attention.limits_of_constants, NAME),
            hopper_attention.constants,
            rows=False,
        ),
    ],
)


def autotune(quantizer: Quantizer, x: Shaped[Array, "*n d"], *, repeats: int = 20) -> dict[str, int]:
    """Measures every tile size of the kernels for such vectors on this device, and keeps the fastest for this process.

    A dense matrix has one tile size to encode with, which is not measured.
    Functions that were compiled before keep theirs: call it first.

    Args:
      quantizer: one that has kernels.
      x: vectors, as many as there will be.
      repeats: launches that are timed together; the best of three times counts.

    Returns:
      Tokens of a tile for each kernel.

    Raises:
      Unsupported: there is no kernel for the quantizer, the vectors or the device; the message says why.
    """

    def compiled(operation: Any, **options: Any) -> Any:  # a function of its own is traced anew
        return jax.jit(lambda *operands: operation(*operands, implementation=NAME, **options))

    launch, n, dim = kernel("launch"), math.prod(x.shape[:-1]), x.shape[-1]
    codes = compiled(encode)(quantizer, x)
    found = {}
    cases = [(encode, x, {}), (decode, codes, {"dtype": x.dtype}), (roundtrip, x, {})]
    first: Any = (hopper_calls.with_sketch(quantizer) or (quantizer,))[0]
    for operation, operand, options in cases[1:] if isinstance(first.inner.rotation, Dense) else cases:
        name = operation.__name__
        try:
            jax.eval_shape(compiled(operation, **options), quantizer, operand)
        except Unsupported:
            continue

        def seconds(tokens, name=name, operation=operation, operand=operand, options=options):
            launch.TUNED[name, dim, n] = tokens
            run = compiled(operation, **options)
            jax.block_until_ready(run(quantizer, operand))
            times = []
            for _ in range(3):
                start = time.perf_counter()
                jax.block_until_ready([run(quantizer, operand) for _ in range(repeats)])
                times.append(time.perf_counter() - start)
            return min(times)

        found[name] = launch.TUNED[name, dim, n] = min(launch.tile_sizes(dim), key=seconds)
    return found
