"""Caches on disk, for the reuse of prefixes: safetensors, written whole or not at all, with a checksum."""

import contextlib
import dataclasses
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rqjax.cache import KVCache

FORMAT = "rqjax-kv-cache-1"


def save(cache: KVCache, path: str | os.PathLike[str]) -> None:
    """Writes a cache, its quantizers included. A file that was there is replaced at once or stays as it was.

    Raises:
      ValueError: an `append` under jit went past `max_len`.
    """
    from safetensors.numpy import save_file

    cache.check()
    path, arrays = Path(path), {name: _plain(leaf) for name, leaf in _walk(cache) if hasattr(leaf, "shape")}
    metadata = {"format": FORMAT, "fields": json.dumps(_fields(cache)), "sha256": _checksum(arrays)}
    with replacing(path) as temporary:
        save_file(arrays, temporary, metadata)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name to write a file under, which takes the place of `path` once it is whole, and not if the body raises."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        temporary = Path(file.name)
    try:
        yield temporary
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def load(path: str | os.PathLike[str], like: KVCache) -> KVCache:
    """Reads a cache that was saved from one with the fields of `like`: an empty one, or `jax.eval_shape` of it.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is torn, not of a cache, or of a cache with other fields; the first difference is named.
    """
    from safetensors import SafetensorError, safe_open

    if not Path(path).exists():
        raise FileNotFoundError(f"there is no file {path}")
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a whole safetensors file: {error}") from None
    if metadata.get("format") != FORMAT:
        raise ValueError(f"{path} is not a cache: expected format {FORMAT!r}, got {metadata.get('format')!r}")
    if metadata.get("sha256") != _checksum(arrays):
        raise ValueError(f"{path} is damaged: its arrays do not have the checksum that was saved with them")
    expected, got = _fields(like), json.loads(metadata["fields"])
    for name in [*expected, *got]:
        if expected.get(name) != got.get(name):
            raise ValueError(f"{path} is of another cache: expected {name} {expected.get(name)}, got {got.get(name)}")
    leaves = {name: jnp.asarray(arrays[name].view(leaf.dtype)) for name, leaf in _walk(like) if hasattr(leaf, "shape")}
    places, structure = jax.tree_util.tree_flatten_with_path(like)
    return jax.tree.unflatten(structure, [leaves[jax.tree_util.keystr(place)] for place, _ in places])


def _walk(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every field of a nest of dataclasses and tuples, named as jax names leaves."""
    yield name, tree
    if dataclasses.is_dataclass(tree):
        for field in dataclasses.fields(tree):
            yield from _walk(getattr(tree, field.name), f"{name}.{field.name}")
    elif isinstance(tree, tuple | list):
        for i, part in enumerate(tree):
            yield from _walk(part, f"{name}[{i}]")


def _fields(cache: KVCache) -> dict[str, str]:
    """What two caches must have in common for one's arrays to be the other's."""

    def text(value: Any) -> str:
        if hasattr(value, "shape"):
            return f"{np.dtype(value.dtype).name} {tuple(value.shape)}"
        nested = dataclasses.is_dataclass(value) or isinstance(value, tuple | list)
        return type(value).__name__ if nested else repr(value)

    return {name: text(value) for name, value in _walk(cache)}


def _plain(leaf: Any) -> np.ndarray:
    """An array; its bits where numpy itself has no such dtype."""
    array = np.asarray(leaf)
    return array if array.dtype.isbuiltin else array.view(f"u{array.itemsize}")


def _checksum(arrays: dict[str, np.ndarray]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(f"{name}{arrays[name].dtype}{arrays[name].shape}".encode())
        digest.update(arrays[name].tobytes())
    return digest.hexdigest()
