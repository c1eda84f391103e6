"""Vectors of the user's files: .npy, .npz, .safetensors, .fvecs, .bvecs, .ivecs, .hdf5."""

from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from experiments import one_line
from rqjax.core import extras, treefile, unknown_name

VECS = {".fvecs": np.float32, ".bvecs": np.uint8, ".ivecs": np.int32}
"""Numbers in the files of Jégou's data sets (http://corpus-texmex.irisa.fr)."""


def read(name: str, array: str = "") -> np.ndarray:
    """The vectors that `mapped` finds, in float32 and finite."""
    vectors = np.array(mapped(name, array), np.float32)
    places = np.argwhere(~np.isfinite(vectors))
    if len(places):
        found = f"NaN or Inf in {len(places)} places, the first in vector {places[0][0]}"
        raise ValueError(f"expected finite vectors in {name}, got {found}")
    return vectors


def mapped(name: str, array: str = "") -> np.ndarray:
    """The vectors (n, d) of a .npy, .npz, .safetensors, .fvecs, .bvecs or .hdf5 file: its only array, or the one of
    that name. They are floating-point numbers, int8 or uint8. Files other than .npz and .hdf5 are mapped into memory,
    so that only what is used is read."""
    vectors = _array(name, array)
    numbers = jnp.issubdtype(vectors.dtype, jnp.floating) or vectors.dtype in ("int8", "uint8")
    if vectors.ndim < 2 or vectors.size == 0 or not numbers:
        raise ValueError(
            f"expected vectors (n, d) of floating-point numbers or bytes in {name}, got {vectors.dtype} {vectors.shape}"
        )
    native = vectors.dtype.newbyteorder("=")  # jax has no other
    return vectors.reshape(-1, vectors.shape[-1]).astype(native, copy=False)


def read_ids(name: str, array: str = "") -> np.ndarray:
    """The whole numbers (n, k) of a .ivecs file, or of an array as `mapped` chooses it."""
    ids = _array(name, array)
    if ids.ndim != 2 or ids.size == 0 or ids.dtype.kind not in "iu":
        raise ValueError(f"expected whole numbers (n, k) in {name}, got {ids.dtype} {ids.shape}")
    return np.array(ids)


def read_filter(name: str, array: str = "") -> np.ndarray:
    """The ids, or the booleans of the ids from 0 on, of an array as `mapped` chooses it, of any shape."""
    where = _array(name, array)
    if where.dtype.kind not in "biu":
        raise ValueError(f"expected whole numbers or booleans in {name}, got {where.dtype} {where.shape}")
    if where.dtype != bool and where.size > 2 and np.isin(where, (0, 1)).all():  # as ids, only 0 and 1 would be found
        raise ValueError(f"expected ids or booleans in {name}, got a mask of {where.dtype}; write it as booleans")
    return np.array(where).reshape(-1)


def write(name: str, rows: np.ndarray, array: str = "train") -> None:
    """Writes an array (n, d): a .fvecs, .bvecs or .ivecs file, or one array of a .hdf5 file beside those in it.

    Raises:
      ValueError: the file has another ending, or holds other numbers than these; or the array is in the .hdf5 file.
    """
    path, rows = Path(name), np.asarray(rows)
    if path.suffix not in (*VECS, ".hdf5"):
        raise ValueError(f"expected a file that ends in {', '.join(VECS)} or .hdf5, got {path}")
    if rows.ndim != 2 or rows.size == 0 or rows.dtype.kind not in "fiu":
        raise ValueError(f"expected numbers (n, d) for {path}, got {rows.dtype} {rows.shape}")
    if path.suffix == ".hdf5":
        with extras.explained():
            import h5py
        with h5py.File(path, "a") as file:
            if array in file:
                raise ValueError(f"{path} has an array {array!r}")
            file[array] = rows
        return
    dtype = VECS[path.suffix]
    with np.errstate(all="ignore"):
        stored = np.ascontiguousarray(rows, dtype)
        same = np.array_equal(stored, rows) if dtype != np.float32 else rows.dtype.kind == "f"
    if not same:
        raise ValueError(
            f"expected numbers that {np.dtype(dtype).name} holds for {path}, got {rows.dtype} {rows.shape}"
        )
    with treefile.replacing(path) as temporary:
        lengths = np.full((len(rows), 1), rows.shape[1], np.int32)
        np.concatenate([lengths.view(np.uint8), stored.view(np.uint8)], axis=1).tofile(temporary)


def _array(name: str, array: str) -> np.ndarray:
    path = Path(name)
    readers: dict[str, Callable[[Path], np.ndarray]] = {
        ".npy": lambda p: np.lib.format.open_memmap(p, "r"),
        ".npz": lambda p: _read_npz(p, array),
        ".safetensors": lambda p: _read_safetensors(p, array),
        **dict.fromkeys(VECS, _read_vecs),
        ".hdf5": lambda p: _read_hdf5(p, array),
    }
    if path.suffix not in readers:
        raise ValueError(f"expected a file that ends in {', '.join(readers)}, got {path}")
    if array and path.suffix in (".npy", *VECS):
        raise ValueError(f"expected no #{array}: {path} holds one array")
    try:
        return readers[path.suffix](path)
    except FileNotFoundError:
        raise ValueError(f"there is no file {path}") from None
    except extras.MissingExtra:
        raise
    except Exception as error:
        raise ValueError(f"cannot read {path}: {one_line(error)}") from None


def _choose(names: list[str], array: str) -> str:
    if not names:
        raise ValueError("it holds no array")
    if array and array not in names:
        raise unknown_name("array", array, names)
    if not array and len(names) > 1:
        raise ValueError(f"expected one of its arrays, as PATH#{names[0]}: {', '.join(names)}")
    return array or names[0]


def _read_npz(path: Path, array: str) -> np.ndarray:
    arrays = np.load(path, allow_pickle=False)
    return arrays[_choose(arrays.files, array)]


def _read_safetensors(path: Path, array: str) -> np.ndarray:
    _, tensors = treefile.stored(path)
    return tensors[_choose(list(tensors), array)].array()


def _read_vecs(path: Path) -> np.ndarray:
    """Reads rows of a length as int32, then as many numbers."""
    dtype = np.dtype(VECS[path.suffix])
    raw = np.memmap(path, np.uint8, "r")
    length = int.from_bytes(raw[:4].tobytes(), "little", signed=True)
    if length < 1:
        raise ValueError(f"vector 0 has dimension {length}")
    width = 4 + length * dtype.itemsize
    lengths = np.ndarray((len(raw) + width - 4) // width, np.int32, raw, strides=(width,))  # of a torn last one, too
    others = np.flatnonzero(lengths != length)
    if len(others):
        raise ValueError(f"vector {others[0]} has dimension {lengths[others[0]]}, those before it have {length}")
    if len(raw) % width:
        raise ValueError(f"vector {len(raw) // width} is cut off after {len(raw) % width} of {width} bytes")
    return raw.reshape(-1, width)[:, 4:].view(dtype)


def _read_hdf5(path: Path, array: str) -> np.ndarray:
    """Reads one of the arrays of ann-benchmarks' layout: "train", "test", "neighbors", "distances"."""
    with extras.explained():
        import h5py

    with h5py.File(path) as file:
        datasets = {name: part for name, part in file.items() if isinstance(part, h5py.Dataset)}
        return datasets[_choose(list(datasets), array)][()]
