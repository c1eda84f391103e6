"""Runs decoders on a mesh of 8 devices and compares what they make with the same decoders on one device.

python tests/tools/mesh_decoder.py FOLDER PROCESSES RANK PORT, after `write(FOLDER)`
"""

import functools
import json
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import rqjax
from rqjax.core import nbytes
from rqjax.core.mesh import fetched
from rqjax.nn import Decoder, DecoderConfig, Engine, checkpoint, generate, load_decoder, save_decoder

SIZES = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 32, "num_hidden_layers": 2}
MANY = {**SIZES, "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 96}
FIELDS: dict[str, dict[str, Any]] = {
    "qwen3": MANY,
    "qwen2": {
        **SIZES,
        **{"num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 97},
        "mlp_bias": True,
    },
    "qwen3_moe": {
        **{**MANY, "num_hidden_layers": 1, "moe_intermediate_size": 16, "num_experts": 4},
        "num_experts_per_tok": 2,
    },
    "gpt_oss": {**MANY, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32},
}
"""Grouped queries and norms of heads; biases, and a vocabulary that does not divide; experts; those of one tensor, with
biases and learned sinks."""
TEXT = np.random.default_rng(0).integers(3, 90, (2, 170))
LONG = TEXT.ravel()[:300]
PARTS = [167, 168, 169]
OPTIONS = {"window": 16, "sinks": 4}
FORWARD = jax.jit(lambda model, tokens, caches: model(tokens, caches), donate_argnums=2)


def write(folder: Path) -> None:
    """Checkpoints with random weights, and what the first answers on one device."""
    for name, fields in FIELDS.items():
        model = Decoder(DecoderConfig.parse({**fields, "model_type": name}), rngs=nnx.Rngs(0))
        random = lambda x: x + 0.02 * jax.random.normal(jax.random.key(0), x.shape)  # noqa: E731 - biases are zeros
        nnx.update(model, jax.tree.map(random, nnx.state(model)))
        save_decoder(model, {**fields, "model_type": name}, folder / name, dtype=jnp.float32)
    made = answers(engine(load_decoder(folder / "qwen3")))
    (folder / "answers.json").write_text(json.dumps({id: [*map(int, tokens)] for id, tokens in made.items()}))


class Counted:
    """A file that counts the bytes read."""

    read = 0

    def __init__(self, part: Any):
        self.part = part

    def __getattr__(self, name: str) -> Any:
        return getattr(self.part, name)

    def array(self) -> "Counted":
        return Counted(self.part.array())

    def __getitem__(self, index: Any) -> Any:
        found = self.part[index]
        Counted.read += found.nbytes
        return found


def loaded(folder: Path, mesh: Mesh) -> Decoder:
    """Loads a decoder on a mesh, each process reading its own part."""
    files, Counted.read = checkpoint._files, 0
    checkpoint._files = lambda *of: {name: Counted(file) for name, file in files(*of).items()}
    decoder = load_decoder(folder, mesh=mesh)
    checkpoint._files = files
    shared, parted = 0, 0
    for leaf in jax.tree.leaves(nnx.state(decoder)):
        if leaf.is_fully_replicated:
            shared += leaf.nbytes
        else:
            parted += leaf.nbytes
    assert of_a_device(nnx.state(decoder)) == shared + parted // 8
    if decoder.config.traits.experts != "packed":  # which are read whole
        assert Counted.read == shared + parted // jax.process_count(), (Counted.read, shared, parted)
    return decoder


def of_a_device(tree: Any) -> int:
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(tree))


def through(model: Decoder, caches: Any, parts: list[np.ndarray]) -> tuple[np.ndarray, Any]:
    """Logits of parts of texts, one after the other."""
    out = []
    for part in parts:
        logits, caches = FORWARD(model, part, caches)
        out.append(np.asarray(logits))
    return np.concatenate(out, axis=1), caches


def moved(tree: Any, like: Any) -> Any:
    """Puts a tree of one device where another one lies."""
    put = lambda x, to: jax.make_array_from_callback(x.shape, to.sharding, lambda i: np.asarray(x)[i])  # noqa: E731
    return jax.tree.map(put, tree, like)


def turned_over(expected: Any, found: Any) -> float:
    """The share of bytes of codes that differ; none are of floating point."""
    pairs = zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True)
    wrong = [np.asarray(x) != fetched(y) for x, y in pairs if x.dtype == jnp.uint8]
    return np.concatenate([x.ravel() for x in wrong]).mean() if wrong else 0.0


def check_logits(one: Decoder, many: Decoder, name: str) -> None:
    """All tokens of a float cache; of codes, which a rounding may turn over, single tokens after the same caches."""
    new = lambda model: model.caches(name, jax.random.key(0), 2, 256, dtype=jnp.float32, **OPTIONS)  # noqa: E731
    parts = np.split(TEXT, PARTS, axis=1)
    first, caches = through(one, new(one), parts[:1])
    mine, on_mesh = through(many, new(many), parts[:1])
    print(name, "first", np.abs(mine - first).max(), np.abs(first).max(), "other codes", turned_over(caches, on_mesh))
    assert turned_over(caches, on_mesh) < 1e-3
    if name == "float32":
        np.testing.assert_allclose(mine, first, atol=1e-5, rtol=0)
    parted = [leaf.nbytes for leaf in jax.tree.leaves(on_mesh) if not leaf.is_fully_replicated]
    assert of_a_device(on_mesh) == nbytes(on_mesh) - 7 * sum(parted) // 8
    assert sum(parted) > 0.9 * nbytes(on_mesh)
    moved_caches = moved(caches, on_mesh)
    expected, _ = through(one, caches, parts[1:])
    found, _ = through(many, moved_caches, parts[1:])
    print(name, "then", np.abs(found - expected).max())
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=0)


