"""Caches on disk: whole or refused."""

import dataclasses
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import rqjax
from rqjax import storage
from rqjax.core import treefile
from rqjax.core.pytree import CLASSES
from rqjax.learning.training import Plan, _adam, _begin
from rqjax.quantizers.product import Rounded
from tests.tools.suites import some


def cache(name="rotor_chain_3/v2_rotated+centered", **options):
    strategy = rqjax.strategy(name, jax.random.key(0), 64)
    return strategy.cache(2, 1, **{"max_len": 256, "window": 16, **options})


@pytest.fixture(scope="module")
def full():
    k = jax.random.normal(jax.random.key(1), (2, 100, 1, 64), jnp.bfloat16)
    return jax.jit(rqjax.append)(cache(), k, k)


@pytest.fixture
def saved(full, tmp_path):
    rqjax.save(full, tmp_path / "prefix.safetensors")
    return full, tmp_path / "prefix.safetensors"


def test_a_cache_comes_back_bit_for_bit(saved):
    full, path = saved
    again = rqjax.load(path, jax.eval_shape(cache))
    assert jax.tree.structure(again) == jax.tree.structure(full)
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(full), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    assert os.listdir(path.parent) == ["prefix.safetensors"]
    rqjax.save(cache(), path)  # replaces the file
    assert rqjax.load(path, full).lengths.tolist() == [0, 0]


def test_a_cache_among_others_that_had_no_room_is_refused(full, tmp_path):
    k = jax.random.normal(jax.random.key(1), (2, 200, 1, 64), jnp.bfloat16)
    over = jax.jit(rqjax.append)(full, k, k)
    with pytest.raises(ValueError, match="max_len"):
        rqjax.save((full, over), tmp_path / "caches.safetensors")


@pytest.mark.parametrize("size", [0, 7, 1000, -1])
def test_a_truncated_file_is_refused(saved, size):
    full, path = saved
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match="is not a whole safetensors file"):
        rqjax.load(path, full)


def test_a_flipped_bit_is_noticed(saved):
    full, path = saved
    content = bytearray(path.read_bytes())
    content[-100] ^= 4
    path.write_bytes(bytes(content))
    with pytest.raises(ValueError, match="is damaged: it does not have the checksum"):
        rqjax.load(path, full)


@pytest.mark.parametrize("missing", ["", ".inner", ".inner.rotation.signs"])
def test_a_file_without_a_field_is_refused(tmp_path, missing):
    path = tmp_path / "q.safetensors"
    rqjax.save(rqjax.hadamard(jax.random.key(0), 64, 3), path)
    metadata, arrays = treefile._read(path)
    fields = json.loads(metadata["fields"])
    del fields[missing]
    metadata["fields"] = json.dumps(fields)
    save_file(arrays, path, metadata | {"sha256": treefile._checksum(metadata, arrays)})
    with pytest.raises(ValueError, match=rf"q\.safetensors is incomplete: .* what {missing or 'the whole'} is"):
        rqjax.load(path)


def test_a_file_without_an_array_is_refused(tmp_path):
    path = tmp_path / "q.safetensors"
    rqjax.save(rqjax.hadamard(jax.random.key(0), 64, 3), path)
    metadata, arrays = treefile._read(path)
    del arrays[".inner.rotation.signs"]
    save_file(arrays, path, metadata | {"sha256": treefile._checksum(metadata, arrays)})
    with pytest.raises(ValueError, match=r"is incomplete: .* what \.inner\.rotation\.signs is"):
        rqjax.load(path)


def test_an_array_of_another_shape_is_noticed(tmp_path):
    path = tmp_path / "q.safetensors"
    rqjax.save((jnp.ones((2, 3)),), path)
    metadata, arrays = treefile._read(path)
    digest = treefile._checksum(metadata, arrays)
    save_file({name: array.reshape(3, 2) for name, array in arrays.items()}, path, metadata | {"sha256": digest})
    with pytest.raises(ValueError, match="is damaged: it does not have the checksum"):
        rqjax.load(path)


def test_what_is_mapped_stays_as_it_was_when_its_file_is_replaced(tmp_path):
    path, numbers = tmp_path / "a.safetensors", np.arange(5000, dtype=np.float32)
    treefile.save((numbers,), path)
    (mapped,), _ = treefile.load(path, mapped=True)
    treefile.save((numbers + 1,), path)
    np.testing.assert_array_equal(mapped, numbers)
    np.testing.assert_array_equal(treefile.load(path)[0][0], numbers + 1)


