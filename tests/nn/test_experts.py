"""Experts in blocks of rows and by `ragged_dot`, against each token on its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rqjax.core import platforms
from rqjax.nn import DecoderConfig
from rqjax.nn.experts import Experts
from tests.nn.test_decoder import fields
from tests.tools.suites import some

pytestmark = pytest.mark.full

OPTIONS = {"num_local_experts": 6, "num_experts_per_tok": 2, "hidden_act": "relu"}


def experts(family, dtype=jnp.float32):
    """Experts with large weights and random biases."""
    config = DecoderConfig.parse(
        fields(model_type=family, sliding_window=None, layer_types=["full_attention"], **OPTIONS)
    )
    made = Experts(config, rngs=nnx.Rngs(0), dtype=dtype)
    random = lambda x: jax.random.normal(jax.random.key(x.ndim), x.shape, dtype)  # noqa: E731
    nnx.update(made, jax.tree.map(random, nnx.state(made)))
    return made


def parted(made):
    """Returns a function of the module's arrays, and those: modules of flax 0.10 do not go into jitted functions."""
    graph, state = nnx.split(made)
    return lambda state, x, chosen: nnx.merge(graph, state)(x, chosen), state


def alone(made, x, expert):
    """One token through one expert."""
    gate, up, down = (
        lambda y, part=part: part.weight[...][expert] @ y + (0 if part.bias is None else part.bias[...][expert])
        for part in (made.gate_proj, made.up_proj, made.down_proj)
    )
    if made.swiglu is None:
        return down(jnp.maximum(gate(x), 0) * up(x))
    alpha, limit = made.swiglu
    clamped = jnp.minimum(gate(x), limit)
    return down((jnp.clip(up(x), -limit, limit) + 1) * clamped * jax.nn.sigmoid(alpha * clamped))


@pytest.mark.parametrize("cpu", [True, False])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize("count", some([1, 5, 100], [1, 100]))
def test_tokens_through_experts(count, family, cpu, monkeypatch):
    """Tokens go all to one expert, or to all, and some experts have none."""
    monkeypatch.setattr(platforms, "on_cpu", lambda: cpu)
    made, rng = experts(family), np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(count, 16)), jnp.float32)
    for chosen in (rng.integers(0, 6, (count, 2)), np.full((count, 2), 3), rng.choice([0, 5], (count, 2))):
        run, state = parted(made)
        found = jax.jit(run)(state, x, jnp.asarray(chosen))
        expected = jax.vmap(lambda x, row: jnp.stack([alone(made, x, expert) for expert in row]))(
            x, jnp.asarray(chosen)
        )
        np.testing.assert_allclose(found, expected, atol=2e-4, rtol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_reach_the_experts(dtype):
    """Weights are taken as bits, whose derivative is defined explicitly."""
    made, x = experts("gpt_oss", dtype), jax.random.normal(jax.random.key(1), (4, 16), dtype)
    chosen = jnp.array([[0, 1], [1, 2], [5, 0], [1, 1]])
    graph, state = nnx.split(made)

    def loss(state, through):
        return through(nnx.merge(graph, state)).astype(jnp.float32).sum()

    one_by_one = lambda made: jax.vmap(lambda x, row: jnp.stack([alone(made, x, e) for e in row]))(x, chosen)  # noqa: E731
    found = jax.grad(loss)(state, lambda made: made(x, chosen))
    expected = jax.grad(loss)(state, one_by_one)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        one, other = (np.asarray(part, np.float32) for part in (one, other))
        assert np.abs(other).max() > 0.1
        assert np.abs(one - other).max() < (1e-4 if dtype == "float32" else 0.05) * np.abs(other).max()


@pytest.mark.full
def test_narrow_experts_are_widened_one_at_a_time():
    """16 experts of 3 x 128 x 512 weights: float32 copies of all would take 12.6 MB."""
    config = fields(model_type="mixtral", sliding_window=None, hidden_size=512, intermediate_size=128)
    config = DecoderConfig.parse({**config, "num_local_experts": 16, "num_experts_per_tok": 2})
    made = nnx.eval_shape(lambda: Experts(config, rngs=nnx.Rngs(0), dtype=jnp.bfloat16))
    x, chosen = jax.ShapeDtypeStruct((4, 512), jnp.bfloat16), jax.ShapeDtypeStruct((4, 2), jnp.int32)
    run, state = parted(made)
    compiled = jax.jit(run).lower(state, x, chosen).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 3e6
