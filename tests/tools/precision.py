"""Finds, in jaxprs of programs as they are formulated for a GPU, numbers that a GPU computes otherwise than a CPU.

- Products of float32 that do not say their precision: NVIDIA GPUs take them in TF32, of 10 bits.
- Numbers rounded to a lower precision and widened again: XLA removes both conversions on a GPU
  (`xla_allow_excess_precision`), so that the numbers are not those which were stored. `core.products.rounded_to` keeps
  the rounding.

Kernels are not entered. `python -m tests.tools.precision` lists what is found in all programs.
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tests.tools.apple import formulated

ROOT = Path(__file__).resolve().parents[2]
PRODUCTS = {"dot_general", "ragged_dot", "ragged_dot_general", "conv_general_dilated"}
MOVES = {
    *("bitcast_convert_type", "broadcast_in_dim", "concatenate", "copy", "dynamic_slice", "dynamic_update_slice"),
    *("expand_dims", "gather", "pad", "reshape", "rev", "scatter", "select_n", "slice", "squeeze", "stop_gradient"),
    *("transpose", "optimization_barrier"),
}
"""Operations whose results are numbers of their operands, past which XLA may move a conversion."""
KERNELS = {"pallas_call", "mpmd_map", "core_map"}
"""Operations that are not entered."""


class Numbers(NamedTuple):
    """Says of an array what became of its numbers."""

    rounded: int | None = None
    """Bits of mantissa that `reduce_precision` left, with the exponent of float32."""
    narrowed: str | None = None
    """Place of a conversion to a lower precision that XLA may remove."""
    dtype: Any = None
    """The lower precision."""


def findings(function: Callable[..., Any], *operands: Any) -> list[str]:
    """Traces a function for a GPU, and returns places where its precision is not that of its formulas."""
    with formulated("gpu"), jax.default_matmul_precision(None):
        jaxpr = jax.make_jaxpr(function)(*operands).jaxpr
    known: dict[Any, Numbers] = {}
    return sorted({*_walk(jaxpr, known), *_widened(jaxpr.outvars, known, "a result")})


def _walk(jaxpr: Any, known: dict[Any, Numbers]) -> Iterator[str]:
    """Yields findings; `known` are numbers by variable, those of the results are added to it."""
    for eqn in jaxpr.eqns:
        name, operands = eqn.primitive.name, [_of(v, known) for v in eqn.invars]
        dtypes = [getattr(v.aval, "dtype", None) for v in eqn.invars]
        if name in PRODUCTS and eqn.params["precision"] is None and all(_wide(dtype) for dtype in dtypes[:2]):
            yield f"{_place(eqn)}: product of float32 without a precision"
        here = Numbers()
        if name == "reduce_precision":
            here = Numbers(rounded=eqn.params["mantissa_bits"])
        elif name == "convert_element_type":
            here = _converted(eqn, operands[0], dtypes[0], eqn.params["new_dtype"])
        elif name in MOVES:
            here = next((one for one in operands if one.narrowed), max(operands, key=lambda one: one.rounded or 0))
        elif name not in KERNELS and (bodies := list(_bodies(eqn))):
            for body, given in bodies:
                inside = {v: _of(w, known) for v, w in zip(body.invars, given, strict=True)}
                yield from _walk(body, inside)
                results = [_of(v, inside) for v in body.outvars]
                known.update((v, one) for v, one in zip(eqn.outvars, results) if one.narrowed or v not in known)  # noqa: B905
            continue
        known.update((v, here) for v in eqn.outvars)
        if name not in MOVES | {"reduce_precision", "convert_element_type"}:
            yield from _widened(eqn.invars, known, _place(eqn))


def _of(variable: Any, known: dict[Any, Numbers]) -> Numbers:
    return Numbers() if hasattr(variable, "val") else known.get(variable, Numbers())  # constants are not hashable


def _widened(variables: list[Any], known: dict[Any, Numbers], use: str) -> Iterator[str]:
    for variable in variables:
        if (one := _of(variable, known)).narrowed and _wide(variable.aval.dtype):
            yield f"{one.narrowed}: rounded to {one.dtype}, widened again for {use}"


def _converted(eqn: Any, one: Numbers, before: Any, after: Any) -> Numbers:
    if _wide(before) and _narrow(after) and not one.narrowed:
        kept = one.rounded is not None and one.rounded <= jnp.finfo(after).nmant
        return one if kept else Numbers(narrowed=_place(eqn), dtype=after)
    return one if _narrow(before) or _wide(before) else Numbers()


def _wide(dtype: Any) -> bool:
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize >= 4


def _narrow(dtype: Any) -> bool:
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4


def _bodies(eqn: Any) -> Iterator[tuple[Any, list[Any]]]:
    """Jaxprs within an equation, and the variables that they are given."""
    given = list(eqn.invars)
    if eqn.primitive.name == "while":
        conditions, constants = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        yield eqn.params["cond_jaxpr"].jaxpr, given[:conditions] + given[conditions + constants :]
        yield eqn.params["body_jaxpr"].jaxpr, given[conditions:]
        return
    for value in eqn.params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            body = getattr(one, "jaxpr", one)
            if hasattr(body, "eqns"):
                yield body, given[len(given) - len(body.invars) :]


def _place(eqn: Any) -> str:
    """File and line of the library that an equation is from, the innermost."""
    of_library = ROOT / "rqjax"
    for frame in eqn.source_info.traceback.frames:
        path = Path(frame.file_name).resolve()
        if path.is_relative_to(of_library):
            return f"{path.relative_to(ROOT)}:{frame.line_num}"
    return "outside of the library"


def main() -> None:
    from tests.tools.programs import PROGRAMS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="programs; all, if none is named")
    for name in parser.parse_args().names or PROGRAMS:
        function, operands = PROGRAMS[name]()
        print(f"{name}: ", *findings(function, *operands), sep="\n  ")


if __name__ == "__main__":
    main()