def test_foreign_files_are_refused(tmp_path):
    save_file({"weights": np.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"expected format 'rqjax-tree-4', got None"):
        rqjax.load(tmp_path / "model.safetensors", cache())
    with pytest.raises(FileNotFoundError, match=r"there is no file .*none\.safetensors"):
        rqjax.load(tmp_path / "none.safetensors", cache())


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: cache(window=32), r"expected \.exact_keys bfloat16 \(2, 1, 52, 64\), got bfloat16 \(2, 1, 36, 64\)"),
        (
            lambda: cache("rotorquant_3/v2_rotated+centered"),
            r"expected \.key_quantizer\.inner\.rotation Rotor, got Chain",
        ),
        (lambda: cache("rotor_chain_3/v2_rotated"), r"expected \.key_form AsGiven, got SubtractedMean"),
        (lambda: cache(max_len=255), r"expected \.max_len 255, got 256"),
    ],
)
def test_another_cache_is_named_by_its_field(saved, other, message):
    with pytest.raises(ValueError, match=f"does not match: {message}"):
        rqjax.load(saved[1], other())


def test_others_may_read_a_file_as_any_of_the_user(tmp_path):
    (tmp_path / "any").touch()
    rqjax.save(rqjax.eden(jax.random.key(0), 16, 3), tmp_path / "saved")
    assert (tmp_path / "saved").stat().st_mode == (tmp_path / "any").stat().st_mode


def test_a_failed_write_leaves_the_old_file(saved, monkeypatch):
    path = saved[1]
    before = path.read_bytes()
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        rqjax.save(cache(), path)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_a_quantizer_is_rebuilt_from_its_file(tmp_path):
    """A file alone restores the nest, static fields and dtypes."""
    path = tmp_path / "q.safetensors"
    keys, values = rqjax.rotor_chain(jax.random.key(0), 64, 3), rqjax.affine_rotated_sign(jax.random.key(1), 64, 4)
    rqjax.save(keys, path, recipe="rotor_chain")
    again = rqjax.load(path)
    assert jax.tree.structure(again) == jax.tree.structure(keys)
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(keys), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    assert storage.recipe(path) == "rotor_chain"
    rqjax.save(((keys, values), None), path)
    (first, second), nothing = rqjax.load(path)
    assert jax.tree.structure((first, second)) == jax.tree.structure((keys, values))
    assert nothing is storage.recipe(path) is None


def test_a_rounded_codebook_is_kept_as_integers(tmp_path):
    path = tmp_path / "q.safetensors"
    centroids = jax.random.normal(jax.random.key(0), (4, 5, 8))
    quantizer = rqjax.Product(Rounded.of(centroids, 10))
    rqjax.save(quantizer, path)
    again = rqjax.load(path, quantizer)
    assert jax.tree.structure(again) == jax.tree.structure(rqjax.load(path)) == jax.tree.structure(quantizer)
    np.testing.assert_array_equal(again.centroids, quantizer.centroids)


def test_unknown_recipes_and_parts_are_named(tmp_path, monkeypatch):
    path, quantizer = tmp_path / "q.safetensors", rqjax.identity(jax.random.key(0), 64, 3)
    with pytest.raises(KeyError, match="unknown recipe 'rotorquant_learnd'; did you mean 'rotorquant_learned'"):
        rqjax.save(quantizer, path, recipe="rotorquant_learnd")
    monkeypatch.setitem(rqjax.METHODS, "mine", rqjax.identity)
    rqjax.save(quantizer, path, recipe="mine")
    monkeypatch.delitem(rqjax.METHODS, "mine")
    with pytest.raises(KeyError, match="unknown recipe 'mine'; "):
        rqjax.load(path)
    rqjax.save(quantizer, path)
    monkeypatch.delitem(CLASSES, "Scalar")
    with pytest.raises(KeyError, match=r"unknown part 'Scalar'; .* Import the module of"):
        rqjax.load(path)


def assert_same(tree, again):
    """Checks that trees are equal to the bit, whatever the dtype."""
    assert jax.tree.structure(again) == jax.tree.structure(tree)
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(tree), strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            assert jax.random.key_impl(a) == jax.random.key_impl(b)
            a, b = map(jax.random.key_data, (a, b))
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def assert_comes_back(tree, path):
    """Checks that a tree is loaded by itself, into a tree with its fields, in memory or mapped, packed or not."""
    rqjax.save(tree, path)
    assert_same(tree, rqjax.load(path))
    assert_same(tree, rqjax.load(path, like=tree))
    assert_same(tree, rqjax.load(path, like=jax.eval_shape(lambda: tree)))
    assert_same(tree, treefile.load(path, mapped=True)[0])
    treefile.save(tree, path, packed=True)
    assert_same(tree, rqjax.load(path))


DTYPES = ["bool", "int4", "uint4", "int8", "uint8", "int16", "uint16", "int32", "uint32", "float16", "bfloat16"]
DTYPES += ["float32", "complex64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float8_e4m3fnuz"]


