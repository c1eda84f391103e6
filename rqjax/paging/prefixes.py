"""Pages of prefixes, found by a hash of all tokens up to them, in memory and in files."""

import collections
import hashlib
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from rqjax.cache.kv import KVCache
from rqjax.core import treefile
from rqjax.paging.pages import Grid, Pool, Root, Slot, codes_in, digest, empty_root, root


class Block(NamedTuple):
    """Pages that hold the codes of a piece of text."""

    pages: tuple[int, ...]
    roots: tuple[Root, ...] | None
    """Roots of a first piece, one for each layer."""


class Prefixes:
    """Blocks by hash, the least recently used first. The hash is of the tokens up to the end of the next piece, with
    which a block is whole."""

    def __init__(self, layers: Sequence[KVCache], grid: Grid, folder: str | os.PathLike[str] | None, seed: bytes):
        self.grid, self.folder = grid, None if folder is None else Path(folder)
        if self.folder is not None:
            if any(not leaf.is_fully_addressable for leaf in jax.tree.leaves(layers)):
                raise ValueError(f"expected caches on devices of one process to keep prefixes in {folder}, got several")
            self.folder.mkdir(parents=True, exist_ok=True)
            seed += f"{grid} {digest(layers)}".encode()
        self.seed = hashlib.blake2b(seed).digest()
        self.blocks: collections.OrderedDict[bytes, Block] = collections.OrderedDict()
        self.damaged: set[bytes] = set()

    def hashed(self, chain: list[bytes], piece: np.ndarray) -> bytes:
        """Hash of a piece after those of `chain`."""
        return hashlib.blake2b((chain[-1] if chain else self.seed) + piece.tobytes()).digest()

    def hashes(self, text: np.ndarray) -> list[bytes]:
        """Hashes of the whole pieces of a text."""
        chain: list[bytes] = []
        for _ in range(self.grid.whole(len(text))):
            piece = text[self.grid.end(len(chain)) : self.grid.end(len(chain) + 1)]
            chain.append(self.hashed(chain, piece))
        return chain

    def add(self, i: int, slot: Slot, before: np.ndarray, layers: Sequence[KVCache], pool: Pool) -> None:
        """Adds the blocks of a slot that are whole now. A piece that has come in part was not appended in one call: its
        hash is dropped."""
        whole = self.grid.whole(slot.appended)
        for n in range(max(1, self.grid.whole(before)), min(len(slot.chain), whole)):
            if slot.chain[n] not in self.blocks:
                pages = slot.pages[self.grid.pages(n - 1) : self.grid.pages(n)]
                roots = tuple(root(layer, i) for layer in layers) if n == 1 else None
                self.blocks[slot.chain[n]] = Block(tuple(pages), roots)
                pool.use(pages)
        if slot.appended.min() > self.grid.end(whole):
            del slot.chain[whole:]

    def touch(self, keys: list[bytes]) -> None:
        """Marks blocks of a text as used, so that the longest prefixes are the first to be forgotten."""
        for key in reversed(keys):
            self.blocks.move_to_end(key)

    def save(self, key: bytes, layers: Sequence[KVCache]) -> None:
        """Writes a block to its file, if there is a folder and the file is missing or damaged."""
        if self.folder is not None and (key in self.damaged or not (self.folder / key.hex()).exists()):
            block, path = self.blocks[key], self.folder / key.hex()
            codes = tuple(codes_in(layer, block.pages) for layer in layers)
            treefile.save((codes, block.roots), path, packed=True, prefix=key.hex())
            self.damaged.discard(key)

    def load(self, key: bytes, layers: Sequence[KVCache], pages: int, first: bool) -> tuple[Any, Any] | None:
        """Reads codes and roots of a block from its file, if it is there and whole."""
        if self.folder is None or not (path := self.folder / key.hex()).exists():
            return None
        codes = tuple(jax.eval_shape(lambda layer=layer: codes_in(layer, range(pages))) for layer in layers)
        try:
            found, metadata = treefile.load(path, (codes, tuple(map(empty_root, layers)) if first else None))
            if metadata.get("prefix") != key.hex():
                raise ValueError(f"{path} is of another prefix")
            return found
        except (ValueError, OSError) as error:
            if path.is_file():
                self.damaged.add(key)
            warnings.warn(f"a prefix is computed again: {error}", stacklevel=4)
            return None
