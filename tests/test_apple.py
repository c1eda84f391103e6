"""jax-metal and jax-mps without a Mac: what programs for them consist of, MLX's kernels, what is made on the host."""

import contextlib
import subprocess
import sys

import apple
import fake_mps
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rqjax
from rqjax import kernels, mlx, platforms, products
from rqjax.learning import fit
from rqjax.rotations import Dense

STRATEGIES = ("v2_lean", "v2_rotated_qjl", "v3_3.5", "v3_4+centered", "turboquant_trellis_2", "eden/rtn", "bfloat16")
X = jax.random.normal(jax.random.key(0), (64, 128))
TOKENS = jax.random.normal(jax.random.key(1), (2, 300, 2, 128))


@pytest.fixture(params=platforms.APPLE, scope="module")
def device(request):
    with formulated(request.param) as name:
        yield name


@pytest.fixture(scope="module")
def mps():
    """On jax-mps, with MLX's kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "jax_plugins.mps.ops", fake_mps)
        with formulated("mps") as name:
            yield name


@contextlib.contextmanager
def formulated(name):
    """For a platform that is not there; nothing that was traced for another one is used."""
    jax.clear_caches()
    with at(name):
        yield name
    jax.clear_caches()


@contextlib.contextmanager
def at(name):
    token = platforms.PLATFORM.set(name)
    yield
    platforms.PLATFORM.reset(token)


def method(name):
    return rqjax.METHODS[name](jax.random.key(0), 128, 2.5 if name == "turboquant_mixed" else 3)


def violations(platform, function, *operands):
    return apple.violations(jax.jit(function).trace(*operands).lower(lowering_platforms=(platform,)))


@pytest.mark.parametrize("name", rqjax.METHODS)
def test_methods_are_of_known_operations(device, name):
    quantizer = method(name)
    codes = jax.eval_shape(quantizer.encode, X)
    assert not violations(device, lambda q, x: q.encode(x), quantizer, X)
    assert not violations(device, lambda q, c: q.decode(c), quantizer, codes)
    assert not violations(device, lambda q, y, c: q.dot(y, c), quantizer, X[:4], codes)


@pytest.mark.parametrize("name", STRATEGIES)
def test_caches_are_of_known_operations(device, name):
    cache = rqjax.strategy(name, jax.random.key(0), 128).cache(2, 2, 512)
    assert not violations(device, rqjax.append, cache, TOKENS, TOKENS)
    assert not violations(device, rqjax.attend, cache, TOKENS[:, :1])
    narrow = lambda cache, q: rqjax.attend(cache, q, sliding_window=100, softcap=30.0)  # noqa: E731
    assert not violations(device, narrow, cache, TOKENS[:, :3])


@pytest.mark.parametrize("name", ["turboquant", "turboquant_trellis", "affine"])
def test_search_is_of_known_operations(device, name):
    index = rqjax.Index.build(method(name), X, metric="l2", store=rqjax.Exact(128, "float16"))
    assert not violations(device, lambda index, y: index.search(y, 5, rerank=10), index, X[:4])


def test_training_is_of_known_operations(device):
    def train(quantizer, x, key):
        return fit(quantizer, x, key, where=lambda q: q.inner.rotation, steps=20, batch_size=16)

    assert not violations(device, train, method("rotorquant"), X, jax.random.key_data(jax.random.key(2)))


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (jnp.linalg.qr, "custom_call: not legalised by jax-metal"),
        (lambda x: jnp.fft.fft(x[0]), "complex<f32>: no such numbers"),
        (lambda x: jax.lax.population_count(x.astype(jnp.int32)), "popcnt: not legalised by jax-metal"),
        (lambda x: jnp.matmul(x.astype(jnp.int8), x.T.astype(jnp.int8)), "dot_general of .*: products are of floats"),
        (lambda x: jnp.sum(jnp.zeros((2, 2, 2, 2, 2)) + x[0, 0], axis=0), "reduce beyond the last four axes"),
        (lambda x: jax.lax.pad(x, 0.0, [(0, 0, 1), (0, 0, 0)]), "pad between numbers"),
        (jnp.cbrt, "cbrt: not known to work"),
    ],
)
def test_other_operations_are_found(function, reason):
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(violations("METAL", function, X[:16, :16]))


def test_numbers_of_64_bits_are_found():
    jax.config.update("jax_enable_x64", True)
    found = violations("METAL", lambda x: x * x, jnp.ones(3, "float64"))
    jax.config.update("jax_enable_x64", False)
    assert found == ["stablehlo.multiply of f64: no such numbers"]


@pytest.mark.parametrize("name", ["turboquant", "rotorquant_paper_prod", "rotorquant_trellis", "affine_rotated_sign"])
def test_methods_are_the_same_as_on_a_cpu(name):
    def made_and_used(platform):
        def used(quantizer, x):
            codes = quantizer.encode(x)
            return quantizer.decode(codes), quantizer.dot(x[:4], codes)

        with at(platform):
            quantizer = method(name)
            return quantizer, *jax.jit(used)(quantizer, X)

    (here, decoded, dots), (there, *found) = map(made_and_used, ("cpu", "METAL"))
    jax.tree.map(np.testing.assert_array_equal, there, here)
    np.testing.assert_allclose(found[0], decoded, atol=1e-5)
    np.testing.assert_allclose(found[1], dots, atol=1e-4)


def test_random_matrices_are_made_on_the_host(device):
    made = Dense.haar(jax.random.key(0), 16)
    np.testing.assert_allclose(made.matrix @ made.matrix.T, jnp.eye(16), atol=1e-5)
    with pytest.raises(ValueError, match=rf"on {device} call Dense.haar outside jit and vmap: it runs on the host"):
        jax.jit(lambda key: Dense.haar(key, 16))(jax.random.key(0))
    x = X.reshape(-1, 8)
    fitted = rqjax.FITTED["opq"](jax.random.key(0), x, 4)
    assert platforms.platform() == device
    assert float(jnp.mean((fitted.decode(fitted.encode(x)) - x) ** 2)) < 0.1


def test_a_host_is_needed(device, monkeypatch):
    def devices(name=None):
        raise RuntimeError(f"Unknown backend {name}")

    monkeypatch.setattr(jax, "devices", devices)
    with pytest.raises(RuntimeError, match=f"needs a CPU beside {device}: set JAX_PLATFORMS={device},cpu"):
        Dense.haar(0, 16)


def test_pallas_is_not_imported():
    line = """
