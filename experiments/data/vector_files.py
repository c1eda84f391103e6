"""Vectors of the user's files: .npy, .npz, .safetensors, .fvecs, .ivecs, .hdf5."""

from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from rqjax.core import extras, unknown_name


def read(name: str, array: str = "") -> np.ndarray:
    """The vectors that `mapped` finds, in float32 and finite."""
    vectors = np.array(mapped(name, array), np.float32)
    if not np.isfinite(vectors).all():
        raise ValueError(f"expected finite vectors in {name}, got NaN or Inf in {(~np.isfinite(vectors)).sum()} places")
    return vectors


def mapped(name: str, array: str = "") -> np.ndarray:
    """The vectors (n, d) of a .npy, .npz, .safetensors, .fvecs or .hdf5 file; of several arrays the first ("train" of a
    .hdf5 file) or the one of that name. Files .npy and .fvecs are mapped into memory: what is used is read."""
    vectors = _array(name, array)
    if vectors.ndim < 2 or vectors.size == 0 or vectors.dtype.kind != "f":
        raise ValueError(f"expected floating-point vectors (n, d) in {name}, got {vectors.dtype} {vectors.shape}")
    native = vectors.dtype.newbyteorder("=")  # jax has no other
    return vectors.reshape(-1, vectors.shape[-1]).astype(native, copy=False)


def read_ids(name: str, array: str = "") -> np.ndarray:
    """The whole numbers (n, k) of a .ivecs file, or of an array as `mapped` chooses it."""
    ids = _array(name, array)
    if ids.ndim != 2 or ids.size == 0 or ids.dtype.kind not in "iu":
        raise ValueError(f"expected whole numbers (n, k) in {name}, got {ids.dtype} {ids.shape}")
    return np.array(ids)


def _array(name: str, array: str) -> np.ndarray:
    path = Path(name)
    readers: dict[str, Callable[[Path], np.ndarray]] = {
        ".npy": lambda p: np.lib.format.open_memmap(p, "r"),
        ".npz": lambda p: _read_npz(p, array),
        ".safetensors": lambda p: _read_safetensors(p, array),
        ".fvecs": lambda p: _read_vecs(p).view(np.float32),
        ".ivecs": _read_vecs,
        ".hdf5": lambda p: _read_hdf5(p, array or "train"),
    }
    if path.suffix not in readers:
        raise ValueError(f"expected a file that ends in {', '.join(readers)}, got {path}")
    try:
        return readers[path.suffix](path)
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}") from None
    except extras.MissingExtra:
        raise
    except Exception as error:
        raise ValueError(f"{path} is not a readable {path.suffix} file: {error}") from None


def _choose(names: list[str], array: str) -> str:
    if not names:
        raise ValueError("it holds no array")
    if array and array not in names:
        raise ValueError(str(unknown_name("array", array, names)))
    return array or names[0]


def _read_npz(path: Path, array: str) -> np.ndarray:
    arrays = np.load(path, allow_pickle=False)
    return arrays[_choose(arrays.files, array)]


def _read_safetensors(path: Path, array: str) -> np.ndarray:
    from safetensors import safe_open

    with safe_open(path, framework="flax") as tensors:  # flax: the numpy reader has no bfloat16
        tensor = tensors.get_tensor(_choose(list(tensors.keys()), array))
    return np.asarray(tensor.astype(jnp.float32) if jnp.issubdtype(tensor.dtype, jnp.floating) else tensor)


def _read_vecs(path: Path) -> np.ndarray:
    """Each row is its length as int32, then as many numbers of four bytes (.fvecs: float32, .ivecs: int32)."""
    raw = np.memmap(path, np.int32, "r")
    if raw[0] < 1 or len(raw) % (raw[0] + 1) or (raw.reshape(-1, raw[0] + 1)[:, 0] != raw[0]).any():
        raise ValueError("its vectors do not have one dimension")
    return raw.reshape(-1, raw[0] + 1)[:, 1:]


def _read_hdf5(path: Path, array: str) -> np.ndarray:
    """In the layout of ann-benchmarks: "train", "test", "neighbors", "distances"."""
    with extras.explained():
        import h5py

    with h5py.File(path) as file:
        datasets = {name: part for name, part in file.items() if isinstance(part, h5py.Dataset)}
        return datasets[_choose(list(datasets), array)][()]
