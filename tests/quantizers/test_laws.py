"""The laws of the protocol, for every part of a method: a new recipe inherits them."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rqjax
from rqjax import METHODS
from rqjax.arrays import packing
from rqjax.quantizers.product import Rounded
from tests.tools.steps import Steps
from tests.tools.suites import SEEN, distinct, some

SHAPES = {
    "turboquant_prod": [(1, 128), (8, 50)],  # at one bit the sketch alone
    "rotorquant": [(3, 5)],
    "isoquant": [(3, 50)],
    "eden": [(8, 50)],
    "turboquant_trellis": [(2.5, 60)],
    "turboquant_trellis_unbiased": [(1, 24)],
    "nested_e8": [(5, 20)],
    "scales_of_eight_bits": [(2.25, 32)],
    "affine": [(8, 50)],
}
"""Bits and dimensions that ask more of a method than the usual ones."""


def columns(key, dim, bits):
    given = (bits + 2,) * 10 + (bits,) * 20 + (0,) * (dim - 30)
    return rqjax.PerCoordinate.gaussian(0.1 * jax.random.normal(key, (dim,)), jnp.ones(dim), given)


def trellis_columns(key, dim, bits):
    given = (bits + 2,) * 10 + (bits,) * 20 + (1,) * 7 + (0,) * (dim - 37)
    first, second = jax.random.split(key)
    deviation = jax.random.uniform(first, (dim,), minval=0.5, maxval=2)
    return rqjax.TrellisPerCoordinate.gaussian(0.1 * jax.random.normal(second, (dim,)), deviation, given)


def best_gain(key, dim, bits):
    of = trellis_columns(key, dim, bits)
    return rqjax.Scaled(rqjax.BestGain(of.mean, of.deviation, of.tables, bits=of.bits))


def gain(key, dim, bits):
    return rqjax.Gain(jax.random.uniform(key, (dim,)), columns(key, dim, bits))


def uniform(key, dim, bits):
    return rqjax.Uniform(jnp.full((), -2.0), jnp.full((), 0.5), dim=dim, bits=bits)


def product(key, dim, bits):
    return rqjax.Product(jax.random.normal(key, (dim // 5, 2**bits - 1, 5)))


def product_rounded(key, dim, bits):
    return rqjax.Product(Rounded.of(product(key, dim, bits).codebooks, 10))


def exchanged(key, dim, bits):
    return rqjax.Exchange(product(key, dim, bits), levels=4)


def local(key, dim, bits):
    first, second = jax.random.split(key)
    return rqjax.PerCell(
        jax.random.normal(first, (3, dim)), jax.vmap(lambda key: product(key, dim, bits))(jax.random.split(second, 3))
    )


def steps(key, dim, bits):
    return Steps(jnp.float32(1 / 8), dim)


def norms_of_eight_bits(key, dim, bits):
    return dataclasses.replace(rqjax.turboquant(key, dim, bits), dtype="uint8")


def scales_of_eight_bits(key, dim, bits):
    return dataclasses.replace(rqjax.turboquant_trellis(key, dim, bits), dtype="uint8")


OTHERS = (trellis_columns, gain, uniform, product_rounded, exchanged, local, steps)
OTHERS += (norms_of_eight_bits, scales_of_eight_bits, best_gain)
"""Parts of learned quantizers, and a leaf that rqjax does not know."""

RECIPES = {name: METHODS[name] for name in distinct(METHODS)} | {make.__name__: make for make in OTHERS}
CORE = (
    "rotorquant",  # Normalized, Rotated, Rotor, Scalar
    "turboquant_prod",  # Dense, Residual, Sign
    "affine",
    "trellis_columns",
    "gain",  # PerCoordinate
    "uniform",
    "product_rounded",
    "exchanged",  # Product
    "local",
    "steps",
)
"""The usual parts once; all of them, and more shapes, in the full suite."""
CASES = {f"{name}-{bits}-{dim}": (name, bits, dim) for name in RECIPES for bits, dim in SHAPES.get(name, [(3, 80)])}
CORE_CASES = {case[0]: label for label, case in CASES.items() if case[0] in CORE}
OF_METHODS = [label for label, (name, *_) in CASES.items() if name in METHODS]
"""The first of the cases, so that pytest takes them together with the same cases of all laws."""
of_methods = pytest.mark.parametrize(
    "case", some(OF_METHODS, [label for label in CORE_CASES.values() if label in OF_METHODS]), indirect=True
)
HUGE, TINY, BAD = 2.0**124, 2.0**-110, (jnp.nan, -jnp.inf)
"""Factors for vectors of 80 normal coordinates: norms at both ends of float32. Below, coordinates become subnormal, and
XLA on a CPU makes these zero. Powers of two leave rounding as it is."""
TRACES = []


@functools.partial(jax.jit, static_argnums=0)
def made(case, keys):
    """Quantizers of a case, one a key."""
    name, bits, dim = case
    return jax.vmap(lambda key: RECIPES[name](key, dim, bits))(keys)


@jax.jit
def lawful(quantizers, x, y):
    """All that the laws look at, in one program: a quantizer, two side by side on extreme rows, low precision."""
    TRACES.append(x.shape)
    quantizer = jax.tree.map(lambda leaf: leaf[0], quantizers)
    codes, none = quantizer.encode(x), quantizer.encode(x[0, :0])
    rows = x.reshape(-1, x.shape[-1])
    axes = jnp.eye(x.shape[-1])[:2]  # as far from uniformly rotated vectors as there are
    single = [jnp.zeros_like(rows[:1]), jnp.full_like(rows[:1], 1e-41), *(rows[:1].at[0, 2].set(v) for v in BAD)]
    extreme = jnp.concatenate([rows, HUGE * rows, TINY * rows, axes[:1], axes.sum(0)[None], *single]).reshape(2, 21, -1)
    heads = jax.vmap(lambda q: jax.vmap(q.encode)(extreme), axis_size=2)(quantizers)
    return {
        "codes": codes,
        "decoded": quantizer.decode(codes),
        "products": quantizer.dot(y, codes),
        "first": quantizer.dot(y[0], codes),
        "low": quantizer.encode(x.astype(jnp.bfloat16)),
        "none": (none, quantizer.decode(none), quantizer.dot(y, none)),
        "heads": heads,
        "extreme": jax.vmap(lambda q, codes: q.decode(codes))(quantizers, heads).reshape(2, 42, -1),
        "extreme_products": quantizer.dot(y, jax.tree.map(lambda leaf: leaf[0], heads)).reshape(2, 42),
    }


decode = jax.jit(lambda quantizer, codes: quantizer.decode(codes))


@pytest.fixture(scope="module", params=some(CASES, CORE_CASES.values()))
def case(request):
    """Vectors that bfloat16 holds exactly, and what one program makes of them."""
    keys, shape = jax.random.split(jax.random.key(0), 4), CASES[request.param]
    dim = shape[2]
    x = jax.random.normal(keys[0], (2, 6, dim), "bfloat16").astype(jnp.float32)
    y = jax.random.normal(keys[1], (2, dim), "float32") / 64  # products with huge vectors are finite
    quantizers = made(shape, keys[2:])
    return SimpleNamespace(
        name=shape[0],
        make=functools.partial(made, shape),
        quantizers=quantizers,
        quantizer=jax.tree.map(lambda leaf: leaf[0], quantizers),
        x=x,
        y=y,
        out=SimpleNamespace(**lawful(quantizers, x, y)),
    )


def close(a, b):
    scale = np.abs(np.asarray(b)).max()
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=2e-6 * scale)


def assert_same_codes(quantizer, a, b):
    """Equal up to values that lie within rounding of a boundary: fused multiply-adds round differently.

    One index of the 12 vectors may flip; a norm may round the other way to bfloat16 (2^-8).
    """
    assert jax.tree.structure(a) == jax.tree.structure(b)
    assert [leaf.dtype for leaf in jax.tree.leaves(a)] == [leaf.dtype for leaf in jax.tree.leaves(b)]
    if jax.tree.all(jax.tree.map(np.array_equal, a, b)):
        return
    x, y = (np.asarray(decode(quantizer, codes)) for codes in (a, b))
    error = np.linalg.norm(x - y, axis=-1) / np.linalg.norm(y, axis=-1)
    assert (error > 2**-7).sum() <= 1
    assert (error > 1e-6).sum() <= 2


def test_dot_is_the_product_with_decoded_vectors(case):
    out = case.out
    assert out.decoded.shape == case.x.shape
    floats = [leaf.dtype for leaf in jax.tree.leaves(case.quantizer) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert out.decoded.dtype == jnp.result_type(jnp.float32, *floats)  # float64 under x64, where rotations have it
    assert out.products.shape == (2, 2, 6)
    close(out.products, np.einsum("md,abd->mab", case.y, out.decoded))
    close(out.first, out.products[0])


def test_bytes_of_codes_are_bits_per_vector(case):
    codes = case.out.codes
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(codes)) == rqjax.nbytes(codes)
    assert 8 * rqjax.nbytes(codes) == 12 * case.quantizer.bits_per_vector
    assert all(leaf.shape[:2] == (2, 6) for leaf in jax.tree.leaves(codes))


@pytest.mark.parametrize("name", some(distinct(METHODS), [name for name in CORE if name in METHODS]))
def test_bytes_in_a_cache_are_bits_per_vector(name):
    """Equal for parts of whole words, 32 coordinates. Otherwise tokens share words, and each array of codes differs by
    less than a word."""
    for dim in (128, 80):

        def made(key, dim=dim):
            quantizer = METHODS[name](key, dim, 3)
            cache = rqjax.KVCache.init(1, 1, 256, quantizer, quantizer, window=0, sinks=0)
            return quantizer, quantizer.encode(jnp.zeros(dim)), cache.keys, cache.values

        quantizer, codes, *sides = jax.eval_shape(made, jax.random.key(0))
        whole = dim == 128 and not name.startswith("rotorquant_paper")  # that has planes of 43 coordinates
        for side in sides:
            over = 8 * rqjax.nbytes(side) / 256 - quantizer.bits_per_vector
            assert over == 0 if whole else abs(over) < 32 * len(jax.tree.leaves(codes))
            assert (name, dim) != ("eden", 80) or over == -16  # 3 bits a coordinate and a scale; 256 bits are 8 words


def test_bits_are_those_of_indices_norms_scales_and_padding():
    """3 bits a coordinate, 80 of them: 256 bits in whole words, 96 at one bit and 160 at two; 16 for each number."""
    usual, two_stages, grid = 256 + 16, 160 + 16 + 96 + 16, 256 + 2 * 16
    groups = 27  # of three coordinates: four grades of multivectors, in planes of 8
    paper = 32 * sum(map(packing.words_per_vector, (groups, 3 * groups, 3 * groups, groups), (3, 3, 3, 2))) + 16
    others = {
        **dict.fromkeys(("turboquant_prod", "turboquant_prod_orthogonal", "rotorquant_prod"), two_stages),
        **dict.fromkeys(("rtn", "affine", "affine_rotated"), grid),
        "affine_rotated_sign": grid + 96 + 16,
        "rotorquant_paper": paper,
        "nested_e8": 8 * -(-(240 + 2 * 10) // 8) + 16,  # a scale for each point, whole bytes
    }
    for name in set(METHODS) - {"rotorquant_paper_prod"}:
        made = jax.eval_shape(functools.partial(METHODS[name], dim=80, bits=3), jax.random.key(0))
        assert made.bits_per_vector == others.get(name, usual), name


def test_quantizer_is_a_pytree(case):
    leaves, structure = jax.tree.flatten(case.quantizer)
    again = jax.tree.unflatten(structure, leaves)
    assert all(a is b for a, b in zip(leaves, jax.tree.leaves(again), strict=True))
    assert again.dim == case.quantizer.dim == case.x.shape[-1]


def test_one_quantizer_a_head_by_vmap(case):
    """Quantizers are built, used and indexed by vmap, over vectors too."""
    second, codes = (jax.tree.map(lambda leaf: leaf[1], tree) for tree in (case.quantizers, case.out.heads))
    expected = np.asarray(decode(second, codes)).reshape(42, -1)[:12]
    np.testing.assert_allclose(case.out.extreme[1, :12], expected, atol=1e-5 * np.abs(expected).max())


def test_low_precision_input_is_widened(case):
    assert_same_codes(case.quantizer, case.out.low, case.out.codes)


def test_no_vectors_at_all(case):
    codes, decoded, products = case.out.none
    assert rqjax.nbytes(codes) == 0
    assert decoded.shape == (0, case.quantizer.dim)
    assert products.shape == (2, 0)


def test_a_bad_row_spoils_itself_alone(case):
    """Products are not equal to the bit: one row out of the usual range changes how the norms of all are taken."""
    decoded, products = np.asarray(case.out.extreme[0]), np.asarray(case.out.extreme_products)
    clean = np.asarray(case.out.decoded).reshape(12, -1)
    error = np.linalg.norm(decoded[:12] - clean, axis=-1) / np.linalg.norm(clean, axis=-1)
    assert (error < 0.02).all()
    assert np.isfinite(decoded[:-2]).all()
    assert np.isfinite(products[:, :-2]).all()
    if case.name in METHODS:
        assert not np.isfinite(decoded[-2:]).all(axis=-1).any()


@of_methods
def test_zero_decodes_to_zero(case):
    np.testing.assert_array_equal(case.out.extreme[0, 38], 0)
    # affine levels are centered: a part is subtracted that the bias adds again, with rounding
    np.testing.assert_allclose(
        case.out.extreme_products[:, 38], 0, atol=1e-12 if case.name.startswith(("affine", "rtn")) else 0
    )
    assert jnp.abs(case.out.extreme[0, 39]).max() < 1e-6  # a subnormal one


@of_methods
def test_huge_and_tiny_vectors_keep_their_shape(case):
    """A quantizer of a recipe knows no unit."""
    rows, decoded = np.asarray(case.x, np.float64).reshape(12, -1), np.asarray(case.out.extreme[0], np.float64)
    usual, huge, tiny = (
        rqjax.metrics.relative_mse(rows, decoded[12 * i : 12 * i + 12] / size) for i, size in enumerate((1, HUGE, TINY))
    )
    np.testing.assert_allclose(huge, usual, rtol=0.05)
    if isinstance(case.quantizer, rqjax.Affine | rqjax.Residual | rqjax.Rotated):
        # MLX's layout has no step below 1e-7; smaller numbers become zero, exactly as in MLX
        assert tiny <= (1.7 if isinstance(case.quantizer, rqjax.Residual) else 1.001)  # a sketch of all of it
    else:
        np.testing.assert_allclose(tiny, usual, rtol=0.05)


@of_methods
def test_no_vector_decodes_to_one_far_away(case):
    axes = np.eye(case.quantizer.dim)[:2]
    for x, decoded in zip((axes[0], axes.sum(0)), case.out.extreme[0, 36:38], strict=True):
        assert ((decoded - x) ** 2).sum() <= 4 * (x**2).sum()


def test_new_arrays_never_recompile(case):
    """Shapes by `eval_shape` are the arrays', and new arrays do not recompile."""
    lawful(case.quantizers, case.x, case.y)  # compiled anew if programs were dropped since
    before = len(TRACES)
    shapes = jax.eval_shape(lawful, case.quantizers, case.x, case.y)["codes"]
    assert shapes == jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), case.out.codes)
    lawful(case.make(jax.random.split(jax.random.key(3))), 3 * case.x, case.y)
    assert len(TRACES) == before


