"""Bad input is one clear line; extreme input spoils nothing but itself."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rqjax
from rqjax import METHODS
from rqjax.arrays import blocks, norms
from rqjax.core import check_int
from tests.tools.suites import some

MESSAGES = [
    (
        "q.encode(jnp.ones((2, 64)))",
        "ValueError: expected vectors of dimension 128 along the last axis, got shape (2, 64)",
    ),
    ("q.encode(jnp.float32(1))", "ValueError: expected vectors of dimension 128 along the last axis, got shape ()"),
    ("q.dot(jnp.ones(3), codes)", "ValueError: expected vectors of dimension 128 along the last axis, got shape (3,)"),
    (
        "q.encode(jnp.ones((2, 128), int))",
        "TypeError: expected vectors of a floating-point dtype (float32, bfloat16, float16), got int32",
    ),
    ("rqjax.rotorquant(key, 128, 9)", "ValueError: expected bits to be a whole number from 1 to 8, got 9"),
    ("rqjax.rotorquant(key, 128, 2.5)", "ValueError: expected bits to be a whole number from 1 to 8, got 2.5"),
    ("rqjax.turboquant(key, 128, '3')", "ValueError: expected bits to be a whole number from 1 to 8, got '3'"),
    ("rqjax.turboquant_prod(key, 128, 0)", "ValueError: expected bits to be a whole number from 1 to 8, got 0"),
    ("rqjax.turboquant_mixed(key, 128, 8.5)", "ValueError: expected bits to be a whole number from 1 to 8, got 9"),
    ("rqjax.rtn(key, 128, 0)", "ValueError: expected bits in Affine(dim, bits, group_size=) to be a whole number"),
    ("rqjax.identity(key, 1, 3)", "ValueError: expected dim to be a whole number from 2 to 2147483648, got 1"),
    (
        "rqjax.attend(cache, k, sliding_window=3.5)",
        "ValueError: expected sliding_window to be a whole number from 1 to",
    ),
    (
        "jax.jit(lambda n: rqjax.attend(cache, k, sliding_window=n))(3)",
        "ValueError: expected sliding_window to be a whole number from 1 to",
    ),
    (
        "rqjax.Index.build(q, 7e4 * x, store=rqjax.Exact(128, 'float16'))",
        "ValueError: expected vectors, got 1 too large for the codes, the first is vector 1",
    ),
    ("rqjax.KVCache.init(1, 1, 9, q, None)", "TypeError: expected a value_quantizer, or LastPart() for values in keys"),
    (
        "rqjax.KVCache.init(1, 1, 9, q, q, key_form=rqjax.Rope(1e4))",
        "TypeError: expected key_form to be a form such as rqjax.BeforeRope(rope=rope), got Rope",
    ),
    (
        "rqjax.KVCache.init(1, 1, 9, q, q, key_form=rqjax.BeforeRope)",
        "TypeError: expected key_form to be a form such as rqjax.BeforeRope(rope=rope), got type",
    ),
    (
        "rqjax.Strategy(q, q, x[0])",
        "TypeError: expected key_form to be a form such as rqjax.BeforeRope(rope=rope), got ArrayImpl",
    ),
    ("index.remove(3)", "ValueError: 1 ids are not in the index, the first is 3"),
    ("rqjax.METHODS['rotorqant']", "UnknownName: unknown method 'rotorqant'; did you mean 'rotorquant'"),
]


@pytest.mark.full
def test_messages_without_runtime_type_checks():
    """Messages are those that users see; in the test run the runtime type checks would speak first."""
    script = f"""
import jax, jax.numpy as jnp, rqjax
key = jax.random.key(0)
q = rqjax.rotorquant(key, 128, 3)
x = jnp.eye(2, 128, k=-1)
codes, index, k = q.encode(x), rqjax.Index.build(q, x), jnp.ones((1, 1, 1, 128))
cache = rqjax.KVCache.init(1, 1, 9, q, q)
for call in {[call for call, _ in MESSAGES]!r}:
    try:
        eval(call)
        print("nothing was raised")
    except Exception as error:
        print(f"{{type(error).__name__}}: {{error}}")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == len(MESSAGES), lines
    for line, (call, message) in zip(lines, MESSAGES, strict=True):
        assert line.startswith(message), call


class Tensor:
    """An array of another library, as one of PyTorch that gradients are asked of."""

    def __init__(self, array, gradients=True):
        self.array, self.gradients = array, gradients
        self.dtype, self.shape = "torch.float32", array.shape

    def detach(self):
        return Tensor(self.array, gradients=False)

    def contiguous(self):
        return jnp.asarray(self.array)

    def __dlpack__(self):
        raise NotImplementedError

    def __array__(self, *args, **options):
        if self.gradients:
            raise RuntimeError("Can't call numpy() on Tensor that requires grad")
        if self.array.dtype == jnp.bfloat16:
            raise TypeError("Got unsupported ScalarType BFloat16")
        return np.asarray(self.array)


