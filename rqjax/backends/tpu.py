"""Fused kernels for TPUs: which quantizers and caches have one. The implementation "mosaic_tpu".

A kernel gives the results of plain JAX, except for values within rounding of a boundary between two levels. In
attention, queries and the weights of some tokens are rounded to 15 bits of the largest.
"""

import importlib
import math
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array

from rqjax.arrays import norms
from rqjax.backends import finders, nests
from rqjax.backends.coded_attention import CodedAttention
from rqjax.backends.finders import Entry
from rqjax.cache.kv import KVCache
from rqjax.core import Codes, Quantizer, nest, platforms
from rqjax.core.dispatch import CONTEXT
from rqjax.core.quantizer import roundtrip
from rqjax.quantizers.affine import Affine
from rqjax.quantizers.combinators import Normalized, Scaled
from rqjax.quantizers.per_head import PerHead
from rqjax.quantizers.scalar import Scalar

NAME = "mosaic_tpu"
INTERPRET: ContextVar[Any] = ContextVar("interpret_tpu", default=False)
"""Interpreter of kernels on a CPU, True or `jax.experimental.pallas.tpu.InterpretParams()`, or False."""
CONTEXT.append(INTERPRET.get)


def _missing() -> str | None:
    """Returns why kernels cannot run, or None: they need a TPU and jax 0.10.2."""
    if (reason := finders.old_jax(NAME)) or INTERPRET.get():
        return reason
    if platforms.platform() != "tpu":
        return f"mosaic_tpu kernels need a TPU, this is {platforms.platform()}"
    kind = jax.devices()[0].device_kind
    if not kind.startswith(("TPU v5", "TPU v6")):
        return f"mosaic_tpu kernels need a TPU that multiplies int8, v5 or v6, this is {kind}"
    return None


def _kernel(module: str) -> Any:
    """Imports a module of `pallas_kernels.tpu` on first use."""
    return importlib.import_module(f"pallas_kernels.tpu.{module}")


def _limits(quantizer: Quantizer, x: Any) -> str | None:
    """Returns why no kernel encodes or decodes vectors, or None."""
    found, vectors = nests.RotatedScalar.of(quantizer), _kernel("vectors")
    leaf = found.leaf
    inner = nests.within_rotations(quantizer.inner)  # pyright: ignore[reportAttributeAccessIssue]
    if not (isinstance(inner, Scalar) and found.rotations and isinstance(found.outer, Normalized | Scaled)):
        return f"mosaic_tpu kernels are for Normalized or Scaled(Rotated(rotation, Scalar)), not for {nest(quantizer)}"
    if not leaf.symmetric or leaf.bits > vectors.MAX_BITS:
        which = f"{leaf.bits} bits" if leaf.symmetric else "others"
        return f"mosaic_tpu kernels are for symmetric levels of up to {vectors.MAX_BITS} bits, not for {which}"
    if found.outer.dtype == norms.LOGARITHMIC:
        return "mosaic_tpu kernels are for norms in floating point, not in eight bits"
    if x.dtype.name not in vectors.DTYPES:
        return f"mosaic_tpu kernels take {', '.join(vectors.DTYPES)}, not {x.dtype}"
    if x.shape[-1] not in vectors.DIMS or leaf.dim != x.shape[-1]:
        return f"mosaic_tpu kernels take vectors of dimension {vectors.DIMS}, not {x.shape[-1]}"
    return None if math.prod(x.shape) else "mosaic_tpu kernels take at least one vector"


def _limits_of_codes(cache: KVCache, quantizer: Quantizer, codes: Codes, rows: int) -> str | None:
    """Returns why attention's kernel does not take keys or values, or None."""
    found, most = nests.part(quantizer, codes), _kernel("decode_attention").MAX_GROUPS
    if isinstance(found.leaf, Affine) and found.leaf.dim > most * found.leaf.group_size:
        return f"{found.leaf.dim // found.leaf.group_size} groups, more than {most}"
    return nests.reason_of_leaf(found, isinstance(quantizer, PerHead))


def _parts(quantizer: Any) -> tuple[Array, Array, Any]:
    """Matrix of the rotation, levels, and static plan, as the kernels take them."""
    found = nests.RotatedScalar.of(quantizer)
    plan = _kernel("vectors").Plan(found.leaf.bits, getattr(quantizer, "mode", None), quantizer.dtype)
    return found.rotated(jnp.eye(quantizer.dim)).T, found.leaf.values, plan


def _encode(quantizer: Any, x: Array) -> Codes:
    rows = x.reshape(-1, x.shape[-1])
    norm, words = _kernel("vectors").encode(rows, *_parts(quantizer), interpret=INTERPRET.get())
    return norm.reshape(x.shape[:-1]), words.reshape(*x.shape[:-1], -1)


def _decode(quantizer: Any, codes: Codes, *, dtype: DTypeLike | None = None) -> Array:
    norm, words = codes
    flat = norm.reshape(-1), words.reshape(norm.size, -1)
    options = {"dtype": dtype or jnp.float32, "interpret": INTERPRET.get()}
    return _kernel("vectors").decode(*flat, *_parts(quantizer), **options).reshape(*norm.shape, -1)


def _roundtrip(quantizer: Any, x: Array) -> Array:
    rows = x.reshape(-1, x.shape[-1])
    return _kernel("vectors").roundtrip(rows, *_parts(quantizer), interpret=INTERPRET.get()).reshape(x.shape)


def _attend(
    y: Array, keys: Any, values: Any, start: Array, stop: Array, shift: Any, *, dim: int, **options: Any
) -> Any:
    """Attends with queries that all see the same codes."""
    operands = y, keys, values, start, stop[:, 0], shift
    return _kernel("decode_attention").decode_attention(*operands, interpret=INTERPRET.get(), **options)


finders.register(
    NAME,
    _missing,
    [
        Entry(Quantizer.encode, (Normalized, Scaled), finders.of_vectors(_limits), _encode),
        Entry(Quantizer.decode, (Normalized, Scaled), finders.of_codes(_limits), _decode),
        Entry(roundtrip, (Normalized, Scaled), finders.of_vectors(_limits), _roundtrip),
        CodedAttention(_limits_of_codes, _attend).entry(NAME),
    ],
)
