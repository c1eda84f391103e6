"""Tests and benchmarks of the TPU kernels in one run: `configs/devices/tpu_suite.py` has the command and what it shows.

A case is one row: "tests", "<operation> <method> <by> <vectors>" or
"attend <cache> <by> <batch>x<tokens>x<query heads a KV head>". A case that cannot be measured says so in its row.
"""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from subprocess import SubprocessError
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import experiments
import rqjax
from experiments.devices import gpu_suite
from experiments.harness.table import Table
from experiments.harness.timing import medians
from rqjax.backends import tpu
from rqjax.core import PAGE, nbytes, platforms

MADE_BY = ("pallas_kernels/tpu/*.py", "rqjax/backends/tpu.py")
TABLES = (
    Table("Tests on the device", ("alone",), (), ("result",), having="alone"),
    Table(
        "Codes: microseconds, and times as fast as XLA",
        rows=("operation", "method", "vectors"),
        columns=("by",),
        values=("us", "vs_xla"),
        having="operation",
    ),
    Table(
        "Attention of one token: microseconds, megabytes, times as fast as jax.nn.dot_product_attention of bfloat16",
        rows=("batch", "tokens", "groups"),
        columns=("cache", "by"),
        values=("us", "megabytes", "vs_bfloat16"),
        having="cache",
    ),
    Table("What is missing", ("case",), (), ("note",), having="note"),
)
SMALL = {"vectors": 32, "tokens": 256, "batch": 1, "groups": 2, "rounds": 1, "calls": 1, "kv_heads": 2}
"""Sizes of a rehearsal."""
OPERATIONS = ("encode", "decode", "roundtrip")


def check(point: dict[str, Any]) -> None:
    _parse(point["case"])
    if platforms.platform() != "tpu" and not point["rehearse"]:
        raise ValueError(
            f"the TPU suite needs a TPU, v5 or v6, and finds {jax.devices()[0].device_kind!r}; "
            "--config.rehearse=True tries it in small on what there is"
        )


def run(point: dict[str, Any]) -> dict[str, Any]:
    """Measures one case. If it fails, its row says why, and the others still run."""
    values = _parse(point["case"])
    if point["rehearse"]:
        point = {**point, **SMALL}
        values = {name: min(value, SMALL[name]) if name in SMALL else value for name, value in values.items()}
    try:
        if "alone" in values:
            files = tuple(point["tests"])
            return {**values, **gpu_suite.tests(files, point["tests_timeout_s"], point["rehearse"], "tpu,cpu")}
        with _interpreted(platforms.platform() != "tpu"):
            return {**values, **(_attend if "cache" in values else _codes)(values, point)}
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, ImportError, SubprocessError) as error:
        return {**values, "note": (experiments.one_line(error) or type(error).__name__)[:200]}


def _parse(case: str) -> dict[str, Any]:
    """Parses the values of a case."""
    match case.split():
        case ["tests"]:
            return {"alone": case}
        case ["attend", cache, by, shape] if re.fullmatch(r"\d+x\d+x\d+", shape):
            sizes = dict(zip(("batch", "tokens", "groups"), map(int, shape.split("x")), strict=True))
            return {"cache": cache, "by": by, **sizes}
        case [operation, method, by, n] if operation in OPERATIONS and n.isdigit():
            return {"operation": operation, "method": method, "by": by, "vectors": int(n)}
    raise ValueError(
        "expected a case like 'tests', 'encode eden mosaic_tpu 4096' or 'attend v3_4 mosaic_tpu 8x8192x4', "
        f"got {case!r}"
    )


@contextlib.contextmanager
def _interpreted(wanted: bool) -> Iterator[None]:
    """Interprets kernels in a rehearsal without a TPU."""
    token = tpu.INTERPRET.set(wanted)
    try:
        yield
    finally:
        tpu.INTERPRET.reset(token)


def _timed(functions: dict[str, Callable[[], Any]], point: dict[str, Any]) -> dict[str, float]:
    """Measures the microseconds of each function, called many times in a row, taking turns."""
    many = {name: lambda f=f: [f() for _ in range(point["calls"])] for name, f in functions.items()}
    return {name: 1e6 * seconds / point["calls"] for name, seconds in medians(many, point["rounds"]).items()}


