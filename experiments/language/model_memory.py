"""Memory and seconds that a checkpoint of billions of parameters takes to load and to make a token with."""

import json
import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import rqjax
from experiments.harness.table import Table
from experiments.harness.timing import turns
from rqjax.core import Registry
from rqjax.nn import Decoder, DecoderConfig, compat, load_decoder
from rqjax.nn.tensors import places

SHAPES: Registry = Registry(
    "model",
    {
        "Llama 3.2 3B": {
            "model_type": "llama",
            "vocab_size": 128_256,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 28,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_theta": 5e5,
            "tie_word_embeddings": True,
        },
        "Qwen3 30B-A3B, two layers": {
            "model_type": "qwen3_moe",
            "vocab_size": 151_936,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "num_hidden_layers": 2,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "rope_theta": 1e6,
        },
        "tiny": {
            "model_type": "qwen3",
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
        },
    },
)

MADE_BY = ("rqjax/nn/checkpoint.py", "rqjax/nn/tensors.py", "rqjax/nn/experts.py")
TABLES = (
    Table(
        "Checkpoints of random bfloat16 weights: GB of 10^9 bytes, at most resident before and while loading,"
        " after tokens one by one, and after sixteen at once",
        rows=("model", "strategy"),
        columns=(),
        values=(
            "parameters",
            "file_gb",
            "load_seconds",
            "base_gb",
            "load_gb",
            "first_seconds",
            "token_seconds",
            "peak_gb",
            "prompt_gb",
        ),
    ),
)


def check(point: dict[str, Any]) -> None:
    SHAPES[point["model"]]
    rqjax.strategy(point["strategy"], jax.random.key(0), 64)


def run(point: dict[str, Any]) -> dict[str, Any]:
    """Writes the checkpoint to a temporary folder, then loads and runs it in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        parameters = write(SHAPES[point["model"]], Path(folder))
        size = sum(file.stat().st_size for file in Path(folder).iterdir())
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            measured = pool.apply(_measure, (folder, point["strategy"]))
    return {"parameters": parameters, "file_gb": size / 1e9, **measured}


def write(fields: dict[str, Any], folder: Path) -> int:
    """Writes a sharded checkpoint of random weights, and returns their number."""
    from safetensors.flax import save_file

    config = DecoderConfig.parse(fields)
    state = nnx.eval_shape(lambda: nnx.state(Decoder(config, rngs=nnx.Rngs(0))))
    of_parameters = {tuple(path): compat.value(leaf).shape for path, leaf in nnx.to_flat_state(state)}
    noise = 0.02 * np.random.default_rng(0).standard_normal(2**20).astype(np.float32)
    shards: dict[str, dict[str, tuple[int, ...]]] = {}
    for path, place in places(config, of_parameters).items():
        shard = f"model-{path[1] if path[0] == 'layers' else 'rest'}.safetensors"
        shards.setdefault(shard, {}).update(place.tensors)
    for shard, shapes in shards.items():
        tensors = {name: jnp.asarray(np.resize(noise, shape), jnp.bfloat16) for name, shape in shapes.items()}
        save_file(tensors, folder / shard)
    index = {"weight_map": {name: shard for shard, shapes in shards.items() for name in shapes}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(fields))
    return sum(int(np.prod(shape)) for shapes in shards.values() for shape in shapes.values())


def _measure(folder: str, strategy: str) -> dict[str, float]:
    jax.block_until_ready(jnp.zeros(1))
    base_gb, start = peak(), time.perf_counter()
    decoder = jax.block_until_ready(load_decoder(folder))
    loaded, load_gb = time.perf_counter() - start, peak()
    caches = decoder.caches(strategy, jax.random.key(0), 1, 256)
    step = jax.jit(lambda decoder, tokens, caches: decoder(tokens, caches, newest=1), donate_argnums=2)
    token = jnp.zeros((1, 1), jnp.int32)

    def generate() -> jax.Array:
        nonlocal token, caches
        logits, caches = step(decoder, token, caches)
        if not np.isfinite(logits).all():
            raise ValueError("expected finite logits")
        token = logits.argmax(-1)
        return token

    first, second = turns({"token": generate}, 2)["token"].ravel().tolist()  # the first one compiles
    by_token = peak()
    jax.block_until_ready(step(decoder, jnp.zeros((1, 16), jnp.int32), caches))
    return {
        "load_seconds": loaded,
        "base_gb": base_gb,
        "load_gb": load_gb,
        "first_seconds": first,
        "token_seconds": second,
        "peak_gb": by_token,
        "prompt_gb": peak(),
    }


def peak() -> float:
    """Reads the most memory ever resident, GB of 10^9 bytes. Not `ru_maxrss`: a process begins with its parent's."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024 / 1e9
