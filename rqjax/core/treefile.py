"""Pytrees on disk: safetensors, written whole or not at all, with a checksum."""

import ast
import contextlib
import dataclasses
import functools
import gzip
import hashlib
import json
import os
import re
import secrets
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from rqjax.core.checks import as_array
from rqjax.core.pytree import CLASSES, derived_fields, with_derived, without_derived
from rqjax.core.registry import UnknownName, unknown_name

FORMAT = "rqjax-tree-4"
"""Format of files; another number stands for parts with other fields."""
NAMES = {"BOOL": "bool", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
"""Names of dtypes in safetensors that are not a kind and a number of bits, as F32 and U8 are. Arrays of other dtypes
are written as bits."""
KEYS = {"key<fry>": "threefry2x32", "key<rbg>": "rbg", "key<urbg>": "unsafe_rbg"}
"""Generators of random numbers by the dtype of their keys."""
KEY = r"'[^'\\]*'|\"[^\"\\]*\"|-?\d+"
"""Pattern of a dictionary's key, as it is written in names."""
LEVEL = 1
"""Level of gzip. Codes of 2 bits of a trained model become 0.85 (`eden`) to 0.91 (trellis) as large at 45 MB/s, and
come back at 200. Level 6 brings another 0.5 %, lzma 4 to 7 % at a tenth of the speed."""


def save(tree: PyTree, path: str | os.PathLike[str], *, packed: bool = False, **metadata: str) -> None:
    """Writes a nest of pytrees, tuples and lists, with texts beside it. A file that was there is replaced at once or
    stays as it was. It may be `packed` by gzip."""
    path, arrays = Path(path), {name: _plain(leaf) for name, leaf in _walk(tree) if _is_array(leaf)}
    metadata = {"format": FORMAT, "fields": json.dumps(_fields(tree)), **metadata}
    with replacing(path) as temporary:
        save_file(arrays, temporary, metadata | {"sha256": _checksum(metadata, arrays)})
        if packed:
            temporary.write_bytes(gzip.compress(temporary.read_bytes(), LEVEL))


def digest(tree: PyTree) -> str:
    """Hash of a nest: equal for two nests if `save` writes the same of both."""
    arrays = {name: _plain(leaf) for name, leaf in _walk(tree) if _is_array(leaf)}
    return _checksum(_fields(tree), arrays)


def load(path: str | os.PathLike[str], like: PyTree = None, *, mapped: bool = False) -> tuple[PyTree, dict[str, str]]:
    """Reads a saved nest, which must have the fields of `like` if it is given, and the texts beside it. Raises as
    `rqjax.load`. If `mapped`, arrays are NumPy's and stay in the file, which is read once for its checksum."""
    metadata, arrays = _read(path, mapped)
    fields, arrays = _Parts(path, json.loads(metadata.get("fields", "{}"))), _Parts(path, arrays)
    if like is None:
        return _build("", fields, arrays, np.asanyarray if mapped else jnp.asarray), metadata
    expected = _fields(like)
    for name in [*expected, *fields]:
        wanted, got = expected.get(name), fields.get(name)
        if wanted != got:
            raise ValueError(f"{path} does not match: expected {f'{name} {wanted}'.strip()}, got {got}")

    def read(place: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(place)
        return _restored(arrays[name], fields[name]) if _is_array(leaf) else leaf

    over = functools.partial(jax.tree.map, is_leaf=lambda part: bool(derived_fields(part)))
    found = jax.tree_util.tree_map_with_path(read, over(without_derived, like))
    return over(with_derived, found), metadata


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a name to write a file under. It takes the place of `path` once the file is whole, and not if the body
    raises."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent}")
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    temporary.touch(exist_ok=False)  # it has the permissions of any file of the user
    mode = temporary.stat().st_mode
    try:
        yield temporary
        temporary.chmod(mode)  # `save_file` puts a file of its own there, which others may not read
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """Reads the texts of a whole file."""
    return _read(path)[0]


def _read(path: str | os.PathLike[str], mapped: bool = False) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """Reads metadata and arrays of a whole file; arrays stay in it if `mapped`."""
    if not Path(path).exists():
        raise FileNotFoundError(f"there is no file {path}")
    with whole(path), _unpacked(Path(path)) as plain:
        metadata, parts = stored(plain)
        arrays = {name: part.array() if mapped else np.array(part.array()) for name, part in parts.items()}
    if metadata.get("format") != FORMAT:
        found = metadata.get("format")
        raise ValueError(f"{path} was not saved by this version of rqjax: expected format {FORMAT!r}, got {found!r}")
    if metadata.pop("sha256", None) != _checksum(metadata, arrays):
        raise ValueError(f"{path} is damaged: it does not have the checksum that was saved with it")
    return metadata, arrays


class Stored(NamedTuple):
    """An array in a file of safetensors."""

    path: Path
    kind: str
    """Dtype of the array, as safetensors name it."""
    shape: tuple[int, ...]
    start: int

    def array(self) -> np.ndarray:
        """The array, mapped anew each time: pages that were read stay resident as long as their mapping."""
        dtype = dtype_of(self.kind)
        if 0 in self.shape:
            return np.zeros(self.shape, dtype)
        return np.memmap(self.path, dtype, "r", self.start, self.shape)


def stored(path: Path) -> tuple[dict[str, str], dict[str, Stored]]:
    """Reads texts and arrays of a file: the length of its header, the header, which says where arrays are, and their
    bytes.

    Raises:
      SafetensorError, OSError: the file is not whole.
    """
    with safe_open(path, framework="numpy"), path.open("rb") as file:  # the first one checks that the file is whole
        length = int.from_bytes(file.read(8), "little")
        parts = json.loads(file.read(length))
    metadata = parts.pop("__metadata__", None) or {}
    return metadata, {
        name: Stored(path, part["dtype"], tuple(part["shape"]), 8 + length + part["data_offsets"][0])
        for name, part in parts.items()
    }


@contextlib.contextmanager
def whole(path: str | os.PathLike[str]) -> Iterator[None]:
    """Names the file that is not whole, for a body that reads it."""
    try:
        yield
    except (SafetensorError, OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from None


def dtype_of(kind: str) -> np.dtype:
    """Converts a dtype of safetensors to NumPy's.

    Raises:
      ValueError: there is none of its kind.
    """
    try:
        return jnp.dtype(NAMES[kind] if kind in NAMES else f"{kind[0].lower()}{int(kind[1:]) // 8}")
    except (TypeError, ValueError):
        raise ValueError(f"expected numbers of whole bytes that NumPy has, got dtype {kind!r} of safetensors") from None


@contextlib.contextmanager
def _unpacked(path: Path) -> Iterator[Path]:
    """Yields the file, or an unpacked copy of it."""
    with path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"  # as all of gzip begin
    if not packed:
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / path.name
        plain.write_bytes(gzip.decompress(path.read_bytes()))
        yield plain


class _Parts(dict[str, Any]):
    """Contents of a file by name; a missing name is an error that says so."""

    def __init__(self, path: str | os.PathLike[str], entries: dict[str, Any]):
        self.path = path
        dict.__init__(self, entries)

    def __missing__(self, name: str) -> Any:
        raise ValueError(f"{self.path} is incomplete: it does not say what {name or 'the whole'} is")


def _build(
    name: str, fields: dict[str, str], arrays: dict[str, np.ndarray], made: Callable[[np.ndarray], Any]
) -> PyTree:
    """Builds the part of a nest with this name from arrays, each converted by `made`."""
    text = fields[name]
    if name in arrays or re.fullmatch(r"\S+ \(.*\)", text):
        return _restored(arrays[name], text, made)
    if text in ("tuple", "list"):
        parts = []
        while f"{name}[{len(parts)}]" in fields:
            parts.append(_build(f"{name}[{len(parts)}]", fields, arrays, made))
        return tuple(parts) if text == "tuple" else parts
    if text == "dict":
        keys = [match[1] for part in fields if (match := re.fullmatch(rf"{re.escape(name)}\[({KEY})\]", part))]
        return {ast.literal_eval(key): _build(f"{name}[{key}]", fields, arrays, made) for key in keys}
    if text in ("inf", "-inf", "nan"):
        return float(text)
    if not text.isidentifier() or text in ("None", "True", "False"):
        return ast.literal_eval(text)
    if text not in CLASSES:
        raise UnknownName(f"{unknown_name('part', text, CLASSES)}. Import the module of a part of your own first")
    tree = object.__new__(CLASSES[text])
    for field in dataclasses.fields(tree):
        own = field not in derived_fields(tree)
        part = _build(f"{name}.{field.name}", fields, arrays, made) if own else None
        object.__setattr__(tree, field.name, part)
    return with_derived(tree)


def _walk(tree: PyTree, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every field of a nest of dataclasses, tuples, lists and dictionaries, named as jax names leaves. NumPy's
    numbers become Python's."""
    tree = tree.item() if isinstance(tree, np.generic) else tree
    yield name, tree
    if dataclasses.is_dataclass(tree):
        for field in dataclasses.fields(tree):
            if field not in derived_fields(tree):
                yield from _walk(getattr(tree, field.name), f"{name}.{field.name}")
    elif hasattr(tree, "_fields"):
        for field in tree._fields:
            yield from _walk(getattr(tree, field), f"{name}.{field}")
    elif isinstance(tree, dict):
        for key, part in tree.items():
            if not re.fullmatch(KEY, repr(key)):
                raise TypeError(f"expected keys of dictionaries that are plain texts or whole numbers, got {key!r}")
            yield from _walk(part, f"{name}[{key!r}]")
    elif isinstance(tree, tuple | list):
        for i, part in enumerate(tree):
            yield from _walk(part, f"{name}[{i}]")


def _fields(tree: PyTree) -> dict[str, str]:
    """Describes the fields of a tree: two trees whose descriptions agree can take each other's arrays."""

    def text(value: Any) -> str:
        if _is_array(value):
            return f"{value.dtype.name} {tuple(value.shape)}"
        if dataclasses.is_dataclass(value) or isinstance(value, tuple | list | dict):
            return type(value).__name__
        if type(value) not in (bool, int, float, str, bytes, complex, type(None)):
            raise TypeError(
                f"expected arrays, pytrees, numbers and texts to write, got one of type {type(value).__name__}"
            )
        return repr(value)

    return {name: text(value) for name, value in _walk(tree)}


def _is_array(value: Any) -> bool:
    """Returns whether a value is an array. `Rounded` has a shape, too, and a dtype of NumPy has one."""
    return hasattr(value, "shape") and hasattr(getattr(value, "dtype", None), "name")


def _plain(leaf: Any) -> np.ndarray:
    """Converts a leaf to an array of a plain dtype: its bits where safetensors lack the dtype, the numbers of random
    keys."""
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    array = np.asarray(jax.random.key_data(leaf) if is_key else as_array(leaf))
    known = array.dtype.isbuiltin == 1 or array.dtype.name in NAMES.values()
    return array if known else array.view(f"u{array.itemsize}")


def _restored(array: np.ndarray, text: str, made: Callable[[np.ndarray], Any] = jnp.asarray) -> Any:
    """Restores what `_plain` made of an array of this dtype and shape."""
    dtype = text.split()[0]
    if dtype in KEYS:
        return jax.random.wrap_key_data(jnp.asarray(array), impl=KEYS[dtype])
    return made(array.view(jnp.dtype(dtype)))


def _checksum(metadata: dict[str, str], arrays: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name in sorted(arrays):
        digest.update(f"{name}{arrays[name].dtype}{arrays[name].shape}".encode())
        digest.update(np.ascontiguousarray(arrays[name]).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
