"""Pages of prefixes, found by a hash of all tokens up to them, in memory and in files."""

import collections
import hashlib
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from safetensors import SafetensorError

from rqjax.core import treefile
from rqjax.paging.pages import Grid, Layers, Pool, Root, Slot, codes_in, digest, empty_root, root


class Block(NamedTuple):
    """Pages that hold the codes of a piece of text."""

    pages: tuple[int, ...]
    roots: tuple[Root, ...] | None
    """Roots of a piece that no page comes before, one for each layer with pages."""


class Prefixes:
    """Blocks by hash, the least recently used first. The hash is of the tokens up to the end of the piece, or of the
    next one where the window delays its codes until then.

    A prefix needs what layers without pages held at its end, too. This takes more bytes than codes of a piece. It is
    kept only where other texts are likely to go on: after a prompt's pieces, and where two texts have parted.
    """

    def __init__(self, layers: Layers, grid: Grid, folder: str | os.PathLike[str] | None, seed: bytes):
        self.grid, self.folder, self.layers = grid, None if folder is None else Path(folder), layers
        if self.folder is not None:
            if any(not leaf.is_fully_addressable for leaf in jax.tree.leaves(layers.all)):
                raise ValueError(f"expected caches on devices of one process to keep prefixes in {folder}, got several")
            self.folder.mkdir(parents=True, exist_ok=True)
            seed += f"{grid} {layers.lag} {digest(layers.all)}".encode()
        self.seed = hashlib.blake2b(seed).digest()
        self.blocks: collections.OrderedDict[bytes, Block] = collections.OrderedDict()
        self.rings: collections.OrderedDict[bytes, tuple[Root, ...]] = collections.OrderedDict()
        """Tokens of layers without pages, by the hash of all up to there; at most twice as many as slots."""
        self.damaged: set[str] = set()
        self.mixed = False
        """True if codes have been made anew, so that pages of a piece are no longer those of whoever computes it."""

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

    def add(self, i: int, slot: Slot, before: np.ndarray, pool: Pool) -> None:
        """Adds the blocks of a slot that are whole now, or gives it the pages of those that are known. A piece that has
        come in part was not appended in one call: its hash is dropped."""
        whole = self.grid.whole(slot.appended)
        if whole in slot.marks and whole <= len(slot.chain) and (slot.appended == self.grid.end(whole)).all():
            self._keep(slot.chain[whole - 1], tuple(root(layer, i) for layer in self.layers.rings))
        lag = self.layers.lag
        for n in range(max(lag, self.grid.whole(before)), min(len(slot.chain), whole)):
            first, stop = self.grid.pages(n - lag), self.grid.pages(n - lag + 1)
            own, known = slot.pages[first:stop], self.blocks.get(slot.chain[n])
            if known is None and own:  # after a cut, pages may be those of another text's block, too
                roots = None if first else tuple(root(layer, i) for layer in self.layers.paged)
                self.blocks[slot.chain[n]] = Block(tuple(own), roots)
                pool.use(own)
                self.touch(slot.chain)
            elif known is not None and not self.mixed:
                pool.use(known.pages)
                pool.give(own)
                slot.pages[first:stop] = known.pages
        if slot.appended.min() > self.grid.end(whole):
            del slot.chain[whole:]

    def touch(self, keys: list[bytes]) -> None:
        """Marks the known blocks of a text as used, so that the longest prefixes are the first to be forgotten."""
        for key in reversed([key for key in keys if key in self.blocks]):
            self.blocks.move_to_end(key)

    def _keep(self, key: bytes, ring: tuple[Root, ...]) -> None:
        """Keeps what layers without pages hold after a text, in the place of what was used longest ago."""
        self.rings[key] = ring
        self.rings.move_to_end(key)
        if len(self.rings) > 2 * self.layers.slots:
            self.leave(self.save_ring, oldest := next(iter(self.rings)))
            del self.rings[oldest]

    def ring(self, key: bytes) -> tuple[Root, ...] | None:
        """Finds what layers without pages held after a text, if it is known."""
        if not self.layers.rings:
            return ()
        if key not in self.rings:
            wanted = tuple(empty_root(layer, whole=True) for layer in self.layers.rings)
            if (found := self._read(f"{key.hex()}-ring", wanted)) is None:
                return None
            self._keep(key, found)
        self.rings.move_to_end(key)
        return self.rings[key]

    def save(self, key: bytes) -> None:
        """Writes a block to its file, if there is a folder and the file is missing or damaged."""
        block = self.blocks[key]
        codes = lambda: tuple(codes_in(layer, block.pages) for layer in self.layers.paged)  # noqa: E731
        self._write(key.hex(), lambda: (codes(), block.roots))

    def save_ring(self, key: bytes) -> None:
        """Writes what layers without pages held, as `save` does."""
        self._write(f"{key.hex()}-ring", lambda: self.rings[key])

    def leave(self, save: Callable[[bytes], None], key: bytes) -> None:
        """Saves what is forgotten next. If that fails, as on a full disk, it will be computed again."""
        try:
            save(key)
        except (OSError, SafetensorError) as error:
            warnings.warn(f"a prefix is not kept: {error}", stacklevel=4)

    def load(self, key: bytes, pages: int, first: bool) -> tuple[Any, Any] | None:
        """Reads codes and roots of a block from its file, if it is there and whole."""
        layers = self.layers.paged
        codes = tuple(jax.eval_shape(lambda layer=layer: codes_in(layer, range(pages))) for layer in layers)
        return self._read(key.hex(), (codes, tuple(map(empty_root, layers)) if first else None))

    def _write(self, name: str, make: Callable[[], Any]) -> None:
        if self.folder is not None and (name in self.damaged or not (self.folder / name).exists()):
            treefile.save(make(), self.folder / name, packed=True, prefix=name)
            self.damaged.discard(name)

    def _read(self, name: str, like: Any) -> Any:
        if self.folder is None or not (path := self.folder / name).exists():
            return None
        try:
            found, metadata = treefile.load(path, like)
            if metadata.get("prefix") != name:
                raise ValueError(f"{path} is of another prefix")
            return found
        except (ValueError, OSError) as error:
            if path.is_file():
                self.damaged.add(name)
            warnings.warn(f"a prefix is computed again: {error}", stacklevel=5)
            return None
