"""Fused kernels against their XLA twins: interpreted on a CPU with race detection, or on the GPU itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rqjax
from pallas_kernels.gpu import launch, mosaic, rows
from rqjax.arrays import packing
from rqjax.backends import hopper, hopper_calls
from rqjax.core import Unsupported
from tests.tools import computed
from tests.tools.apple import formulated
from tests.tools.suites import some

ULP = 2.0**-22
"""Rounding error of coordinates up to 1 that are sums of rotated ones. Codes may differ where a boundary is as near."""


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Interprets kernels with two blocks of threads, so that each has several tiles."""
    token = hopper.INTERPRET.set(mosaic.interpret())
    if mosaic.interpret():
        monkeypatch.setattr(launch, "shares", lambda tiles, *_: (each := -(-tiles // 2), -(-tiles // each)))
    yield
    hopper.INTERPRET.reset(token)
    if mosaic.interpret():
        assert not mosaic.races_found()


def vectors(n, dim, dtype="float32"):
    """Vectors with loud and quiet channels and norms from small to large."""
    rng = np.random.default_rng(n + dim)
    x = rng.normal(size=(n, dim)) * np.exp(rng.normal(size=dim)) * np.exp(rng.normal(size=(n, 1)))
    return jnp.asarray(x, dtype)


def recipe(method, dim, bits):
    return jax.jit(rqjax.METHODS[method], static_argnums=(1, 2))(jax.random.key(0), dim, bits)


def both(function, *operands):
    """Returns the kernel's and XLA's results on the same operands, each jitted: `function(*operands,
    implementation)`."""
    found = computed.run(lambda *operands: function(*operands, "mosaic_gpu"), *operands)
    return found, jax.jit(lambda *operands: function(*operands, "xla"))(*operands)


def encode(quantizer, x, implementation):
    return rqjax.encode(quantizer, x, implementation=implementation)


def assert_same_codes(quantizer, x, got, want, ulp=ULP):
    """Checks norms to one unit of the last place, and codes but for one in 500, beside a boundary."""
    norm, want_norm = (np.asarray(codes[0], np.float32) for codes in (got, want))
    np.testing.assert_allclose(norm, want_norm, rtol=2.0**-7)
    levels = quantizer.inner.inner
    rotate = jax.jit(lambda q, x: (q.inner.rotation(x.astype(jnp.float32)), q.inner.inner.values))
    y, values = map(np.asarray, rotate(quantizer, x))
    unpack = jax.jit(lambda codes: packing.unpack(codes[1], levels.bits, levels.dim))
    different = np.asarray(unpack(got)) != np.asarray(unpack(want))
    assert different.any() or (np.asarray(got[1]) == np.asarray(want[1])).all()  # padding too
    size = want_norm  # directions are relative to the norm as it is stored, if it is
    if isinstance(quantizer, rqjax.Scaled):
        size = np.linalg.norm(np.asarray(x, np.float32), axis=-1)
    y = y / np.where(size > 0, size, 1)[..., None]
    near = np.abs(y[..., None] - (values[1:] + values[:-1]) / 2).min(-1) <= ulp
    assert not (different & (norm == want_norm)[..., None] & ~near).any()
    assert different[norm == want_norm].sum() <= x.size / 500


CASES = [
    ("rotorquant", 128, 4, "float32", 130),
    ("rotorquant", 80, 1, "float32", 129),
    ("rotorquant", 512, 2, "bfloat16", 5),
    ("hadamard", 96, 5, "float32", 31),
    ("rotor_chain", 128, 3, "float32", 1),
    ("rotor_chain", 64, 7, "bfloat16", 33),
    ("turboquant", 256, 3, "bfloat16", 130),
]


@pytest.mark.full
@pytest.mark.parametrize(
    ("method", "dim", "bits", "dtype", "n"),
    some(CASES, [("turboquant", 256, 3, "bfloat16", 130)]),
)
def test_codes_and_decoded_vectors_are_those_of_xla(method, dim, bits, dtype, n):
    quantizer, x = recipe(method, dim, bits), vectors(n, dim, dtype)
    got, want = both(encode, quantizer, x)
    # Dense matrices and vectors have 16 bits, with errors of 2^-17 of either, and some of them add up.
    assert_same_codes(quantizer, x, got, want, ulp=2.0**-16 if method == "turboquant" else ULP)
    if method == "turboquant":
        return

    def decode(quantizer, codes, implementation):
        return rqjax.decode(quantizer, codes, dtype=dtype, implementation=implementation)

    got, expected = both(decode, quantizer, want)
    assert got.dtype == expected.dtype == jnp.dtype(dtype)
    error = np.abs(np.asarray(got, np.float32) - np.asarray(expected, np.float32)).max(-1)
    assert (error <= float(jnp.finfo(dtype).eps) * 4 * np.asarray(want[0], np.float32)).all()


@pytest.mark.full
@pytest.mark.parametrize(
    ("dim", "bits", "dtype"), some([(128, 3, "float32"), (64, 6, "bfloat16")], [(64, 6, "bfloat16")])
)
def test_round_trip_is_decoding_what_was_encoded(dim, bits, dtype):
    quantizer, x = recipe("rotorquant", dim, bits), vectors(130, dim, dtype)
    function = lambda q, x, implementation: rqjax.roundtrip(q, x, implementation=implementation)  # noqa: E731
    got, want = (np.asarray(y, np.float32) for y in both(function, quantizer, x))
    size = np.linalg.norm(want, axis=-1, keepdims=True)
    assert (np.abs(got - want) <= float(jnp.finfo(dtype).eps) * 4 * size).mean() > 0.998  # but for ties


@pytest.mark.full
@pytest.mark.parametrize(("method", "dtype"), [("turboquant_prod", "float32"), ("rotorquant_prod", "bfloat16")])
def test_sketch_of_the_residual(method, dtype):
    got, want = both(encode, recipe(method, 64, 3), vectors(140, 64, dtype))
    (norm, (words, (rest, signs))), (want_norm, (want_words, (want_rest, want_signs))) = got, want
    np.testing.assert_array_equal(np.asarray(norm, np.float32), np.asarray(want_norm, np.float32))
    assert (words != want_words).sum() <= 1
    np.testing.assert_allclose(np.asarray(rest, np.float32), np.asarray(want_rest, np.float32), rtol=2.0**-6)
    a, b = (np.asarray(jax.jit(packing.unpack, static_argnums=(1, 2))(c, 1, 64)) for c in (signs, want_signs))
    assert (a != b).mean() <= 1e-3


@pytest.mark.full
@pytest.mark.parametrize(("bits", "dim", "dtype", "n"), some([(3, 64, "bfloat16", 3), (1, 80, "float32", 2)], []))
def test_trellis_codes_are_those_of_xla(bits, dim, dtype, n):
    quantizer = rqjax.trellis_coded(dim=dim, bits=bits)
    x = jax.random.normal(jax.random.key(bits), (n, dim), dtype) / dim**0.5
    np.testing.assert_array_equal(*both(encode, quantizer, x))


@pytest.mark.full
@pytest.mark.parametrize(
    ("mode", "rotation", "dtype"), [("mse", "turboquant", "float32"), ("unbiased", "hadamard", "bfloat16")]
)
def test_best_scales(mode, rotation, dtype):
    inner = recipe(rotation, 128, 3).inner
    quantizer, x = rqjax.Scaled(inner, mode=mode), vectors(33, 128, dtype)
    got, want = both(encode, quantizer, x)
    assert_same_codes(quantizer, x, got, want, ulp=2.0**-16)
    assert float(jnp.abs(got[0] - jnp.linalg.norm(x.astype(jnp.float32), axis=-1)).max()) > 0.01


@pytest.mark.full
@pytest.mark.parametrize(("mode", "dtype"), [("mse", "float16"), ("unbiased", "bfloat16")])
def test_scales_of_unusual_vectors(mode, dtype):
    """Directions far from all levels have bounded scales, and squares of norms may leave float32."""
    quantizer = rqjax.Scaled(recipe("rotorquant", 64, 1).inner, mode=mode, dtype=dtype)
    x = np.asarray(vectors(4, 64))
    x = jnp.asarray(np.concatenate([np.eye(64)[:8], x * 1e25, x * 1e-25, np.zeros((1, 64))]), jnp.float32)
    (scale, words), (expected, expected_words) = both(encode, quantizer, x)
    np.testing.assert_allclose(np.asarray(scale, np.float32), np.asarray(expected, np.float32), rtol=2.0**-7)
    assert (words != expected_words)[8:-1].mean() < 0.1  # the others have coordinates of zero, on a boundary


@pytest.mark.full
@pytest.mark.parametrize("name", ["rotorquant", "turboquant_trellis"])
def test_vectors_of_another_dimension_are_refused(name):
    for function in (rqjax.encode, rqjax.roundtrip):
        with pytest.raises(ValueError, match="expected vectors of dimension 64 along the last axis"):
            function(recipe(name, 64, 3), vectors(5, 128))
    with pytest.raises(Unsupported, match="kernels take vectors of dimension 64"):
        rqjax.encode(recipe("rotorquant", 64, 3), vectors(5, 128), implementation="mosaic_gpu")
    norm, words = rqjax.encode(recipe("rotorquant", 64, 3), vectors(5, 64), implementation="xla")
    with pytest.raises(ValueError, match="expected codes of 6 uint32 a vector"):
        rqjax.decode(recipe("rotorquant", 64, 3), (norm, words[:, :4]))


@pytest.mark.full
def test_norms_at_the_ends_of_float32():
    x = np.asarray(vectors(4, 64))
    x = x / np.linalg.norm(x, axis=-1, keepdims=True)
    x = np.concatenate([x * 1e-30, x * 1e37, x, np.zeros_like(x)])  # the interpreter's CPU has no smaller differences
    (norm, words), (want_norm, want_words) = both(encode, recipe("rotorquant", 64, 3), jnp.asarray(x))
    np.testing.assert_array_equal(np.asarray(norm, np.float32), np.asarray(want_norm, np.float32))
    assert (words != want_words)[norm > 0].sum() <= 1  # a zero is beside the middle boundary, whatever its sign


@pytest.mark.full
def test_tiles_of_many_vectors_give_the_same_codes(monkeypatch):
    monkeypatch.setattr(launch, "PROCESSORS", 1)
    quantizer, x = recipe("rotorquant", 64, 3), vectors(140, 64)
    assert_same_codes(quantizer, x, *both(encode, quantizer, x))


@pytest.mark.full
def test_autotuning_keeps_a_tile_size(monkeypatch):
    monkeypatch.setattr(launch, "TUNED", {})
    monkeypatch.setattr(launch, "tile_sizes", lambda dim: [64])
    found = hopper.autotune(recipe("hadamard", 64, 2), vectors(3, 64), repeats=1)
    assert found == {"encode": 64, "decode": 64}
    assert hopper.autotune(recipe("turboquant", 64, 2), vectors(3, 64), repeats=1) == {}
    assert launch.TUNED == {("encode", 64, 3): 64, ("decode", 64, 3): 64}
    assert launch.tile_tokens("encode", 64, 3) == 64


@pytest.mark.parametrize(("dim", "few", "many"), [(64, 32, 64), (80, 128, 128), (128, 32, 32), (512, 32, 32)])
def test_tiles_of_few_vectors_are_smaller(dim, few, many):
    assert launch.tile_tokens("encode", dim, 1000) == few
    assert launch.tile_tokens("encode", dim, 10**6) == many


def test_lowers_in_shards():
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("data",))
    spec = jax.sharding.PartitionSpec
    quantizer, x = recipe("rotorquant", 64, 3), vectors(66, 64)

    def shard(quantizer, x):
        hopper.INTERPRET.set(False)
        return hopper_calls.encode(quantizer, x)

    run = jax.shard_map(shard, mesh=mesh, in_specs=(spec(), spec("data")), out_specs=(spec("data"), spec("data")))
    assert "mosaic_gpu" in jax.jit(run).trace(quantizer, x).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.full
def test_one_quantizer_a_head_and_leading_axes():
    x = vectors(12, 64).reshape(2, 2, 3, 64)
    keys = jax.random.split(jax.random.key(5), 2)
    quantizers = jax.jit(jax.vmap(lambda key: rqjax.rotorquant(key, 64, 3)))(keys)

    def heads(quantizers, x, implementation):
        one = lambda q, x: encode(q, x, implementation)  # noqa: E731
        return jax.vmap(one, in_axes=(0, 1), out_axes=1)(quantizers, x)

    (norm, words), (want_norm, want_words) = both(heads, quantizers, x)
    assert norm.shape == (2, 2, 3)
    np.testing.assert_array_equal(np.asarray(norm, np.float32), np.asarray(want_norm, np.float32))
    assert (words != want_words).sum() <= 1


@pytest.mark.full
def test_gradients_are_those_of_the_twin():
    def gradient(quantizer, x, target, implementation):
        def loss(quantizer, x):
            codes = rqjax.encode(quantizer, x, implementation=implementation)
            return ((rqjax.decode(quantizer, codes, implementation=implementation) - target) ** 2).sum()

        return jax.grad(loss, argnums=(0, 1), allow_int=True)(quantizer, x)

    got, want = both(gradient, recipe("rotorquant", 64, 3), vectors(5, 64), vectors(6, 64)[:5])
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if a.dtype != jax.dtypes.float0 and a.size:
            assert jnp.abs(b).max() > 0
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * float(jnp.abs(b).max()))

    def tangent(quantizer, norm, words, implementation):
        decode = lambda norm: rqjax.decode(quantizer, (norm, words), implementation=implementation)  # noqa: E731
        return jax.jvp(decode, (norm,), (jnp.cos(norm),))[1]

    quantizer = recipe("rotorquant", 64, 3)
    got, want = both(tangent, quantizer, *quantizer.encode(vectors(5, 64)))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * float(jnp.abs(want).max()))


