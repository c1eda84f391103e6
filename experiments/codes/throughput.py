"""Speed of encoding and of reconstruction, as ratios in one run over the same vectors.

Functions that are compared take turns in one process, and each turn runs a function twice. The first call finds the
caches as the others left them (cold), the second as it left them itself (warm). Times are medians over the rounds.
"""

import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # else FAISS's idle threads spin into the next measurement

import faiss
import jax
import jax.numpy as jnp
import numpy as np

import rqjax
from experiments.harness.table import Table
from experiments.harness.timing import turns

MADE_BY = ("rqjax/recipes/methods.py", "rqjax/quantizers/scalar.py", "rqjax/arrays/packing.py")
TABLES = (
    Table(
        "Encoding in milliseconds, and how many times faster than FAISS's SQ4, a memcpy of the input, and turboquant",
        rows=("bits", "method"),
        columns=(),
        values=(
            "encode_ms",
            "encode_ms_cold",
            "vs_sq4",
            "vs_sq4_cold",
            "vs_memcpy",
            "vs_memcpy_cold",
            "vs_turboquant",
            "vs_turboquant_cold",
            "temporaries_mib",
        ),
        each=("dim", "n"),
    ),
    Table(
        "Reconstruction in blocks of 8 MiB: milliseconds, and how many times faster than FAISS's SQ4",
        rows=("bits", "method"),
        columns=(),
        values=("decode_ms", "decode_vs_sq4"),
        each=("dim",),
    ),
)


def run(point: dict[str, Any]) -> dict[str, Any]:
    """Measures one method against its three yardsticks; `method` may end in ":bfloat16" for input in that dtype."""
    dim, bits, n = point["dim"], point["bits"], point["coordinates"] // point["dim"]
    method, _, dtype = point["method"].partition(":")
    x = np.random.default_rng(0).standard_normal((n, dim), np.float32)
    copy, sq4 = np.empty_like(x), faiss.IndexScalarQuantizer(dim, faiss.ScalarQuantizer.QT_4bit)
    sq4.train(x[:10_000])
    encode = jax.jit(lambda quantizer, x: quantizer.encode(x))
    decode = jax.jit(lambda quantizer, codes: quantizer.decode(codes))
    mine, dense = (rqjax.METHODS[name](jax.random.key(0), dim, bits) for name in (method, "turboquant"))
    vectors, float32 = jnp.asarray(x, dtype or "float32"), jnp.asarray(x)
    encoded = _medians(
        {
            "mine": lambda: encode(mine, vectors),
            "sq4": lambda: sq4.sa_encode(x),
            "memcpy": lambda: np.copyto(copy, x),
            "turboquant": lambda: encode(dense, float32),
        },
        point["rounds"],
    )
    block = 2**21 // dim
    codes, sq4_codes = encode(mine, vectors[:block]), sq4.sa_encode(x[:block])
    decoded = _medians({"mine": lambda: decode(mine, codes), "sq4": lambda: sq4.sa_decode(sq4_codes)}, point["rounds"])
    result: dict[str, Any] = {"n": n, "encode_ms": encoded["mine"][0], "encode_ms_cold": encoded["mine"][1]}
    for name in ("sq4", "memcpy", "turboquant"):
        result[f"vs_{name}"] = encoded[name][0] / encoded["mine"][0]
        result[f"vs_{name}_cold"] = encoded[name][1] / encoded["mine"][1]
    memory = encode.lower(mine, vectors).compile().memory_analysis()
    return {
        **result,
        "temporaries_mib": memory.temp_size_in_bytes / 2**20 if memory else None,
        "decode_ms": decoded["mine"][0],
        "decode_vs_sq4": decoded["sq4"][0] / decoded["mine"][0],
    }


def _medians(functions: dict[str, Callable[[], Any]], rounds: int) -> dict[str, tuple[float, float]]:
    """Measures the milliseconds of each function (warm, cold)."""
    times = turns(functions, rounds + 2, calls=2)
    medians = {name: np.median(seconds[2:], axis=0) * 1e3 for name, seconds in times.items()}
    return {name: (float(warm), float(cold)) for name, (cold, warm) in medians.items()}
