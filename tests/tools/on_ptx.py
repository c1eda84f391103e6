"""A plugin of pytest that runs kernels as PTX, instruction by instruction, in the place of Pallas' interpreter.

`hopper.on_ptx` runs tests so: it needs the compiler for NVIDIA GPUs. What calls kernels is evaluated operation by
operation. Each kernel is compiled for its shapes, and the compiler's program for the host says how it is launched.
"""

import functools
import re
from typing import Any, NamedTuple

import jax
import numpy as np

from pallas_kernels.gpu import mosaic
from tests.tools import computed, hopper_compile
from tests.tools.apple import formulated
from tests.tools.ptx import Machine, TensorMap

PRINTED: dict[bytes, str] = {}
"""Texts that the compiler printed of each kernel."""


def pytest_configure() -> None:
    mosaic.interpret = lambda: False
    mosaic.races_found = lambda: False
    computed.run = run


def run(call: Any, *arguments: Any) -> Any:
    """Evaluates a function in which kernels are PTX."""
    with formulated("gpu", capability="9.0"):
        closed, shape = jax.make_jaxpr(call, return_shape=True)(*arguments)
    leaves = _evaluated(closed.jaxpr, closed.consts, jax.tree.leaves(arguments))
    return jax.tree.unflatten(jax.tree.structure(shape), leaves)


def _evaluated(jaxpr: Any, consts: Any, arguments: Any) -> list[Any]:
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *arguments], strict=True))
    read = lambda x: x.val if hasattr(x, "val") else values[x]  # noqa: E731
    for equation in jaxpr.eqns:
        operands = [read(x) for x in equation.invars]
        inner = equation.params.get("jaxpr", equation.params.get("call", equation.params.get("call_jaxpr")))
        if equation.primitive.name == "mpmd_map":
            found = _launched(equation, operands)
        elif equation.primitive.name in ("jit", "pjit", "custom_vmap_call", "custom_jvp_call", "closed_call"):
            found = _evaluated(inner.jaxpr, inner.consts, operands)
        else:
            found = equation.primitive.bind(*operands, **equation.params)
            found = found if equation.primitive.multiple_results else [found]
        values.update(zip(equation.outvars, found, strict=True))
    return [read(x) for x in jaxpr.outvars]


def _launched(equation: Any, operands: list[Any]) -> list[Any]:
    """Compiles a kernel and runs all of its blocks."""
    bind = functools.partial(equation.primitive.bind, **equation.params)
    with hopper_compile.Captured() as captured, formulated("gpu", capability="9.0"):
        shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands)
        lowered = hopper_compile.lower(bind, shapes)
        lowered.compile()
        (module,) = hopper_compile._modules(lowered)
        printed = PRINTED.setdefault(module.digest, captured.read())  # a process assembles equal kernels once
    ((_, _, text),) = hopper_compile._reports(printed)
    aliased = {after: before for before, after in dict(equation.params["input_output_aliases"]).items()}
    arrays = [np.array(x) for x in operands]
    for k, x in enumerate(equation.params["out_avals"]):
        out = np.empty(x.shape, x.dtype)
        out.reshape(-1).view(np.uint8)[...] = 255  # nobody has written it: as a float it is not a number
        arrays.append(arrays[aliased[k]] if k in aliased else out)
    launch = Launch.of(printed, [x.dtype.itemsize for x in arrays])
    flat = [x.reshape(-1).view(np.uint8) for x in arrays]
    rng = np.random.default_rng(0)  # warps go on in any order, but where a warpgroup multiplies together
    machine = Machine(text, flat, launch.arrays, launch.maps, launch.shared)
    for y in range(launch.grid[1]):
        for x in range(launch.grid[0]):
            machine.run(x, y, None if "wgmma" in text else rng)
    return [jax.numpy.asarray(x) for x in arrays[len(operands) :]]


class Launch(NamedTuple):
    """Facts of the launch of a kernel."""

    grid: tuple[int, int]
    shared: int
    """Bytes of shared memory."""
    arrays: list[int]
    """Numbers of the arrays that are its parameters, but for tensor maps."""
    maps: list[TensorMap]

    @classmethod
    def of(cls, printed: str, itemsizes: list[int]) -> "Launch":
        """Runs the host's program, in LLVM's language, up to the launch. A pointer is a name and an offset in bytes."""
        body = re.search(r"^define void @\w+_mosaic_gpu\(ptr %0, ptr %1, ptr %2\) \{\n(.*?)^\}", printed, re.M | re.S)
        assert body is not None
        values: dict[str, Any] = {"%0": ("stream", 0), "%1": ("kernel", 0), "%2": ("arguments", 0)}
        memory: dict[Any, Any] = {}
        found: dict[int, Any] = {}
        number = lambda x: int(x) if re.fullmatch(r"-?\d+", x) else values[x]  # noqa: E731

        def listed(pointer: Any, count: int) -> tuple[int, ...]:
            return tuple(memory[pointer[0], pointer[1] + 8 * i] for i in range(count))

        for line in body[1].splitlines():
            to, _, right = line.strip().partition(" = ") if " = " in line else ("", "", line.strip())
            words = right.replace(",", "").split()
            match words[0] if words else "":
                case "load":
                    base = values[words[words.index("ptr", 2) + 1]]
                    values[to] = ("array", base[1] // 8) if base[0] == "arguments" else memory.get(base, base)
                case "getelementptr":
                    kind, base, indices = re.match(r"getelementptr (.*), ptr (%\d+), (.*)$", right).groups()
                    name, offset = values[base]
                    values[to] = name, offset + (1 if kind == "i8" else 8) * int(indices.split()[-1])
                case "alloca":
                    values[to] = to, 0
                case "store":
                    value, place = re.match(r"store .*?(\S+), ptr (%\d+)", right).groups()
                    memory[values[place]] = number(value)
                case "insertvalue":
                    whole, value, place = re.match(
                        r"insertvalue \{.*?\} (\S+), \S+ (\S+), (.*)$", right
                    ).groups()  # fmt: skip
                    values[to] = {**values.get(whole, {}), place: number(value)}
                case "extractvalue":
                    whole, place = re.match(r"extractvalue \{.*?\} (\S+), (.*)$", right).groups()
                    values[to] = values[whole][place]
                case "ptrtoint" | "inttoptr":
                    values[to] = values[words[2]]
                case "call" if "init_tma_desc" in right:
                    arguments = [number(x) for x in re.findall(r"(?:ptr|i64) (\S+?)[,)]", right)]
                    there, array, _, rank, sizes, strides, swizzle, box = arguments
                    lists = [listed(x, rank) for x in (sizes, strides, box)]
                    found[there[1]] = TensorMap(array[1], *lists, itemsizes[array[1]], max(swizzle, 16))
                case "call" if "launch_kernel" in right:
                    arguments = tuple(number(x) for x in re.findall(r"(?:ptr|i32) (\S+?)[,)]", right))
                    params = [memory[memory[key]] for key in sorted(k for k in memory if k[0] == arguments[-1][0])]
                    arrays = [x[1] for x in params if x[0] == "array"]
                    return cls(arguments[1:3], arguments[10], arrays, [one for _, one in sorted(found.items())])
        raise ValueError("the host launches no kernel")
