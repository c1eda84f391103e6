"""The implementation "mps", whose kernels are MLX's, against plain jax: MLX itself runs them on this CPU."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rqjax
from rqjax.core.dispatch import Unsupported, only_xla
from rqjax.scoring.integers import float_products
from tests.tools import apple, fake_mps

pytestmark = pytest.mark.full

X = jax.random.normal(jax.random.key(0), (64, 128))
TOKENS = jax.random.normal(jax.random.key(1), (2, 300, 2, 128))
AFFINE = [(4, 32, "float32"), (8, 64, "bfloat16"), (4, 128, "bfloat16"), (8, 128, "float32")]


@pytest.fixture(scope="module")
def mps():
    """Pretends to run on jax-mps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "jax_plugins.mps.ops", fake_mps)
        with apple.formulated("mps"):
            yield


@pytest.mark.parametrize(("bits", "group", "dtype"), AFFINE)
def test_affine_by_mlx_is_affine(mps, bits, group, dtype):
    quantizer = rqjax.Affine(128, bits, group_size=group, dtype=dtype)
    codes = rqjax.encode(quantizer, X, implementation="mps")
    plain = rqjax.encode(quantizer, X, implementation="xla")
    jax.tree.map(np.testing.assert_array_equal, codes, plain)
    jax.tree.map(np.testing.assert_array_equal, codes, jax.jit(quantizer.encode)(X))
    decoded = rqjax.decode(quantizer, codes, implementation="xla")
    np.testing.assert_allclose(rqjax.decode(quantizer, codes, implementation="mps"), decoded, atol=1e-6)
    np.testing.assert_allclose(quantizer.dot(X[:5], codes), X[:5] @ decoded.T, atol=2e-5)
    np.testing.assert_allclose(rqjax.roundtrip(quantizer, X, implementation="mps"), decoded, atol=1e-6)


def test_rotated_affine_by_mlx(mps):
    quantizer = rqjax.METHODS["affine_rotated"](jax.random.key(0), 128, 3)
    with pytest.raises(Unsupported, match=r"for Affine of \(4, 8\) bits .* not for Rotated\(Dense, Affine\)"):
        rqjax.encode(quantizer, X, implementation="mps")
    quantizer = rqjax.METHODS["affine_rotated"](jax.random.key(0), 128, 4)
    codes = rqjax.encode(quantizer, X, implementation="mps")
    jax.tree.map(np.testing.assert_array_equal, codes, rqjax.encode(quantizer, X, implementation="xla"))
    found = rqjax.decode(quantizer, codes, dtype="float16", implementation="mps")
    assert found.dtype == jnp.float16
    np.testing.assert_allclose(found, rqjax.decode(quantizer, codes, implementation="xla"), atol=2e-3)


def test_kernels_have_the_derivatives_of_their_twins(mps):
    quantizer = rqjax.Affine(128, 4, group_size=64)
    codes = quantizer.encode(X)
    by = lambda y: quantizer.dot(y, codes).sum()  # noqa: E731
    np.testing.assert_allclose(jax.grad(by)(X[:3]), only_xla(jax.grad(by))(X[:3]), atol=1e-4)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_products_with_codebooks_are_exact(mps, bits):
    """Products are exact with one coordinate at a time, since 8 bits hold every level of a codebook."""
    scalar = rqjax.lloyd_max(128, bits)
    indices = jnp.arange(2**bits).repeat(128 // 2**bits)[None, None, None]
    levels = jnp.asarray(scalar.levels)[indices]
    found = float_products(jnp.eye(128)[None, None], levels)
    np.testing.assert_array_equal(found[0, 0, :, 0], levels[0, 0, 0])


def test_products_with_all_levels_are_exact(mps):
    levels = jnp.arange(-128, 128, dtype=jnp.int8)[None, None, None]
    np.testing.assert_array_equal(float_products(jnp.eye(256)[None, None], levels)[0, 0, :, 0], levels[0, 0, 0])
    odd = levels[..., :37]  # no group divides them: without a kernel
    np.testing.assert_array_equal(float_products(jnp.eye(37)[None, None], odd)[0, 0, :, 0], odd[0, 0, 0])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in apple.STRATEGIES),
        ("v2_lean", {"sliding_window": 90}),
        ("v3_3.5", {"softcap": 20.0}),
        ("v2_lean", {"sink_logits": np.arange(-3.0, 3)}),
    ],
)
def test_attention_by_mlx_is_attention(mps, name, options):
    strategy = rqjax.strategy(name, jax.random.key(0), 128)
    cache = jax.jit(rqjax.append)(strategy.cache(2, 2, 512, window=32), TOKENS, TOKENS[::-1])
    q = jax.random.normal(jax.random.key(3), (2, 5, 6, 128))
    found = jax.jit(lambda cache, q: rqjax.attend(cache, q, **options))(cache, q)
    plain = jax.jit(lambda cache, q: rqjax.attend(cache, q, implementation="xla", **options))(cache, q)
    np.testing.assert_allclose(found, plain, atol=2e-5)
    if cache.key_quantizer.in_integers and cache.value_quantizer.in_integers:
        again = jax.jit(lambda cache, q: rqjax.attend(cache, q, implementation="mps", **options))(cache, q)
        np.testing.assert_array_equal(again, found)
    else:
        with pytest.raises(Unsupported, match="no mps kernel for this attention: keys: no levels in int8 in"):
            rqjax.attend(cache, q, implementation="mps")