import sys, jax, jax.numpy as jnp, rqjax
from rqjax import platforms
platforms.PLATFORM.set("METAL")
x = jnp.ones((1, 40, 1, 64))
cache = rqjax.strategy("rotorquant", jax.random.key(0), 64).cache(1, 1, 64, window=0, sinks=0)
jax.jit(lambda cache, x: rqjax.dot_product_attention(x, x, x, cache))(cache, x)
print([name for name in sys.modules if "pallas" in name])
"""
    done = subprocess.run([sys.executable, "-c", line], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


AFFINE = [(bits, group, dtype) for bits in mlx.BITS for group in mlx.GROUPS for dtype in ("float32", "bfloat16")]


@pytest.mark.parametrize(("bits", "group", "dtype"), AFFINE)
def test_affine_by_mlx_is_affine(mps, bits, group, dtype):
    quantizer = rqjax.Affine(bits, group, 128, dtype)
    codes = rqjax.encode(quantizer, X, implementation="mps")
    plain = rqjax.encode(quantizer, X, implementation="xla")
    jax.tree.map(np.testing.assert_array_equal, codes, plain)
    jax.tree.map(np.testing.assert_array_equal, codes, jax.jit(quantizer.encode)(X))
    decoded = rqjax.decode(quantizer, codes, implementation="xla")
    np.testing.assert_allclose(rqjax.decode(quantizer, codes, implementation="mps"), decoded, atol=1e-6)
    np.testing.assert_allclose(quantizer.dot(X[:5], codes), X[:5] @ decoded.T, atol=2e-5)
    np.testing.assert_allclose(rqjax.roundtrip(quantizer, X, implementation="mps"), decoded, atol=1e-6)


def test_rotated_affine_by_mlx(mps):
    quantizer = method("affine_rotated")
    with pytest.raises(kernels.Unsupported, match=r"for Affine of \(4, 8\) bits .* not for Rotated\(Dense, Affine\)"):
        rqjax.encode(quantizer, X, implementation="mps")
    quantizer = rqjax.METHODS["affine_rotated"](jax.random.key(0), 128, 4)
    codes = rqjax.encode(quantizer, X, implementation="mps")
    jax.tree.map(np.testing.assert_array_equal, codes, rqjax.encode(quantizer, X, implementation="xla"))
    found = rqjax.decode(quantizer, codes, dtype="float16", implementation="mps")
    assert found.dtype == jnp.float16
    np.testing.assert_allclose(found, rqjax.decode(quantizer, codes, implementation="xla"), atol=2e-3)


def test_kernels_have_the_derivatives_of_their_twins(mps):
    quantizer = rqjax.Affine(4, 64, 128)
    codes = quantizer.encode(X)
    by = lambda y: quantizer.dot(y, codes).sum()  # noqa: E731
    np.testing.assert_allclose(jax.grad(by)(X[:3]), kernels.by_xla(jax.grad(by))(X[:3]), atol=1e-4)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_products_with_codebooks_are_exact(mps, bits):
    """Of one coordinate at a time: 8 bits hold every level of a codebook."""
    scalar = rqjax.lloyd_max(128, bits)
    indices = jnp.arange(2**bits).repeat(128 // 2**bits)[None, None, None]
    levels = jnp.asarray(scalar.levels)[indices]
    found = mlx.level_products(jnp.eye(128)[None, None], levels)
    np.testing.assert_array_equal(found[0, 0, :, 0], levels[0, 0, 0])


def test_products_with_all_levels_are_exact(mps):
    levels = jnp.arange(-128, 128, dtype=jnp.int8)[None, None, None]
    np.testing.assert_array_equal(mlx.level_products(jnp.eye(256)[None, None], levels)[0, 0, :, 0], levels[0, 0, 0])
    odd = levels[..., :37]  # no group divides them: without a kernel
    np.testing.assert_array_equal(mlx.level_products(jnp.eye(37)[None, None], odd)[0, 0, :, 0], odd[0, 0, 0])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in STRATEGIES),
        *((name, option) for name in ("v2_lean", "v3_3.5") for option in ({"sliding_window": 90}, {"softcap": 20.0})),
    ],
)
def test_attention_by_mlx_is_attention(mps, name, options):
    strategy = rqjax.strategy(name, jax.random.key(0), 128)
    cache = jax.jit(rqjax.append)(strategy.cache(2, 2, 512, window=32), TOKENS, TOKENS[::-1])
    q = jax.random.normal(jax.random.key(3), (2, 5, 6, 128))
    found = jax.jit(lambda cache, q: rqjax.attend(cache, q, **options))(cache, q)
    plain = jax.jit(lambda cache, q: rqjax.attend(cache, q, implementation="xla", **options))(cache, q)
    np.testing.assert_allclose(found, plain, atol=2e-5)
    if all(map(products.has_rule, (cache.key_quantizer, cache.value_quantizer))):
        again = jax.jit(lambda cache, q: rqjax.attend(cache, q, implementation="mps", **options))(cache, q)
        np.testing.assert_array_equal(again, found)
    else:
        with pytest.raises(kernels.Unsupported, match="no mps kernel for this attention: keys: no levels in int8 in"):
            rqjax.attend(cache, q, implementation="mps")


def test_a_cache_in_mlx_layout_is_attended_to_as_one_in_tiles(mps):
    def attended():
        def run(cache, x):
            cache = rqjax.append(cache, x, x[::-1])
            return cache, rqjax.attend(cache, x[:, -3:])

        return jax.jit(run)(rqjax.strategy("v2_lean", jax.random.key(0), 128).cache(2, 2, 512, window=32), TOKENS)

    here, found = attended()
    with at("cpu"):
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


@pytest.mark.parametrize("name", ["affine", "eden_unbiased"])
def test_search_by_mlx_finds_the_same(mps, name):
    index = rqjax.Index.build(rqjax.METHODS[name](jax.random.key(0), 128, 4), X)
    scores, ids = index.search(X[:6], 5)
    with formulated("cpu"):
        plain, others = index.search(X[:6], 5)
    np.testing.assert_array_equal(ids, others)
    np.testing.assert_allclose(scores, plain, rtol=1e-3)


def test_elsewhere_there_is_no_mps(monkeypatch):
    with at("cpu"):
        cache = rqjax.strategy("v2_lean", jax.random.key(0), 128).cache(1, 1, 512)
        for call in (
            lambda: rqjax.encode(rqjax.Affine(4, 64, 128), X, implementation="mps"),
            lambda: rqjax.attend(cache, TOKENS[:1, :1, :1], implementation="mps"),
        ):
            with pytest.raises(kernels.Unsupported, match="mps kernels need jax-mps on an Apple GPU, this is cpu"):
                call()
    with at("mps"):
        monkeypatch.delitem(sys.modules, "jax_plugins.mps.ops", raising=False)
        with pytest.raises(kernels.Unsupported, match=r"this jax-mps has no jax_plugins\.mps\.ops"):
            rqjax.encode(rqjax.Affine(4, 64, 128), X, implementation="mps")