EAGER = ("rotorquant", "turboquant_prod", "nested_e8", "trellis_columns", "affine", "local")
"""Blocks of each kind of code."""


@pytest.mark.parametrize("name", some(EAGER, EAGER[:1]))
def test_encode_is_the_same_outside_jit(name):
    """Vectors are encoded block by block, in a quantizer made outside jit."""
    bits, dim = SHAPES.get(name, [(3, 80)])[-1]
    x = jax.random.normal(jax.random.key(1), (2, 3, dim))
    quantizer = RECIPES[name](jax.random.key(0), dim, bits)
    loop = jax.tree.map(lambda *rows: jnp.stack(rows), *[quantizer.encode(block) for block in x])
    assert_same_codes(quantizer, jax.jit(lambda q, x: q.encode(x))(quantizer, x), loop)


@pytest.mark.full
def test_gradients_reach_rotation_and_step():
    quantizer = rqjax.rotorquant(jax.random.key(0), 32, 4)
    x = jax.random.normal(jax.random.key(1), (16, 32))
    codes = quantizer.encode(x)

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1))
    def gradients(bivectors, step):
        rotation = dataclasses.replace(quantizer.inner.rotation, bivectors=bivectors)
        inner = dataclasses.replace(quantizer.inner, rotation=rotation)
        inner = dataclasses.replace(inner, inner=dataclasses.replace(inner.inner, step=step))
        return jnp.sum((dataclasses.replace(quantizer, inner=inner).decode(codes) - x) ** 2)

    for at in (quantizer.inner.rotation.bivectors, jnp.zeros((10, 3))):
        found = gradients(at, quantizer.inner.inner.step)
        assert all(jnp.isfinite(g).all() and jnp.abs(g).max() > 0 for g in found)