def _codes(values: dict[str, Any], point: dict[str, Any]) -> dict[str, Any]:
    quantizer = rqjax.METHODS[values["method"]](jax.random.key(0), point["dim"], point["bits"])
    x = jax.random.normal(jax.random.key(1), (values["vectors"], point["dim"]))
    operand = quantizer.encode(x) if values["operation"] == "decode" else x
    operation = getattr(rqjax, values["operation"])
    functions = {
        by: functools.partial(jax.jit(functools.partial(operation, implementation=by)), quantizer, operand)
        for by in dict.fromkeys((values["by"], "xla"))
    }
    us = _timed(functions, point)
    return {"us": us[values["by"]], "vs_xla": us["xla"] / us[values["by"]]}


def _attend(values: dict[str, Any], point: dict[str, Any]) -> dict[str, Any]:
    """Measures attention, taking turns with attention to bfloat16."""
    batch, tokens, heads, dim = values["batch"], values["tokens"], point["kv_heads"], point["dim"]
    keys = jax.random.split(jax.random.key(1), 3)
    k, v = (jax.random.normal(key, (batch, tokens, heads, dim), jnp.bfloat16) for key in keys[:2])
    q = jax.random.normal(keys[2], (batch, 1, heads * values["groups"], dim), jnp.bfloat16)
    plain = functools.partial(jax.jit(jax.nn.dot_product_attention), q, k, v)
    way, size = plain, k.nbytes + v.nbytes
    if values["cache"] in ("bfloat16", "int8"):
        if values["by"] == "paged":
            way, size = _paged(q, k, v, values["cache"] == "int8")
        elif (values["cache"], values["by"]) != ("bfloat16", "dot_product_attention"):
            raise ValueError(
                f"expected bfloat16 by dot_product_attention or paged, or int8 by paged, got {values['by']}"
            )
    else:
        by, _, paged = values["by"].partition("+")
        cache = jax.jit(rqjax.append)(_empty(values["cache"], k.shape, bool(paged)), k, v)
        size = nbytes(cache)
        way = functools.partial(jax.jit(functools.partial(rqjax.attend, implementation=by)), cache, q)
    us = _timed({"this": way, "plain": plain}, point)
    return {"us": us["this"], "megabytes": size / 1e6, "vs_bfloat16": us["plain"] / us["this"]}


def _empty(name: str, shape: tuple[int, ...], paged: bool) -> rqjax.KVCache:
    """Makes a cache with room for keys of a shape; if paged, in pages in random order."""
    batch, tokens, heads, dim = shape
    strategy = rqjax.strategy(name, jax.random.key(1), dim)
    if not paged:
        return strategy.cache(batch, heads, tokens)
    pages = batch * -(-tokens // PAGE)
    cache = strategy.cache(batch, heads, tokens, pages=pages)
    assert cache.tables is not None
    order = np.random.default_rng(0).permutation(pages)[: cache.tables.size]
    return dataclasses.replace(cache, tables=jnp.asarray(order.reshape(cache.tables.shape), jnp.int32))


def _paged(q: jax.Array, k: jax.Array, v: jax.Array, int8: bool) -> tuple[Callable[[], jax.Array], int]:
    """Returns jax's own attention to pages of 128 tokens in random order, and their bytes."""
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention, quantization_utils

    batch, tokens, heads, dim = k.shape
    count = tokens // PAGE
    order = np.random.default_rng(0).permutation(batch * count)
    tables = jnp.asarray(order.reshape(batch, count), jnp.int32)

    def pages(x: jax.Array) -> Any:
        rooms = jnp.moveaxis(x.reshape(batch * count, PAGE, heads, dim), 2, 0)
        rooms = rooms[:, jnp.argsort(jnp.asarray(order))]
        return quantization_utils.quantize_to_int8(rooms) if int8 else rooms

    stored = pages(k), pages(v)
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(stored))
    run = jax.jit(functools.partial(paged_attention, pages_per_compute_block=min(8, count)))
    lengths = jnp.full(batch, tokens, jnp.int32)
    return functools.partial(run, q[:, 0] * dim**-0.5, *stored, lengths, tables), size
