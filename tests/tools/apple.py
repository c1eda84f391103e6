"""Operations that programs for Apple's devices may consist of: a list for StableHLO, and conditions with their sources.

An operation that is not on the list is not known to work; it is put there, or the code is formulated otherwise, after
looking. `check` walks a lowered program.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax

from rqjax.core import platforms

STRATEGIES = ("v2_lean", "v2_rotated_qjl", "v3_3.5", "v3_4+centered", "turboquant_trellis_2", "eden/rtn", "bfloat16")

ALLOWED = {
    *("abs", "add", "and", "bitcast_convert", "broadcast_in_dim", "case", "clamp", "compare", "concatenate"),
    *("constant", "convert", "cosine", "divide", "dot_general", "dynamic_slice", "dynamic_update_slice"),
    *("exponential", "floor", "gather", "iota", "is_finite", "log", "maximum", "minimum", "multiply", "negate", "not"),
    *("or", "pad", "power", "reduce", "remainder", "reshape", "return", "round_nearest_even", "rsqrt", "scatter"),
    *("select", "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sine", "slice", "sqrt"),
    *("subtract", "tanh", "transpose", "while", "xor"),
}
"""Operations of StableHLO; jax-mps 0.11.1 has a handler for each. `chlo.top_k` comes beside them, which jax-metal 0.1.1
has repaired, and `chlo.erf_inv`, without which there would be no random normals."""

EXCLUDED = {
    "custom_call": "not legalised by jax-metal (jax issue 16287); QR, eigh and callbacks are such",
    "cholesky": "not legalised by jax-metal; made on the host",
    "triangular_solve": "not legalised by jax-metal; made on the host",
    "complex": "complex64 and complex128 are unsupported (release notes of jax-metal 0.1.1)",
    "fft": "its numbers are complex",
    "popcnt": "not legalised by jax-metal",
    "count_leading_zeros": "not legalised by jax-metal (jax issue 21389)",
    "reduce_window": "not legalised by jax-metal with padding (jax issue 21389)",
    "rng_bit_generator": "random numbers are made on the host, or by threefry in plain arithmetic",
}
"""Reasons why some operations are not on the list."""

TYPES = {"i1", "i8", "i32", "i64", "ui8", "ui16", "ui32", "ui64", "f16", "bf16", "f32"}
"""Types, without float64 (jax issue 16435, release notes of jax-metal 0.1.1) and complex numbers."""


@contextlib.contextmanager
def formulated(name: str, capability: str | None = None) -> Iterator[str]:
    """Formulates programs for a platform that is not there, with the kernels for a GPU of this capability."""
    token, own = platforms.PLATFORM.set(name), platforms.CAPABILITY.set(capability)
    yield name
    platforms.PLATFORM.reset(token)
    platforms.CAPABILITY.reset(own)


def violations(program: jax.stages.Lowered) -> list[str]:
    """Returns the reasons why Apple's devices may not run a lowered program."""
    return [reason for op in _operations(program.compiler_ir("stablehlo").operation) if (reason := _reason(op))]


def _operations(op: Any) -> Iterator[Any]:
    yield op
    for region in op.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield from _operations(inner.operation)


def _reason(op: Any) -> str | None:
    dialect, _, name = op.name.partition(".")
    if dialect == "chlo":
        return None if name in ("top_k", "erf_inv") else f"{op.name}: not known to work"
    if dialect in ("builtin", "func") or op.name == "sdy.mesh":  # an empty one, which jax-mps switches off
        return None
    if dialect != "stablehlo" or name not in ALLOWED:
        return f"{op.name}: {EXCLUDED.get(name, 'not known to work')}"
    types = [value.type for value in (*op.operands, *op.results)]
    elements = [str(getattr(t, "element_type", t)) for t in types]
    if other := set(elements) - TYPES:
        return f"{op.name} of {', '.join(sorted(other))}: no such numbers"
    return _form(op, name, types, elements)


def _form(op: Any, name: str, types: list[Any], elements: list[str]) -> str | None:
    """Returns why the form of an allowed operation is not allowed, if it is not."""
    if name == "dot_general":
        # jax-mps multiplies integers as float32, and by the operands' type whatever the result's (its ops/linalg.cc)
        if len(set(elements)) > 1 or elements[0] not in ("f16", "bf16", "f32"):
            return f"dot_general of {elements}: products are of floats of one type"
    elif name == "reduce":
        if any(axis < len(types[0].shape) - 4 for axis in list(op.attributes["dimensions"])):
            return "reduce beyond the last four axes: jax-metal fails (jax issue 20112)"
        if len(op.results) > 1 and not elements[1].endswith("i32"):  # argmax is known: flax's MNIST (jax issue 16366)
            return "reduce of several arrays at once: not legalised by jax-metal (jax issue 21384)"
    elif name in ("dynamic_slice", "dynamic_update_slice"):
        first = 1 if name == "dynamic_slice" else 2
        if any(e.startswith("ui") for e in elements[first : len(op.operands)]):
            return f"{name} at unsigned places: jax-metal fails (jax issue 21590)"
    elif name == "scatter":
        if len(op.results) > 1:
            return "scatter of several arrays at once: not in jax-mps (its ops/gather_scatter.cc)"
    elif name == "pad" and any(list(op.attributes["interior_padding"])):
        return "pad between numbers: not legalised by jax-metal (jax issue 20119)"
    return None
