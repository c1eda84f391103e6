"""Caches on disk: whole or refused."""

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
from rqjax.quantizers.product import Rounded


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


def test_foreign_files_are_refused(tmp_path):
    save_file({"weights": np.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"was not saved here: expected format 'rqjax-tree-2', got None"):
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
        (lambda: cache("rotor_chain_3/v2_rotated"), r"expected \.key_mean None, got float32 \(2, 1, 64\)"),
        (lambda: cache(max_len=255), r"expected \.max_len 255, got 256"),
    ],
)
def test_another_cache_is_named_by_its_field(saved, other, message):
    with pytest.raises(ValueError, match=f"does not match: {message}"):
        rqjax.load(saved[1], other())


def test_a_failed_write_leaves_the_old_file(saved, monkeypatch):
    path = saved[1]
    before = path.read_bytes()
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        rqjax.save(cache(), path)
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_a_quantizer_is_rebuilt_from_its_file(tmp_path):
    """Without anything to compare it with: nest, static fields, dtypes."""
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
    with pytest.raises(KeyError, match="unknown part 'Scalar'; "):
        rqjax.load(path)