def test_a_cache_in_mlx_layout_is_attended_to_as_one_in_tiles(mps):
    def attended():
        def run(cache, x):
            cache = rqjax.append(cache, x, x[::-1])
            return cache, rqjax.attend(cache, x[:, -3:])

        return jax.jit(run)(rqjax.strategy("v2_lean", jax.random.key(0), 128).cache(2, 2, 512, window=32), TOKENS)

    here, found = attended()
    with apple.formulated("cpu"):
        there, plain = attended()
    assert jax.tree.structure(here) != jax.tree.structure(there)
    assert here.nbytes == there.nbytes
    np.testing.assert_allclose(found, plain, atol=2e-4)  # the CPU's queries have 15 bits


def test_a_query_that_sees_nothing_is_zero(mps):
    cache = rqjax.strategy("v2_lean", jax.random.key(0), 128).cache(2, 2, 512)
    seen = jnp.ones((2, 1, 1, 512), bool).at[0].set(False)
    found = jax.jit(lambda cache, x: rqjax.attend(rqjax.append(cache, x, x), x[:, :1], mask=seen))(cache, TOKENS)
    assert not found[0].any()
    assert jnp.isfinite(found).all()


def test_a_quantizer_for_each_head(mps):
    keys = jax.random.split(jax.random.key(0), 2)
    made = [rqjax.METHODS["affine_rotated"](key, 128, 4) for key in keys]
    per_head = rqjax.PerHead(jax.tree.map(lambda *leaves: jnp.stack(leaves), *made))
    cache = rqjax.KVCache.init(2, 2, 512, per_head, per_head, window=32)
    cache = jax.jit(rqjax.append)(cache, TOKENS, TOKENS)
    both = jax.jit(lambda cache, q: [rqjax.attend(cache, q, implementation=name) for name in ("mps", "xla")])
    np.testing.assert_allclose(*both(cache, TOKENS[:, -3:]), atol=2e-5)


def test_latents_in_mlx_layout(mps):
    cache = rqjax.strategy("v2_lean", jax.random.key(0), 128, latent=64).cache(2, 2, 512, window=32)
    cache = jax.jit(rqjax.append)(cache, TOKENS)
    both = jax.jit(lambda cache, q: (rqjax.attend(cache, q), only_xla(rqjax.attend)(cache, q)))
    np.testing.assert_allclose(*both(cache, TOKENS[:, -3:]), atol=2e-5)


@pytest.mark.parametrize("name", ["affine", "eden_unbiased"])
def test_search_by_mlx_finds_the_same(mps, name):
    index = rqjax.Index.build(rqjax.METHODS[name](jax.random.key(0), 128, 4), X)
    scores, ids = index.search(X[:6], 5)
    with apple.formulated("cpu"):
        plain, others = index.search(X[:6], 5)
    np.testing.assert_array_equal(ids, others)
    np.testing.assert_allclose(scores, plain, rtol=1e-3)


def test_elsewhere_there_is_no_mps(monkeypatch):
    with apple.formulated("cpu"):
        cache = rqjax.strategy("v2_lean", jax.random.key(0), 128).cache(1, 1, 512)
        for call in (
            lambda: rqjax.encode(rqjax.Affine(128, 4, group_size=64), X, implementation="mps"),
            lambda: rqjax.attend(cache, TOKENS[:1, :1, :1], implementation="mps"),
        ):
            with pytest.raises(Unsupported, match="mps kernels need jax-mps on an Apple GPU, this is cpu"):
                call()
    with apple.formulated("mps"):
        monkeypatch.delitem(sys.modules, "jax_plugins.mps.ops", raising=False)
        with pytest.raises(Unsupported, match=r"this jax-mps has no jax_plugins\.mps\.ops"):
            rqjax.encode(rqjax.Affine(128, 4, group_size=64), X[:5], implementation="mps")