X = np.random.default_rng(0).standard_normal((40, 8)).astype(np.float32)
TAKEN = {
    "NumPy": X,
    "jax": jnp.asarray(X),
    "lists": X.tolist(),
    "list of arrays": list(jnp.asarray(X)),
    "tensor": Tensor(X),
    "float64": X.astype(np.float64),
    "Fortran's order": np.asfortranarray(X),
    "strided": np.repeat(X, 2, axis=0)[::2],
    "backwards": X[::-1].copy()[::-1],
    "big endian": X.astype(">f4"),
}
REFUSED = {
    "masked": (np.ma.masked_array(X, X > 1), "expected an array without a mask, got a masked one"),
    "objects": (X.astype(object), "expected an array of numbers, got one of object"),
    "text": (X.astype(str), "expected an array of numbers, got one of <U"),
    "times": (X.astype(int).astype("m8[s]"), "expected an array of numbers, got one of timedelta64"),
    "nothing": (None, "expected an array of numbers, got one of object"),
    "ragged": ([[1.0, 2.0], [1.0]], "expected lists of one length, got several"),
    "whole": (X.astype(int), "expected vectors of a floating-point dtype|expected floating-point vectors"),
    "complex": (X.astype(complex), "expected vectors of a floating-point dtype|expected floating-point vectors"),
}
Q = rqjax.eden(jax.random.key(0), 8, 4)
VERBS = {
    "encode": lambda x: Q.encode(x),
    "dot": lambda x: Q.dot(x, Q.encode(X)),
    "roundtrip": lambda x: rqjax.roundtrip(Q, x),
    "build": lambda x: rqjax.Index.build(Q, x).search(X, 3),
    "build exact": lambda x: rqjax.Index.build(rqjax.Exact(8), x, metric="l2").search(X, 3),
    "add": lambda x: rqjax.Index.build(Q, X).add(x).search(X, 3),
    "search": lambda x: rqjax.Index.build(Q, X).search(x, 3),
    "lists": lambda x: rqjax.Index.build(Q, x, key=jax.random.key(0), lists=4).search(X, 3),
    "klt_trellis": lambda x: rqjax.klt_trellis(jax.random.key(0), x, 2),
    "oscar": lambda x: rqjax.oscar(jax.random.key(0), x, 2),
}


@pytest.mark.parametrize("verb", some(VERBS, ["encode", "build", "search", "oscar"]))
def test_arrays_of_any_kind_are_those_of_jax_or_refused_in_a_line(verb):
    expected = jax.tree.leaves(VERBS[verb](jnp.asarray(X)))
    for kind, x in TAKEN.items():
        for leaf, right in zip(jax.tree.leaves(VERBS[verb](x)), expected, strict=True):
            np.testing.assert_array_equal(np.asarray(leaf, right.dtype), right, err_msg=kind)
    for x, message in REFUSED.values():
        with pytest.raises((TypeError, ValueError), match=f"^({message})"):
            VERBS[verb](x)


def test_numbers_of_sixteen_bits_of_another_library():
    low = jnp.asarray(X, jnp.bfloat16)
    for leaf, right in zip(Q.encode(Tensor(low)), Q.encode(low), strict=True):
        np.testing.assert_array_equal(leaf, right)


def test_a_tensor_that_changed_is_encoded_anew():
    """A tensor's numbers are no constant of the program compiled for it."""
    tensor = Tensor(X.copy())
    before = jax.block_until_ready(Q.encode(tensor))  # it may lie where the tensor does
    tensor.array *= -1
    assert not np.array_equal(Q.encode(tensor)[1], before[1])


@pytest.mark.parametrize("ids", [[1, 3], np.array([1, 3]), jnp.array([1, 3]), Tensor(np.array([1, 3])), range(1, 4, 2)])
def test_ids_of_any_kind(ids):
    index = rqjax.Index.build(Q, X)
    assert len(index.remove(ids)) == 38
    assert set(np.asarray(index.search(X[:1], 2, where=ids)[1])[0].tolist()) == {1, 3}


def test_names_and_numbers():
    with pytest.raises(KeyError, match="did you mean 'hadamard'"):
        METHODS["hadamrd"]
    with pytest.raises(ValueError, match="expected size to be a whole number from 1 to 4, got True"):
        check_int("size", True, 1, 4)
    assert check_int("size", np.int64(3), 1, 4) == 3
    with pytest.raises(ValueError, match="expected a power of two of levels, got 3"):
        rqjax.Scalar(jnp.arange(3.0), jnp.float32(1), dim=8)


@jax.jit
def round_trip(quantizer, x):
    return quantizer.decode(quantizer.encode(x))


def test_norms_beyond_float16():
    """Coordinates that float16 holds, norms that it does not."""
    x = jnp.full((2, 64), 60_000, jnp.float16) * jax.random.rademacher(jax.random.key(0), (2, 64), jnp.float16)
    decoded = round_trip(rqjax.rotorquant(jax.random.key(0), 64, 3), x)
    assert jnp.isfinite(decoded).all()
    assert (jnp.linalg.norm(decoded, axis=-1) > 100_000).all()