def test_every_dtype_comes_back(tmp_path):
    """Trees hold arrays of no axis and of no number too, random keys, and values that are no arrays."""
    arrays = {name: [jnp.ones(shape, name) for shape in ((), (0,), (3, 0, 2), (4, 3))] for name in DTYPES}
    keys = [jax.random.split(jax.random.key(0, impl=impl), 3) for impl in ("threefry2x32", "rbg")]
    assert_comes_back((arrays, keys, jax.random.PRNGKey(0), {}, (), []), tmp_path / "a.safetensors")
    others = {"text's": ("inf", "None", "a\nb"), "numbers": [float("inf"), -float("inf"), 1e300, 3, True, None, 1j]}
    rqjax.save((np.arange(3, dtype=">f4"),), tmp_path / "a.safetensors")
    assert rqjax.load(tmp_path / "a.safetensors")[0].tolist() == [0, 1, 2]
    rqjax.save(others, tmp_path / "a.safetensors")
    assert rqjax.load(tmp_path / "a.safetensors") == rqjax.load(tmp_path / "a.safetensors", others) == others


NAMES = [*rqjax.STRATEGIES, "turboquant_trellis_2+centered", "nested_e8_3", "turboquant_prod_3/affine_4", "isoquant_3"]


@pytest.mark.parametrize("name", some(NAMES, ["float8", "nvfp4", "kivi_2"]))
def test_every_cache_comes_back(name, tmp_path):
    """Any bits are codes, so that nothing is encoded."""
    rng, cache = np.random.default_rng(0), rqjax.strategy(name, jax.random.key(0), 128).cache(1, 1, 300)

    def random(x):
        return jnp.asarray(rng.integers(0, 256, (*x.shape, x.dtype.itemsize), np.uint8).view(x.dtype)[..., 0])

    names = "keys", "values", "exact_keys", "exact_values"
    parts = jax.tree.map(random, {name: getattr(cache, name) for name in names})
    assert_comes_back(dataclasses.replace(cache, **parts), tmp_path / "c")


@pytest.mark.parametrize("name", some([*rqjax.METHODS, *rqjax.FITTED], ["rotorquant_paper", "oscar"]))
def test_every_recipe_comes_back(name, tmp_path):
    """Quantizers of every recipe come back together with codes."""
    x = jax.random.normal(jax.random.key(1), (400, 16))
    quantizer = (
        rqjax.METHODS[name](jax.random.key(0), 16, 2)
        if name in rqjax.METHODS
        else rqjax.FITTED[name](jax.random.key(0), x, 2)
    )
    assert_comes_back((quantizer, quantizer.encode(x)), tmp_path / "q")
    rqjax.save(quantizer, tmp_path / "q", recipe=name)
    assert storage.recipe(tmp_path / "q") == name


@pytest.mark.full
@pytest.mark.parametrize("metric", some(["ip", "l2", "cosine"], ["l2"]))
def test_every_index_comes_back(metric, tmp_path):
    x = jax.random.normal(jax.random.key(1), (60, 16))
    for code in (rqjax.eden(jax.random.key(0), 16, 3), rqjax.Exact(16, "float8_e4m3fn")):
        for store in (None, rqjax.Exact(16, "float8_e5m2")):
            assert_comes_back(rqjax.Index.build(code, x, metric=metric, store=store), tmp_path / "i")
            ivf = rqjax.Index.build(code, x, metric=metric, store=store, key=jax.random.key(2), lists=4)
            assert_comes_back(ivf, tmp_path / "i")
            ivf.save(tmp_path / "i")
            assert_same(ivf, rqjax.Index.load(tmp_path / "i"))


@pytest.mark.full
def test_a_calibration_and_a_training_come_back(tmp_path):
    x = jax.random.normal(jax.random.key(1), (2, 80, 16))
    fitted = rqjax.klt_trellis(jax.random.key(0), x, 2)
    calibration = [
        rqjax.Strategy(fitted, rqjax.eden(jax.random.key(0), 16, 2), rqjax.BeforeRope(x[:, 0])),
        rqjax.Strategy(rqjax.Split((fitted, fitted)), rqjax.LastPart(), rqjax.TurnedMean(learned=True)),
    ]
    assert_comes_back(calibration, tmp_path / "c")
    leaves = jax.tree.leaves(rqjax.rotor_chain(jax.random.key(0), 16, 2))
    state = _begin(Plan((0,), _adam(9, (True,)), 9, 3, 4, 5), leaves)
    treefile.save(state, tmp_path / "t")
    assert_same(state, treefile.load(tmp_path / "t", state)[0])


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (len, "expected arrays, pytrees, numbers and texts to write, got one of type builtin_function_or_method"),
        (jnp.float32, "expected arrays, pytrees, numbers and texts to write, got one of type"),
        (np.dtype("float32"), "expected arrays, pytrees, numbers and texts to write, got one of type Float32DType"),
        ({("a", 1): 2}, r"expected keys of dictionaries that are plain texts or whole numbers, got \('a', 1\)"),
        (np.array(["a"]), "expected an array of numbers, got one of <U1"),
        (jax.ShapeDtypeStruct((2,), "float32"), "expected an array of numbers, got one of object"),
    ],
)
def test_what_would_not_load_is_not_written(tree, message, tmp_path):
    with pytest.raises(TypeError, match=f"^{message}"):
        rqjax.save((tree,), tmp_path / "a")
    assert os.listdir(tmp_path) == []
