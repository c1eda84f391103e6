"""Encoding, decoding and both at once on a GPU: the fused kernels, XLA, and the dense pipeline of torch.

`bytes` are the least that an operation moves: the vectors and their packed codes, each once.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import rqjax
from experiments.devices import gpu_clock, gpu_torch
from experiments.devices.gpu_clock import Time

RECIPES = {
    "rotor": rqjax.rotorquant,
    "hadamard": rqjax.hadamard,
    "chain": rqjax.rotor_chain,
    "dense": rqjax.turboquant,
    "prod": rqjax.turboquant_prod,
    "eden": rqjax.eden,
    "trellis": rqjax.turboquant_trellis,
}
OPERATIONS = ("encode", "decode", "roundtrip")
COMPARED = 2**16
"""Most vectors for which a kernel's result is compared with XLA's."""


class Missing(RuntimeError):
    """Raised if a case's device, library or file is not there."""


def moved(operation: str, method: str, n: int, point: dict[str, Any]) -> tuple[int, int]:
    """Returns the least bytes that an operation on n vectors reads, and reads and writes."""
    vectors = n * point["dim"] * jnp.dtype(point["dtype"]).itemsize
    norms = 32 if method == "prod" else 16  # bits; of the vector, and of the residual
    codes = n * (point["bits"] * point["dim"] + norms) // 8
    read = codes if operation == "decode" else vectors
    return read, 2 * vectors if operation == "roundtrip" else vectors + codes


def public(operation: str, implementation: str, dtype: str) -> Callable[..., Any]:
    """Returns the library's function of this name."""
    options = {"dtype": dtype} if operation == "decode" else {}
    return functools.partial(getattr(rqjax, operation), implementation=implementation, **options)


def measure(values: dict[str, Any], point: dict[str, Any]) -> dict[str, Any]:
    """Measures one `operation` of a `method` on so many `vectors`, `by` an implementation or a yardstick."""
    operation, by, n = values["operation"], values["by"], values["vectors"]
    clock = gpu_clock.Settings.of(point)
    read, total = moved(operation, values["method"], n, point)
    calls, sets = gpu_clock.counts(clock, read, total)
    sizes = (operation, n, point["dim"], point["bits"], point["dtype"], calls, sets, clock)
    dense = gpu_torch.available() and {way: gpu_torch.time(way, *sizes) for way in gpu_torch.WAYS}
    difference = None
    if by in gpu_torch.WAYS:
        if not dense:
            raise Missing("there is no torch" + ("" if point["rehearse"] else " with a GPU"))
        time = dense[by]
    else:
        function = jax.jit(public(operation, by, point["dtype"]))
        quantizer = RECIPES[values["method"]](jax.random.key(0), point["dim"], point["bits"])
        inputs = [(quantizer, _input(operation, quantizer, i, n, point)) for i in range(sets)]
        if by != "xla" and n <= COMPARED:
            difference = _difference(operation, function, *inputs[0], point["dtype"])
        time = gpu_clock.of_jax(clock).time(gpu_clock.over(function, inputs, calls))
    fastest = min((t.us for t in dense.values()), default=None) if dense else None
    return {**row(time, total), "difference": difference, "vs_dense": fastest and fastest / time.us}


def row(time: Time, total: int) -> dict[str, Any]:
    """Returns the values of a row for a time and the bytes moved in it."""
    values = {"us": time.us, "spread_us": time.spread, "queued": time.queued}
    return {**values, "bytes": total, "gb_per_second": total / time.us / 1e3}


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _vectors(seed: int, n: int, dim: int, dtype: str) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (n, dim), dtype)


def _input(operation: str, quantizer: Any, i: int, n: int, point: dict[str, Any]) -> Any:
    """Draws fresh random vectors, or makes their codes."""
    x = _vectors(i, n, point["dim"], point["dtype"])
    return _encode(quantizer, x) if operation == "decode" else x


@jax.jit
def _encode(quantizer: Any, x: jax.Array) -> Any:
    return quantizer.encode(x)


def _difference(operation: str, function: Callable[..., Any], quantizer: Any, data: Any, dtype: str) -> float:
    """Measures the relative distance between results of a kernel and XLA for the same input, decoded by XLA."""
    mine, other = function(quantizer, data), jax.jit(public(operation, "xla", dtype))(quantizer, data)
    if operation == "encode":
        mine, other = quantizer.decode(mine), quantizer.decode(other)
    mine, other = (x.astype(jnp.float32) for x in (mine, other))
    return float(jnp.linalg.norm(mine - other) / jnp.linalg.norm(other))
