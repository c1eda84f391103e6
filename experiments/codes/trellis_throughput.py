"""Speed and memory of trellis codes in one run, beside `rotorquant`.

Encoding takes turns with the Viterbi algorithm as one would write it, decoding with a copy of what it returns.
"""

import resource
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import rqjax
from experiments.harness.table import Table
from experiments.harness.timing import medians
from rqjax.quantizers.trellis import Trellis
from rqjax.quantizers.trellis_per_coordinate import trellis_coded

MADE_BY = ("rqjax/quantizers/trellis.py", "rqjax/arrays/viterbi.py")
TABLES = (
    Table(
        "Thousands of vectors per second, how many times as fast as others in the same run, and the most memory so far",
        rows=("n", "dim", "bits", "state_bits"),
        columns=(),
        values=(
            "encoded",
            "encode_vs_plain",
            "encode_vs_rotorquant",
            "decoded",
            "decode_vs_memcpy",
            "decode_vs_rotorquant",
            "peak_gib",
        ),
    ),
)


def run(point: dict[str, Any]) -> dict[str, Any]:
    (n, dim), bits = point["shape"], point["bits"]
    trellis = trellis_coded(dim, bits, state_bits=point["state_bits"])
    rotorquant = rqjax.rotorquant(jax.random.key(0), dim, bits)
    x = jax.random.normal(jax.random.key(1), (n, dim)) / dim**0.5
    encode = jax.jit(lambda quantizer, x: quantizer.encode(x))
    decode = jax.jit(lambda quantizer, codes: quantizer.decode(codes))
    codes, others = encode(trellis, x), encode(rotorquant, x)
    array, copy = np.asarray(x), np.empty(x.shape, x.dtype)
    functions = {
        "encode": lambda: encode(trellis, x),
        "plain": lambda: plain_encode(trellis, x),
        "encode rotorquant": lambda: encode(rotorquant, x),
        "decode": lambda: decode(trellis, codes),
        "memcpy": lambda: np.copyto(copy, array),
        "decode rotorquant": lambda: decode(rotorquant, others),
    }
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    seconds = medians(functions, point["rounds"])
    return {
        "n": n,
        "dim": dim,
        "encoded": n / seconds["encode"] / 1000,
        "encode_vs_plain": seconds["plain"] / seconds["encode"],
        "encode_vs_rotorquant": seconds["encode rotorquant"] / seconds["encode"],
        "decoded": n / seconds["decode"] / 1000,
        "decode_vs_memcpy": seconds["memcpy"] / seconds["decode"],
        "decode_vs_rotorquant": seconds["decode rotorquant"] / seconds["decode"],
        "peak_gib": peak,
    }


@jax.jit
def plain_encode(trellis: Trellis, x: jax.Array) -> jax.Array:
    """Encodes with the same two passes, by argmin, 256 vectors side by side."""
    size, branches = 2**trellis.table.state_bits, 2**trellis.bits
    levels = trellis.values.reshape(branches, size // branches)

    def path(y: jax.Array, start: jax.Array, end: jax.Array) -> jax.Array:
        def step(cost: jax.Array, sample: jax.Array) -> tuple[jax.Array, jax.Array]:
            families = cost.reshape(size // branches, branches)
            return ((sample - levels) ** 2 + families.min(axis=1)).reshape(size), families.argmin(axis=1)

        cost, oldest = lax.scan(step, ((y[0] - levels) ** 2 + start).reshape(size), y[1:])
        last = jnp.argmin((cost.reshape(size // branches, branches) + end[:, None]).reshape(size))

        def back(state: jax.Array, best: jax.Array) -> tuple[jax.Array, jax.Array]:
            family = state % (size // branches)
            before = family * branches + best[family]
            return before, before

        return jnp.append(lax.scan(back, last, oldest, reverse=True)[1], last)

    def ring(y: jax.Array) -> jax.Array:
        window, free = min(len(y) // 2, -(-8 * trellis.table.state_bits // trellis.bits)), jnp.zeros(size // branches)
        family = path(jnp.roll(y, window)[: 2 * window], free, free)[window - 1] >> trellis.bits
        only = jnp.where(jnp.arange(size // branches) == family, 0, jnp.inf)
        return path(y, only, only)

    whole = x[: len(x) // 256 * 256].reshape(-1, 256, x.shape[1])
    return lax.map(jax.vmap(ring), whole).astype(jnp.uint16)
