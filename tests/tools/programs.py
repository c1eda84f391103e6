"""Programs of plain JAX: the library's uses of each part of methods, of caches, indexes and decoders."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import rqjax
from rqjax.learning.training import fit
from rqjax.nn import Decoder, DecoderConfig
from rqjax.nn.attention import exact_attention
from rqjax.quantizers.formats import FORMATS
from rqjax.rotations import Rope
from tests.tools.suites import distinct

DIM = 64
STRATEGIES = (
    "v2_lean",
    "v2_rotated_qjl",
    "v3_3.5",
    "v3_4+centered",
    "turboquant_trellis_2",
    "eden_4/rtn_3",
    "eden_3+turned",
    "eden_3+pre_rope",
    "kivi_2",
    "bfloat16",
)
LATENT = {"kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10}
Program = tuple[Callable[..., Any], tuple[Any, ...]]


def x(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def of(quantizer: Any) -> Program:
    """Encodes, decodes and takes inner products."""

    def run(quantizer: Any, vectors: Any) -> Any:
        codes = quantizer.encode(vectors)
        return codes, quantizer.decode(codes), quantizer.dot(vectors[:4], codes)

    return run, (quantizer, x(256, DIM))


def of_method(name: str) -> Program:
    return of(jax.eval_shape(lambda key: rqjax.METHODS[name](key, DIM, 2.5 if "mixed" in name else 3), key()))


def of_fitted(name: str) -> Program:
    """Uses a quantizer that is made of shapes alone, unless the fit looks at its data."""
    fit = lambda key, some: rqjax.FITTED[name](key, some, 2)  # noqa: E731
    try:
        quantizer = jax.eval_shape(fit, key(), x(512, DIM))
    except jax.errors.JAXTypeError:
        some = np.random.default_rng(0).standard_normal((512, DIM))
        quantizer = fit(jax.random.key(0), jnp.asarray(some, jnp.float32))
    return of(quantizer)


def of_cache(name: str) -> Program:
    """Appends, and attends with a window and a soft limit."""
    rope = Rope(1e4) if "turned" in name or "pre_rope" in name else None

    def make(key: Any) -> Any:
        return rqjax.strategy(name, key, DIM).cache(2, 2, 512, rope=rope)

    def run(cache: Any, k: Any, v: Any, q: Any) -> Any:
        cache = rqjax.append(cache, k, v)
        return cache, rqjax.attend(cache, q, sliding_window=300, softcap=30.0)

    return run, (jax.eval_shape(make, key()), x(2, 130, 2, DIM), x(2, 130, 2, DIM), x(2, 1, 4, DIM))


def of_pages() -> Program:
    def run(cache: Any, k: Any, v: Any, q: Any) -> Any:
        cache = rqjax.append(cache, k, v)
        return cache, rqjax.attend(cache, q)

    make = lambda key: rqjax.strategy("eden_4", key, DIM).cache(2, 2, 512, pages=8)  # noqa: E731
    return run, (jax.eval_shape(make, key()), x(2, 130, 2, DIM), x(2, 130, 2, DIM), x(2, 1, 4, DIM))


def of_search(name: str) -> Program:
    some = jnp.asarray(np.random.default_rng(0).standard_normal((2048, DIM)), jnp.float32)
    index = rqjax.Index.build(rqjax.METHODS[name](jax.random.key(0), DIM, 3), some)
    return (lambda index, y: index.search(y, 5)), (index, x(16, DIM))


def of_training() -> Program:
    quantizer = jax.eval_shape(lambda key: rqjax.METHODS["rotorquant"](key, DIM, 3), key())

    def train(quantizer: Any, x: Any, key: Any) -> Any:
        return fit(quantizer, x, key, where=lambda q: q.inner.rotation, steps=20, batch_size=16)

    return train, (quantizer, x(64, DIM), key())


def of_decoder(family: str, **fields: Any) -> Program:
    """Takes a prompt without caches, one with them, and a step; weights are float32."""
    sizes = {name: 64 for name in ("vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size")}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": DIM, "num_hidden_layers": 1}
    config = DecoderConfig.parse({"model_type": family, **sizes, **heads, **fields})
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))

    def run(state: Any, caches: Any, tokens: Any) -> Any:
        decoder = nnx.merge(graph, state)
        logits, caches = decoder(tokens, caches)
        return decoder(tokens)[0], logits, decoder(tokens[:, :1], caches)

    caches = jax.eval_shape(lambda key: nnx.merge(graph, state).caches("eden_4", key, batch=2, max_len=256), key())
    return run, (state, caches, jax.ShapeDtypeStruct((2, 130), jnp.int32))


def of_exact_attention() -> Program:
    def run(q: Any, k: Any) -> Any:
        loss = lambda q, k: exact_attention(q, k, k, scale=0.1).sum()  # noqa: E731
        return jax.value_and_grad(loss, argnums=(0, 1))(q, k)

    return run, (x(1, 130, 4, DIM), x(1, 130, 2, DIM))


def key() -> Any:
    return jax.eval_shape(lambda: jax.random.key(0))


PROGRAMS: dict[str, Callable[[], Program]] = {
    **{f"method {name}": lambda name=name: of_method(name) for name in distinct(rqjax.METHODS)},
    **{f"fitted {name}": lambda name=name: of_fitted(name) for name in distinct(rqjax.FITTED)},
    **{f"cache {name}": lambda name=name: of_cache(name) for name in STRATEGIES},
    "cache in pages": of_pages,
    **{f"search {name}": lambda name=name: of_search(name) for name in ("turboquant", "turboquant_trellis", "affine")},
    "training": of_training,
}
TRACED: dict[str, Callable[[], Program]] = {
    **PROGRAMS,
    **{f"cache {name}": lambda name=name: of_cache(name) for name in ("kvarn_2", "float8")},
    **{f"format {name}": lambda name=name: of(rqjax.Formats(DIM, name)) for name in FORMATS},
    "centered": lambda: of(rqjax.Centered(jnp.ones(DIM), rqjax.Exact(DIM, "float16"))),
    "decoder": lambda: of_decoder("llama"),
    "decoder of experts": lambda: of_decoder("gpt_oss", num_local_experts=4, num_experts_per_tok=2),
    "decoder with latents": lambda: of_decoder("deepseek_v2", n_routed_experts=4, num_experts_per_tok=2, **LATENT),
    "exact attention": of_exact_attention,
}
"""Programs that tests trace. Only `PROGRAMS` are compiled, which takes longer."""
