"""The nnx module used as an attention function."""

import doctest

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import rqjax
from rqjax.nn import CachedAttention, compat, compress
from tests.tools.plain import error


@pytest.mark.full
def test_multi_head_attention_with_a_compressed_cache():
    """Prefill, then tokens, under nnx.jit: exactly full attention with exact codes, and near it with 6 bits."""
    x = jax.random.normal(jax.random.key(1), (2, 60, 64))
    full = nnx.MultiHeadAttention(num_heads=2, in_features=64, decode=False, rngs=nnx.Rngs(0))
    expected = nnx.jit(lambda layer, x: layer(x, mask=nnx.make_causal_mask(x[:, :, 0])))(full, x)
    step = nnx.jit(lambda layer, x: layer(x))
    for name, limit in (("float32", 1e-5), ("rotorquant_6", 0.03)):
        cache = rqjax.strategy(name, jax.random.key(0), 32).cache(2, 2, 64, window=8, dtype=jnp.float32)
        attention = CachedAttention(cache)
        layer = nnx.MultiHeadAttention(
            num_heads=2, in_features=64, attention_fn=attention, decode=False, rngs=nnx.Rngs(0)
        )
        out = [step(layer, x[:, :50]), *(step(layer, x[:, i : i + 1]) for i in range(50, 60))]
        assert error(jnp.concatenate(out, axis=1), expected) < limit
        assert compat.value(attention.cache).lengths.tolist() == [60, 60]


@pytest.mark.full
def test_no_bias_and_no_dropout():
    cache = rqjax.strategy("v3_4", jax.random.key(0), 32).cache(1, 1, 64)
    x = jnp.ones((1, 1, 1, 32))
    with pytest.raises(ValueError, match="neither bias nor dropout"):
        CachedAttention(cache)(x, x, x, dropout_rate=0.1, deterministic=False)
    CachedAttention(cache, softcap=3.0)(x, x, x, dropout_rate=0.1, deterministic=True)


def test_a_model_of_no_known_engine_is_refused_in_one_line():
    test = doctest.DocTestParser().get_doctest(compress.__doc__, {}, "compress", None, 0)
    assert doctest.DocTestRunner().run(test) == (0, 2)
