"""Files of ids, files in the layout of ann-benchmarks, and vectors that stay on disk."""

import sys

import h5py
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.flax import save_file

from experiments.data import samples, vector_files as files
from rqjax.core.extras import MissingExtra

pytestmark = pytest.mark.full

X = np.random.default_rng(0).standard_normal((50, 24)).astype(np.float32)
IDS = np.arange(150, dtype=np.int32).reshape(50, 3)


@pytest.fixture
def folder(tmp_path):
    np.save(tmp_path / "ids.npy", IDS.astype(np.int64))
    np.save(tmp_path / "x.npy", X.astype(">f4"))
    np.concatenate([np.full((50, 1), 3, np.int32), IDS], axis=1).tofile(tmp_path / "ids.ivecs")
    np.concatenate([np.full((50, 1), 24, np.int32).view(np.float32), X], axis=1).tofile(tmp_path / "x.fvecs")
    with h5py.File(tmp_path / "x.hdf5", "w") as file:
        file["distances"], file["neighbors"], file["test"], file["train"] = X[:, :3], IDS, X[:5], X
        file.create_group("more")
    return tmp_path


def test_arrays_of_ann_benchmarks(folder):
    np.testing.assert_array_equal(files.read(folder / "x.hdf5", "train"), X)
    np.testing.assert_array_equal(files.read(folder / "x.hdf5", "test"), X[:5])
    assert samples.sample(f"file:{folder / 'x.hdf5'}#test", 1, 20, 16).shape == (1, 5, 16)


@pytest.mark.parametrize(("name", "array"), [("ids.ivecs", ""), ("ids.npy", ""), ("x.hdf5", "neighbors")])
def test_ids(folder, name, array):
    ids = files.read_ids(folder / name, array)
    assert ids.dtype.kind == "i"
    np.testing.assert_array_equal(ids, IDS)


@pytest.mark.parametrize(("name", "array"), [("x.npy", ""), ("x.fvecs", ""), ("x.hdf5", "train")])
def test_vectors_on_disk_are_those_in_memory(folder, name, array):
    vectors = files.mapped(folder / name, array)
    assert vectors.dtype == np.float32
    assert vectors.dtype.isnative
    np.testing.assert_array_equal(vectors, files.read(folder / name, array))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "int8"])
def test_tensors_keep_their_dtype(tmp_path, dtype):
    x = jnp.asarray(X * 9, dtype)
    save_file({"x": x}, tmp_path / "x.safetensors")
    vectors = files.mapped(tmp_path / "x.safetensors")
    assert isinstance(vectors, np.memmap)
    assert vectors.dtype == dtype
    np.testing.assert_array_equal(files.read(tmp_path / "x.safetensors"), np.asarray(x, np.float32))


@pytest.mark.parametrize(("name", "dtype"), [("a.fvecs", "f4"), ("a.bvecs", "u1"), ("a.ivecs", "i4"), ("a.hdf5", "f8")])
def test_what_is_written_is_read(tmp_path, name, dtype):
    rows = (np.arange(70).reshape(10, 7) % 256).astype(dtype)
    files.write(tmp_path / name, rows)
    read = files.read if name != "a.ivecs" else files.read_ids
    np.testing.assert_array_equal(read(tmp_path / name), rows)


def test_a_file_of_ann_benchmarks_is_written(tmp_path):
    path = tmp_path / "x.hdf5"
    for name, rows in {"train": X, "test": X[:5], "neighbors": IDS, "distances": X[:, :3]}.items():
        files.write(path, rows, name)
    np.testing.assert_array_equal(files.read(path, "train"), X)
    np.testing.assert_array_equal(files.read_ids(path, "neighbors"), IDS)
    with pytest.raises(ValueError, match="has an array 'test'"):
        files.write(path, X, "test")


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        ("a.npy", X, r"expected a file that ends in .fvecs, .bvecs, .ivecs or .hdf5, got .*a.npy"),
        ("a.bvecs", IDS + 200, "expected numbers that uint8 holds for .*a.bvecs, got int32"),
        ("a.ivecs", X, "expected numbers that int32 holds"),
        ("a.fvecs", IDS, "expected numbers that float32 holds"),
        ("a.fvecs", X[0], r"expected numbers \(n, d\) for .*, got float32 \(24,\)"),
        ("a.hdf5", X[:0], r"expected numbers \(n, d\)"),
    ],
)
def test_what_cannot_be_written(tmp_path, name, rows, message):
    with pytest.raises(ValueError, match=message):
        files.write(tmp_path / name, rows)
    assert not list(tmp_path.iterdir())


