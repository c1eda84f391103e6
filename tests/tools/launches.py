"""Counts what compiled programs for GPUs launch: kernels, copies, loops, and what the host waits for.

    python -m tests.tools.hopper --launches    # of every program of `PROGRAMS`, as a table

Counts are of the optimized HLO. A loop whose trips the compiler knows waits for nothing. The host reads the predicate
of any other loop, and of each condition, unless it is within a command buffer.
"""

import functools
import json
import re
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

import rqjax
from experiments.language.generation_throughput import WIDE_FIELDS
from rqjax.nn import Decoder, DecoderConfig

FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"}
"""Instructions that launch nothing."""
ASSIGNED = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.+)$")
BODY = re.compile(r"body=%?([\w.\-]+)")
CALLED = re.compile(r"(?:condition|body|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
TRIPS = re.compile(r"known_trip_count[^0-9]*(\d+)")


class Counts(NamedTuple):
    """Launches of a program."""

    launches: int
    """Kernels, copies and calls of libraries; those of loops with known trips as often as these run."""
    waits: int
    """Loops and conditions whose predicate the host reads."""
    within: int
    """Launches of one pass through those."""


def counted(text: str) -> Counts:
    """Counts the launches of a program, the text of its optimized HLO."""
    computations = _computations(text)

    def of(name: str) -> Counts:
        launches = waits = within = 0
        for line, opcode in _launching(computations[name]):
            if opcode not in ("while", "conditional", "call"):
                launches += 1
                continue
            trips, branches = TRIPS.search(line), BRANCHES.search(line)
            if opcode == "call" or trips:
                body = of((BODY.search(line) or CALLED.search(line))[1])
                launches += body.launches * (int(trips[1]) if trips else 1)
                waits, within = waits + body.waits, within + body.within
            else:
                names = CALLED.findall(line) + re.findall(r"[\w.\-]+", branches[1] if branches else "")
                inner = [of(one) for one in names]
                waits += 1 + sum(one.waits for one in inner)
                within += sum(one.launches + one.within for one in inner)
        return Counts(launches, waits, within)

    return of("ENTRY")


def _launching(lines: list[str]) -> list[tuple[str, str]]:
    """Returns the lines that launch something, each with its opcode."""
    found = [(line, _opcode(assigned[2])) for line in lines if (assigned := ASSIGNED.match(line))]
    return [(line, opcode) for line, opcode in found if opcode not in FREE]


def _computations(text: str) -> dict[str, list[str]]:
    """Returns the lines of each computation of a module; those of the entry as "ENTRY", too."""
    found: dict[str, list[str]] = {}
    current: list[str] = []
    for line in text.splitlines():
        begins = re.match(r"(ENTRY )?%?([\w.\-]+) .*\{\s*$", line)
        if begins:
            current = found.setdefault(begins[2], [])
            if begins[1]:
                found["ENTRY"] = current
        elif " = " in line:
            current.append(line)
    return found


def _opcode(assigned: str) -> str:
    """Returns the opcode of "type opcode(operands)"; a type may be a tuple."""
    if assigned.startswith("("):
        depth = 0
        for end, character in enumerate(assigned):
            depth += {"(": 1, ")": -1}.get(character, 0)
            if depth == 0:
                return assigned[end + 1 :].split("(", 1)[0].strip()
    return assigned.split(" ", 1)[1].split("(", 1)[0].strip()


def bfloat16(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def cache(name: str, batch: int, max_len: int, pages: int | None = None) -> Any:
    """Returns the shapes of a cache of 8 heads of 128."""
    rope = rqjax.Rope(1e4) if "turned" in name or "pre_rope" in name else None
    make = lambda key: rqjax.strategy(name, key, 128).cache(batch, 8, max_len, pages=pages, rope=rope)  # noqa: E731
    return jax.eval_shape(make, jax.random.key(0))


def appended(name: str, batch: int, time: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    x = bfloat16(batch, time, 8, 128)
    return rqjax.append, (cache(name, batch, 16_384), x, x)


def attended(
    name: str, batch: int, time: int = 1, pages: int | None = None, **options: Any
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    run = functools.partial(rqjax.attend, **options)
    return run, (cache(name, batch, 16_384, pages), bfloat16(batch, time, 32, 128))


def attended_latents(name: str, batch: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Makes attention of 16 queries to latents of 512, with 64 coordinates that turn."""
    make = lambda key: rqjax.strategy(name, key, 576, latent=512).cache(batch, 1, 8192)  # noqa: E731
    return rqjax.attend, (jax.eval_shape(make, jax.random.key(0)), bfloat16(batch, 1, 16, 576))


def step(name: str, batch: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    def run(cache: Any, q: Any, k: Any, v: Any) -> Any:
        return rqjax.dot_product_attention(q, k, v, cache)[::-1]

    x = bfloat16(batch, 1, 8, 128)
    return run, (cache(name, batch, 16_384), bfloat16(batch, 1, 32, 128), x, x)


def decoded(name: str, batch: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Makes a step of a decoder with one layer of Llama 3.2 3B's shape, up to its logits."""
    config = DecoderConfig.parse({**WIDE_FIELDS, "num_hidden_layers": 1})
    make = lambda: Decoder(config, rngs=nnx.Rngs(0), dtype=jnp.dtype("bfloat16"))  # noqa: E731
    graph, state = nnx.split(nnx.eval_shape(make))
    caches = lambda key: nnx.merge(graph, state).caches(name, key, batch=batch, max_len=8192)  # noqa: E731

    def run(caches: Any, state: Any, tokens: Any) -> Any:
        return nnx.merge(graph, state)(tokens, caches)

    return run, (jax.eval_shape(caches, jax.random.key(0)), state, jax.ShapeDtypeStruct((batch, 1), jnp.int32))


def encoded(name: str, bits: int = 4) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    quantizer = jax.eval_shape(lambda key: rqjax.METHODS[name](key, 128, bits), jax.random.key(0))
    x = jax.ShapeDtypeStruct((65_536, 128), jnp.float32)
    return lambda x, quantizer: quantizer.encode(x), (x, quantizer)


def searched() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    make = lambda key, x: rqjax.Index.build(rqjax.METHODS["eden_unbiased"](key, 128, 4), x)  # noqa: E731
    index = jax.eval_shape(make, jax.random.key(0), jax.ShapeDtypeStruct((100_000, 128), jnp.float32))
    return lambda y, index: index.search(y, 10), (jax.ShapeDtypeStruct((1000, 128), jnp.float32), index)


PROGRAMS: dict[str, Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]] = {
    "append 1 token to 8 sequences, eden_4": lambda: appended("eden_4", 8, 1),
    "append 4,096 tokens, eden_4": lambda: appended("eden_4", 1, 4096),
    "append 1 token to 8 sequences, v2_lean": lambda: appended("v2_lean", 8, 1),
    "append 1 token to 8 sequences, eden_3+centered": lambda: appended("eden_3+centered", 8, 1),
    "append 1 token to 8 sequences, turboquant_trellis_3": lambda: appended("turboquant_trellis_3", 8, 1),
    "append 1 token to 8 sequences, turboquant_trellis_2.5": lambda: appended("turboquant_trellis_2.5", 8, 1),
    "attend to 8 sequences, eden_4": lambda: attended("eden_4", 8),
    "attend to 8 sequences in pages, eden_3+centered": lambda: attended("eden_3+centered", 8, pages=1024, softcap=30.0),
    "attend to 8 sequences, eden_4+turned": lambda: attended("eden_4+turned", 8),
    "attend to 8 sequences, 4 tokens each, eden_4": lambda: attended("eden_4", 8, time=4),
    "attend to 8 sequences, eden_4+pre_rope": lambda: attended("eden_4+pre_rope", 8),
    "attend to 8 sequences of latents, eden_4": lambda: attended_latents("eden_4", 8),
    "append and attend, 8 sequences, eden_4": lambda: step("eden_4", 8),
    "step of a decoder of one layer, 8 sequences, eden_4": lambda: decoded("eden_4", 8),
    "attend to 8 sequences in plain XLA, nested_e8_3": lambda: attended("nested_e8_3", 8),
    "encode 65,536 vectors, rotorquant": lambda: encoded("rotorquant"),
    "encode 65,536 vectors, eden": lambda: encoded("eden"),
    "encode 65,536 vectors, trellis of 3 bits": lambda: encoded("turboquant_trellis", 3),
    "search 100,000 vectors for 1,000 queries": searched,
}


def main(names: list[str]) -> dict[str, dict[str, int]]:
    """Compiles programs and counts; the environment is that which `hopper.launched` makes."""
    from tests.tools.apple import formulated
    from tests.tools.hopper_compile import Captured, lower

    found = {}
    with Captured():  # kernels print their PTX
        for name in names:
            with formulated("gpu", capability="9.0"):
                function, shapes = PROGRAMS[name]()
                text = lower(function, shapes, donate_argnums=0).compile().as_text()
            found[name] = counted(text)._asdict()
    return found


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