def test_fractional_bits_split_the_channels():
    true = {2.25: 32 + 2 * 128, 2.5: 64 + 2 * 128, 2.75: 96 + 2 * 128, 3.5: 64 + 3 * 128}
    for bits, stored in true.items():
        assert rqjax.turboquant_mixed(jax.random.key(0), 128, bits).bits_per_vector == stored + 16


@pytest.mark.parametrize("method", some([rqjax.turboquant, rqjax.eden], [rqjax.turboquant]))
def test_norms_of_eight_bits(method):
    """Norms of 8 bits cost hardly any error within their range; beyond it vectors decode to none that are longer."""
    usual = method(jax.random.key(0), 32, 3)
    eight = dataclasses.replace(usual, dtype="uint8")
    assert eight.bits_per_vector == usual.bits_per_vector - 8
    x = jax.random.normal(jax.random.key(1), (512, 32))
    least = rqjax.metrics.relative_mse(x, usual.decode(usual.encode(x)))
    for size in (2.0**-12, 1, 2.0**12):
        assert rqjax.metrics.relative_mse(size * x, eight.decode(eight.encode(size * x))) < 1.05 * least
    for size in (0, 2.0**-30, 2.0**30):
        assert (jnp.linalg.norm(eight.decode(eight.encode(size * x)), axis=1) <= 1.1 * size * jnp.linalg.norm(x)).all()


def test_recipes_that_are_left_out_are_there():
    assert {*METHODS, *rqjax.FITTED} >= SEEN


@pytest.mark.full
def test_three_bits_are_48_bytes_and_a_norm():
    quantizer = rqjax.rotorquant(jax.random.key(0), 128, 3)
    norm, words = quantizer.encode(jnp.ones((1, 128)))
    assert (norm.nbytes, words.nbytes) == (2, 48)