def test_filters(tmp_path):
    np.save(tmp_path / "mask.npy", X[:, 0] > 0)
    np.save(tmp_path / "ids.npy", IDS)
    assert files.read_filter(tmp_path / "mask.npy").dtype == bool
    np.testing.assert_array_equal(files.read_filter(tmp_path / "ids.npy"), np.arange(150))
    np.save(tmp_path / "x.npy", X)
    with pytest.raises(ValueError, match=r"expected whole numbers or booleans in .*, got float32"):
        files.read_filter(tmp_path / "x.npy")
    np.save(tmp_path / "bits.npy", (X[:, 0] > 0).astype(np.int64))
    with pytest.raises(ValueError, match=r"got a mask of int64; write it as booleans"):
        files.read_filter(tmp_path / "bits.npy")


def test_a_file_is_mapped(tmp_path):
    np.save(tmp_path / "x.npy", X.reshape(5, 10, 24))
    vectors = files.mapped(tmp_path / "x.npy")
    assert isinstance(vectors, np.memmap)
    assert vectors.shape == (50, 24)
    assert not isinstance(files.read(tmp_path / "x.npy"), np.memmap)


@pytest.mark.parametrize(
    ("read", "name", "array", "message"),
    [
        (
            files.read,
            "x.hdf5",
            "tset",
            r"cannot read .*x\.hdf5: unknown array 'tset'; did you mean 'test'",
        ),
        (files.read, "x.hdf5", "more", "unknown array 'more'"),
        (
            files.read,
            "x.hdf5",
            "neighbors",
            r"expected vectors \(n, d\) of floating-point numbers or bytes in .*, got int32 \(50, 3\)",
        ),
        (
            files.read,
            "ids.ivecs",
            "",
            r"expected vectors \(n, d\) of floating-point numbers or bytes in .*, got int32 \(50, 3\)",
        ),
        (files.read_ids, "x.fvecs", "", r"expected whole numbers \(n, k\) in .*, got float32 \(50, 24\)"),
        (files.read_ids, "x.hdf5", "train", r"expected whole numbers \(n, k\) in .*, got float32 \(50, 24\)"),
        (files.read, "x.hdf5", "", "expected one of its arrays, as PATH#distances: distances, neighbors, test, train"),
        (files.read_ids, "none.ivecs", "", "there is no file .*none.ivecs"),
    ],
)
def test_wrong_arrays(folder, read, name, array, message):
    with pytest.raises(ValueError, match=message):
        read(folder / name, array)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.hdf5", b"torn", r"cannot read .*x\.hdf5: "),
        ("x.ivecs", b"", r"cannot read .*x\.ivecs: "),
        ("x.ivecs", b"\x01\x00\x00", "vector 0 is cut off after 3 of 8 bytes"),
        ("x.ivecs", b"\x00\x00\x00\x00", "vector 0 has dimension 0"),
        ("x.ivecs", b"\x01\x00\x00\x00\x07\x00\x00\x00\x01", "vector 1 is cut off after 1 of 8 bytes"),
        ("x.ivecs", b"\x02\x00\x00\x00\x07\x00\x00\x00", "vector 0 is cut off after 8 of 12 bytes"),
        (
            "x.ivecs",
            b"\x01\x00\x00\x00\x07\x00\x00\x00\x02\x00\x00\x00\x07\x00\x00\x00",
            "vector 1 has dimension 2, those before it have 1",
        ),
        ("x.npy", b"PK\x03\x04torn", r"cannot read .*x\.npy: "),
    ],
)
def test_damaged_files(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        files.read_ids(tmp_path / name)


def test_without_h5py_the_extra_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(MissingExtra, match=r"^h5py is not installed, it comes with the extra bench: pip install -e"):
        files.read(folder / "x.hdf5")