def exchanged(program: Any) -> list[tuple[str, str, int]]:
    """Returns what devices exchange: the operation, the dtype, how many numbers."""
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    sent = re.findall(rf"= (\w+)\[([\d,]*)\]\S* ({kinds})(?:-start)?\(", program.as_text())
    return [(kind, dtype, int(np.prod([int(n) for n in shape.split(",") if n]))) for dtype, shape, kind in sent]


def check_sequences(name: str) -> None:
    """Sequences along a mesh: what each device does with its own is what one device does with all."""
    mesh, by = Mesh(np.array(jax.devices()), "data"), PartitionSpec("data")
    cache = rqjax.strategy(name, jax.random.key(0), 32).cache(8, 2, 256, **OPTIONS, rope=rqjax.Rope(1e4))
    q, k, v = jax.random.normal(jax.random.key(1), (3, 8, 150, 2, 32))

    def run(cache: Any, q: Any, k: Any, v: Any) -> Any:
        cache = rqjax.append(cache, k[:, :-1], v[:, :-1])
        return rqjax.dot_product_attention(q[:, -1:], k[:, -1:], v[:, -1:], cache)

    specs = cache.specs("data")
    options = {"mesh": mesh, "in_specs": (specs, by, by, by), "out_specs": (by, specs)}
    there = [NamedSharding(mesh, by)] * 3
    laid = [jax.tree.map(functools.partial(NamedSharding, mesh), specs), *there]
    arguments = jax.device_put((cache, q, k, v), tuple(laid))
    program = jax.jit(jax.shard_map(run, **options)).lower(*arguments).compile()
    assert not exchanged(program)
    out, found = program(*arguments)
    expected, caches = jax.jit(run)(cache, q, k, v)
    np.testing.assert_allclose(fetched(out), expected, atol=1e-4, rtol=0)  # as much as a code that is turned over
    assert turned_over(caches, found) < 1e-3


def check_program(many: Decoder, strategy: str, **paged: Any) -> None:
    """Devices exchange only two sums a layer, one of embeddings, and logits; caches stay in place."""
    caches = many.caches(strategy, jax.random.key(0), 2, 1024, **OPTIONS, **paged)
    program = FORWARD.lower(many, TEXT[:, :20], caches).compile()
    sizes = exchanged(program)
    assert sorted(sizes) == [("all-gather", "f32", 40 * 96)] + [("all-reduce", "f32", 40 * 32)] * 5, sizes
    for before, after in zip(jax.tree.leaves(caches), jax.tree.leaves(program.output_shardings[1]), strict=True):
        assert before.sharding.is_equivalent_to(after, before.ndim)
    aliased = program.memory_analysis().alias_size_in_bytes
    assert aliased >= of_a_device(caches), (aliased, of_a_device(caches))


def engine(decoder: Decoder, **options: Any) -> Engine:
    return Engine(decoder, "eden_4", jax.random.key(0), pages=6, slots=2, chunk=128, **OPTIONS, **options)


def answers(engine: Engine) -> dict[int, list[int]]:
    """Returns answers to prompts, some of which begin alike, with pages for less than all."""
    for i, prompt in enumerate((LONG, LONG[:20], [*LONG[:290], *LONG[:20]])):
        engine.submit(prompt, max_tokens=4, temperature=0.7 * i, seed=i)
    return engine.run()


def written(decoder: Decoder) -> list[int]:
    """Returns four tokens by `generate`."""
    caches = decoder.caches("turboquant_trellis_3", jax.random.key(0), 1, 256, **OPTIONS)
    tokens = generate(decoder, caches, TEXT[0, :12], key=jax.random.key(0), chunk=128, top_p=0.9)
    return [token for _, (token, _) in zip(range(4), tokens, strict=False)]


def main(folder: Path, processes: int) -> None:
    mesh = Mesh(np.array(jax.devices()), "heads")
    with pytest.raises(ValueError, match="expected an axis of the mesh \\(heads\\), got 'rows'"):
        load_decoder(folder / "qwen3", mesh=mesh, axis="rows")
    made, prefixes = json.loads((folder / "answers.json").read_text()), folder / "prefixes"
    expected, many = {int(id): tokens for id, tokens in made.items()}, loaded(folder / "qwen3", mesh)
    if processes > 1:  # which share a core in tests
        with pytest.raises(ValueError, match="expected caches on devices of one process to keep prefixes in"):
            engine(many, folder=prefixes)
        assert answers(engine(many)) == expected
        return
    for name in FIELDS:
        check_logits(load_decoder(folder / name), loaded(folder / name, mesh), "float32")
    one = load_decoder(folder / "qwen3")
    check_logits(one, many, "turboquant_trellis_3")
    assert written(one) == written(many)
    check_program(many, "eden_4")
    for strategy in ("turboquant_trellis_3+turned", "v2_lean") if hasattr(jax, "shard_map") else ():  # from jax 0.6 on
        check_sequences(strategy)
    check_program(many, "turboquant_trellis_3", pages=16)
    first = engine(many, folder=prefixes)
    assert answers(first) == expected
    first.paged.save()
    second = engine(many, folder=prefixes)
    assert second.paged.admit(LONG) == (0, 132)
    second.paged.release(0)
    assert answers(second) == expected


if __name__ == "__main__":
    processes, rank, port = map(int, sys.argv[2:])
    if processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")  # jax 0.5 has no default on CPUs
        jax.distributed.initialize(f"localhost:{port}", processes, rank)
    assert len(jax.devices()) == 8
    main(Path(sys.argv[1]), processes)
    print("the same")