@pytest.mark.parametrize(("columns", "itemsize"), [(128, 4), (80, 4), (80, 2), (64, 2), (512, 4)])
def test_swizzled_memory_is_the_hardwares(columns, itemsize):
    """The 16-byte chunk c of row r lies where chunk c xor (r w / 128 mod w / 16) would, in blocks of w bytes a row."""
    tokens = 32
    row, column = np.meshgrid(np.arange(tokens), np.arange(columns), indexing="ij")
    width = next(w for w in (128, 64, 32) if columns * itemsize % w == 0)
    byte = column * itemsize
    chunk = byte % width // 16 ^ (row * width // 128) % (width // 16)
    want = byte // width * tokens * width + row * width + chunk * 16 + byte % 16
    layout = tokens, width, itemsize
    np.testing.assert_array_equal(rows.swizzled_byte(row, column, (0, 0), *layout), want)
    lanes = columns // 8
    power = lanes if lanes & (lanes - 1) == 0 else 0
    for plane in range(8):
        part = rows.swizzled_byte(row[:, :lanes], column[:, :lanes], (plane * lanes, power), *layout)
        np.testing.assert_array_equal(part, want[:, plane * lanes : (plane + 1) * lanes])


@pytest.mark.parametrize(
    ("method", "dim", "dtype", "message"),
    [
        ("rotorquant", 100, "float32", "dimension 64, 80, 96, 128, 192, 256, 512, not 100"),
        ("turboquant", 96, "float32", "dense matrices of dimension 64, 128, 256, not 96"),
        ("planarquant", 64, "float32", "rotate by Rotor, Hadamard, Dense, or a Chain .*, not by Givens"),
        ("rtn", 64, "float32", "no mosaic_gpu kernel to encode Affine"),
        ("identity", 64, "float32", r"not for Normalized\(Scalar\)"),
    ],
)
def test_what_has_no_kernel_says_why_and_takes_xla_by_itself(method, dim, dtype, message):
    quantizer, x = recipe(method, dim, 3), vectors(3, dim, dtype)
    with pytest.raises(Unsupported, match=message) as error:
        rqjax.encode(quantizer, x, implementation="mosaic_gpu")
    assert "\n" not in str(error.value)
    a, b = jax.jit(lambda q, x: [encode(q, x, name) for name in (None, "xla")])(quantizer, x)
    assert all((x == y).all() for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@pytest.mark.full
def test_dtypes_devices_and_names_that_are_not_supported(monkeypatch):
    quantizer, x = recipe("rotorquant", 64, 3), vectors(3, 64)
    with pytest.raises(KeyError, match="unknown implementation 'mosaic'; did you mean 'mosaic_gpu' or 'mosaic_tpu'"):
        rqjax.encode(quantizer, x, implementation="mosaic")
    with pytest.raises(Unsupported, match="take float32, bfloat16, float16, not float64"):
        rqjax.decode(quantizer, quantizer.encode(x), dtype=jnp.float64, implementation="mosaic_gpu")
    with pytest.raises(Unsupported, match=r"from 1 vector to 2\*\*31 coordinates, not shape \(0, 64\)"):
        rqjax.encode(quantizer, x[:0], implementation="mosaic_gpu")
    dense = recipe("turboquant", 64, 3)
    codes = dense.encode(x)
    with pytest.raises(Unsupported, match="do not rotate back by a dense matrix"):
        rqjax.decode(dense, codes, implementation="mosaic_gpu")
    hopper.INTERPRET.set(False)
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    with pytest.raises(Unsupported, match="need a Hopper or Blackwell GPU"):
        rqjax.encode(quantizer, x, implementation="mosaic_gpu")


@pytest.mark.parametrize(
    ("method", "capability", "message"),
    [
        ("rotorquant", "12.0", r"capability 9.0, 10.0, 10.3\), this is compute capability 12.0"),
        ("turboquant", "10.0", "with wgmma, which only Hopper GPUs have"),
    ],
)
def test_what_a_blackwell_does_not_take(method, capability, message):
    hopper.INTERPRET.set(False)
    quantizer, x = recipe(method, 64, 3), vectors(2, 64)
    with formulated("gpu", capability=capability), pytest.raises(Unsupported, match=message):
        jax.eval_shape(lambda q, x: encode(q, x, "mosaic_gpu"), quantizer, x)