@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e-25, 1e-15, 1.0, 1e15, 1e25, 3e37])
def test_norm_is_right_over_the_whole_range(size):
    """Subnormal numbers are zero to XLA on a CPU."""
    x = np.full((3, 64), size, np.float32)
    x[1] = 1
    expected = np.linalg.norm(x.astype(np.float64), axis=-1)
    measured = np.asarray(norms.norm(jnp.asarray(x)))[:, 0]
    if size < 1e-37:
        expected[[0, 2]] = measured[[0, 2]] if (measured[[0, 2]] <= 1.01 * expected[0]).all() else np.nan
    np.testing.assert_allclose(measured, expected, rtol=1e-6)


@pytest.mark.full
def test_float64_under_x64():
    script = """
import jax, jax.numpy as jnp, rqjax
@jax.jit
def errors(q, x):
    codes = q.encode(x)
    decoded = q.decode(codes)
    return rqjax.metrics.relative_mse(x, decoded), jnp.abs(q.dot(x[:2], codes) - x[:2] @ decoded.T).max()
for name in ("rotorquant", "turboquant_prod", "turboquant_mixed", "rotorquant_paper", "eden", "affine_rotated_sign",
             "rotorquant_trellis"):
    q = rqjax.METHODS[name](jax.random.key(0), 64, 8)
    mse, difference = errors(q, jax.random.normal(jax.random.key(1), (20, 64), jnp.float64))
    assert mse < (2e-3 if name == "rotorquant_paper" else 1e-3), name
    assert difference < 1e-4, name
"""
    subprocess.run([sys.executable, "-c", script], check=True, env={**os.environ, "JAX_ENABLE_X64": "1"})


@pytest.mark.full
def test_the_cache_and_the_index_under_x64():
    """Caches and indexes of float64 tokens, vectors and queries return what the decoded ones give."""
    script = """
import jax, numpy as np, rqjax
rng = np.random.default_rng(0)
x, y = rng.standard_normal((50, 64)), rng.standard_normal((3, 64))
k = x[None, :, None]
cache = rqjax.strategy("rotorquant_3/v2_lean+centered", jax.random.key(0), 64).cache(1, 1, 64, window=8, sinks=2)
cache = jax.jit(rqjax.append)(cache, k, k)
out = jax.jit(rqjax.attend)(cache, y[None, :, None])
seen = np.arange(50) <= np.arange(47, 50)[:, None]
weights = np.exp(y @ x.T / 8) * seen
expected = weights @ x / weights.sum(1, keepdims=True)
assert out.dtype == np.float64 and cache.lengths.tolist() == [50] and cache.coded.tolist() == [32]
assert np.linalg.norm(out[0, :, 0] - expected) < 0.3 * np.linalg.norm(expected)
for metric in ("ip", "l2", "cosine"):
    index = rqjax.Index.build(rqjax.eden(jax.random.key(0), 64, 3), x, metric=metric, store=rqjax.Exact(64, "float32"))
    scores, ids = index.search(y, 4, rerank=50)
    norms = np.linalg.norm(x, axis=1)
    exact = {"ip": -y @ x.T, "l2": ((y[:, None] - x) ** 2).sum(2), "cosine": -y @ x.T / norms}[metric]
    assert (ids == np.argsort(exact, axis=1)[:, :4]).all() and ids.dtype == np.int32
"""
    subprocess.run([sys.executable, "-c", script], check=True, env={**os.environ, "JAX_ENABLE_X64": "1"})


@pytest.mark.full
def test_blocks_overlap_when_rows_do_not_come_out_even():
    quantizer = rqjax.hadamard(jax.random.key(0), 1024, 2)
    x = jax.random.normal(jax.random.key(1), (5, 500, 1024))
    assert x.size > 2 * blocks.BLOCK_COORDINATES
    encode = jax.jit(lambda q, x: q.encode(x))
    whole = encode(quantizer, x)
    for i in (0, 2, 4):
        part = encode(quantizer, x[i])
        np.testing.assert_array_equal(whole[0][i], part[0])
        assert (whole[1][i] != part[1]).mean() < 1e-4


@pytest.mark.parametrize("bits", some([1, 2, 3, 4, 6], [3, 6]))
def test_any_codebook_finds_the_nearest_level(bits):
    """Learned levels need not be symmetric."""
    levels = jnp.sort(jax.random.normal(jax.random.key(bits), (2**bits,)))
    quantizer = rqjax.Scalar(levels, jnp.float32(1), dim=50)
    x = jax.random.normal(jax.random.key(1), (20, 50))
    nearest = levels[jnp.argmin(jnp.abs(x[..., None] - levels), axis=-1)]
    np.testing.assert_array_equal(round_trip(quantizer, x), nearest)
