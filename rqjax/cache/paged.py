"""Caches whose sequences share pages of codes: who has which page, and which prefix lies where.

Codes depend on tokens alone, not on how they were appended. So where a text is always cut at the same places, a page is
a function of the tokens up to it, and is found again by their hash (as in Kwon et al., 2023, arXiv:2309.06180, whose
pages hold keys and values as they are).
"""

import dataclasses
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
import numpy as np

from rqjax.cache.kv import KVCache
from rqjax.cache.pages import CHUNK, Grid, Root, copied_page, copied_slot, cut_slot, placed, root, size, with_codes
from rqjax.cache.prefixes import Block, Prefixes
from rqjax.core import check_int
from rqjax.scoring.tiles import PAGE


class NoRoom(ValueError):
    """All slots are in use, or too few pages are free."""


@dataclasses.dataclass
class Slot:
    """A sequence: its pages, its tokens, those of them that each layer has in codes before the window has passed them,
    and the hashes of its first pieces, each of all tokens up to the piece's end."""

    pages: list[int]
    length: int
    held: np.ndarray
    chain: list[bytes]


class PagedCache:
    """The caches of all layers, whose slots (sequences) share pages of 128 tokens, and the book of the pages.

    `caches` goes through jit: `rqjax.append` and `rqjax.attend` take it, with `slots=` for some of the sequences. The
    verbs here are for outside of jit. Pages are reserved before tokens are appended, and what `append` returns is given
    back:

      slot, found = paged.admit(prompt)
      for end in paged.pieces(found, len(prompt)):
          paged.reserve(slot, prompt[found:end])
          paged.update(append(paged.caches, k[:, found:end], v[:, found:end], slots=jnp.array([slot])))
          found = end

    Where all texts are cut by `pieces`, attention sees the same of a prefix whoever computes it, and so its keys and
    values in all layers and its pages are the same: `admit` gives them to the next text that begins so. The last whole
    piece of what is found is computed once more, for its newest tokens are to be in full precision. What is reserved
    otherwise, such as one token after the other, is not shared.

    Example:
      >>> import jax, jax.numpy as jnp, rqjax
      >>> strategy = rqjax.strategy("eden", jax.random.key(0), dim=64)
      >>> paged = rqjax.PagedCache(strategy.cache(4, 2, 2048, pages=32))  # four slots
      >>> slot, found = paged.admit(range(132))
      >>> paged.reserve(slot, range(132))
      >>> x = jnp.ones((1, 132, 2, 64))
      >>> paged.update(rqjax.append(paged.caches, x, x, slots=jnp.array([slot])))
      >>> (slot, found, paged.free_pages, paged.caches.lengths.tolist())
      (0, 0, 32, [132, 0, 0, 0])
    """

    def __init__(
        self,
        caches: KVCache | Sequence[KVCache],
        *,
        chunk: int = CHUNK,
        folder: str | os.PathLike[str] | None = None,
        seed: bytes = b"",
    ):
        """The book of empty caches.

        Args:
          caches: of `KVCache.init(..., pages=)`; or one for each layer, alike but for their quantizers.
          chunk: tokens of a piece: a multiple of 128, no less than the window and what is encoded together.
          folder: where prefixes are kept that are forgotten or that `save` writes, a file for each piece, for any
            number of processes at once; nowhere, if not given.
          seed: what pages are a function of beside tokens and quantizers, such as a digest of a model's weights.

        Raises:
          ValueError: a cache has no pages, layers differ in slots, pages, windows or sinks, or the chunk is too short.
        """
        self._single, self._stale = isinstance(caches, KVCache), False
        self._layers = layers = (caches,) if isinstance(caches, KVCache) else tuple(caches)
        shapes = [(*size(layer), layer.window, layer.sinks, layer.max_len) for layer in layers]
        if len(set(shapes)) > 1:
            raise ValueError(f"expected layers alike in pages, window, sinks and max_len, got {sorted(set(shapes))}")
        self._total, self._width, count, self._window, self._sinks, self._room = shapes[0]
        self._units = np.array([layer.unit for layer in layers])
        self.chunk, least = check_int("chunk", chunk, 1, 2**20), self._window + self._units.max()
        if chunk % PAGE or chunk < least:
            raise ValueError(f"expected a chunk that is a multiple of {PAGE} and at least {least}, got {chunk}")
        self._prefixes = Prefixes(layers, Grid(chunk, self._sinks), folder, seed)
        self._unused = list(range(count))[::-1]
        self._uses = np.zeros(count, np.int64)
        self._slots: dict[int, Slot] = {}
        self._filled: list[tuple[int, bytes, tuple[int, ...], bool]] = []

    @property
    def caches(self) -> Any:
        """As they were given: a cache, or one for each layer."""
        if self._stale:
            tables = np.full((self._total, self._width), -1, np.int32)
            for i, slot in self._slots.items():
                tables[i, : len(slot.pages)] = slot.pages
            self._layers = tuple(dataclasses.replace(layer, tables=jnp.array(tables)) for layer in self._layers)
            self._stale = False
        return self._layers[0] if self._single else self._layers

    @property
    def slots(self) -> dict[int, int]:
        """The slots in use, and how many tokens have been reserved in each."""
        return {i: slot.length for i, slot in sorted(self._slots.items())}

    @property
    def pages(self) -> int:
        """Pages in all."""
        return len(self._uses)

    @property
    def free_pages(self) -> int:
        """Pages that can be had: unused ones, and those that only wait for a text with their prefix."""
        blocks = self._prefixes.blocks.values()
        return len(self._unused) + sum(len(block.pages) for block in blocks if self._waits(block))

    def pieces(self, start: int, stop: int) -> list[int]:
        """Where pieces end of the text from token `start` to `stop`; those after the first begin with a page."""
        return self._prefixes.grid.pieces(start, stop)

    def pages_for(self, tokens: int) -> int:
        """Pages that a sequence of so many tokens takes."""
        return self._pages_of(tokens)

    def lacks(self, slot: int, length: int) -> bool:
        """Whether too few pages are free for a slot to hold `length` tokens in all."""
        s = self._slot(slot)
        return self._pages_of(length, s.held) - len(s.pages) > self.free_pages

    def admit(self, tokens: Iterable[SupportsIndex]) -> tuple[int, int]:
        """A slot for a text, with the pages of what is known of its beginning.

        Args:
          tokens: of the text.

        Returns:
          The slot, and how many tokens it holds already; those after them are to be appended.

        Raises:
          NoRoom: all slots are in use.
          ValueError: the text is longer than a slot, or takes more pages than there are.
        """
        text = _text(tokens)
        if len(text) > self._room or self._pages_of(len(text)) > self.pages:
            raise ValueError(f"{len(text)} tokens take more than the {self._room} of a slot or all {self.pages} pages")
        i, chain, found = self._free_slot(), self._prefixes.hashes(text), []
        for key in chain[1:]:  # a piece is in codes once the next one has been appended
            block = self._known(key, len(found))
            if block is None:
                break
            self._uses[list(block.pages)] += 1
            found.append(block)
        self._prefixes.touch(chain[1 : len(found) + 1])
        pages = [page for block in found for page in block.pages]
        held = PAGE * len(pages)
        length = self._sinks + held if found else 0
        self._slots[i] = Slot(pages, length, np.full_like(self._units, held), chain[: len(found)])
        self._place(i, length, held, found[0].roots if found else None)
        return i, length

    def reserve(self, slot: int, tokens: Iterable[SupportsIndex] | int) -> None:
        """Pages for tokens that are appended to a slot next, all in one call.

        Args:
          slot: of `admit` or `fork`.
          tokens: what they are, so that a whole piece of `pieces` may be shared; or how many.

        Raises:
          NoRoom: too few pages are free; nothing has changed.
          ValueError: the slot is not in use, or is too short for so many tokens.
        """
        s, text = self._slot(slot), None if isinstance(tokens, int) else _text(tokens)
        length = s.length + (tokens if text is None else len(text))  # pyright: ignore[reportOperatorIssue]
        if length > self._room:
            raise ValueError(f"slot {slot} has room for {self._room} tokens, not for {length}")
        s.pages += self._taken(self._pages_of(length, s.held) - len(s.pages))
        known, grid = len(s.chain), self._prefixes.grid
        if text is not None and (s.length, length) == (grid.end(known), grid.end(known + 1)):
            s.chain.append(self._prefixes.hashed(s.chain, text))
            if known:
                pages = s.pages[grid.pages(known - 1) : grid.pages(known)]
                self._filled.append((slot, s.chain[-1], tuple(pages), known == 1))
        s.length = length

    def update(self, caches: Any) -> None:
        """Takes back the caches to which what was reserved has been appended."""
        self._layers = (caches,) if self._single else tuple(caches)
        for slot, key, pages, first in self._filled:
            if key not in self._prefixes.blocks:
                self._prefixes.blocks[key] = Block(
                    pages, tuple(root(layer, slot) for layer in self._layers) if first else None
                )
                self._uses[list(pages)] += 1
        self._filled = []

    def fork(self, slot: int) -> int:
        """A slot with the same tokens. Whole pages are shared, the others copied, for either may go on in its own way.

        Raises:
          NoRoom: all slots are in use, or too few pages are free; nothing has changed.
          ValueError: the slot is not in use.
        """
        s, i = self._slot(slot), self._free_slot()
        shared = int(self._coded(s.length, s.held).min()) // PAGE
        copies = self._taken(len(s.pages) - shared)
        self._uses[s.pages[:shared]] += 1
        self._slots[i] = Slot(s.pages[:shared] + copies, s.length, s.held.copy(), [*s.chain])
        self._each(copied_slot, slot, i)
        self._stale = True  # the table was copied, too
        self._copy(s.pages[shared:], copies)
        return i

    def truncate(self, slot: int, length: int) -> None:
        """The slot with its first `length` tokens only, as `rqjax.truncate`; pages that they do not take are free.

        Raises:
          NoRoom: others share the last page, and none is free to copy it to; nothing has changed.
          ValueError: the slot is not in use, or has fewer tokens.
        """
        s, length = self._slot(slot), check_int("length", length, 0, self._slot(slot).length)
        whole = np.maximum(length - self._sinks, 0) // self._units * self._units
        held = np.minimum(self._coded(s.length, s.held), whole)
        count, partial = -(-int(held.max()) // PAGE), bool((held % PAGE).any())
        copied = count - 1 if partial and self._uses[s.pages[count - 1]] > 1 else count
        copies = self._taken(count - copied)
        self._each(cut_slot, slot, length)
        self._copy(s.pages[copied:count], copies)
        self._give(s.pages[copied:])
        s.pages, s.length, s.held = s.pages[:copied] + copies, length, held
        s.chain = [key for n, key in enumerate(s.chain, 1) if self._prefixes.grid.end(n) <= length]

    def release(self, slot: int) -> None:
        """Gives a slot back, and the pages that nobody else needs.

        Raises:
          ValueError: the slot is not in use.
        """
        self._give(self._slot(slot).pages)
        self._filled = [filled for filled in self._filled if filled[0] != slot]
        del self._slots[slot]
        self._place(slot, 0, 0, None)

    def evict(self, pages: int) -> None:
        """Forgets prefixes, the least recently used first, until so many pages are unused.

        Raises:
          NoRoom: slots in use hold too many; nothing has changed.
        """
        if pages > self.free_pages:
            raise NoRoom(f"{self.free_pages} of {self.pages} pages are free, not {pages}")
        for key in [key for key, block in self._prefixes.blocks.items() if self._waits(block)]:
            if len(self._unused) >= pages:
                break
            self._prefixes.save(key, self._layers)
            self._give(self._prefixes.blocks.pop(key).pages)

    def save(self) -> None:
        """Writes all prefixes that are known to the folder.

        Raises:
          ValueError: there is no folder.
        """
        if self._prefixes.folder is None:
            raise ValueError("expected PagedCache(..., folder=) to save to, got none")
        for key in self._prefixes.blocks:
            self._prefixes.save(key, self._layers)

    def _known(self, key: bytes, before: int) -> Block | None:
        """The pages of a piece, after a number of others; from its file if need be and if there are pages for it."""
        prefixes = self._prefixes
        if key not in prefixes.blocks:
            count = prefixes.grid.pages(before + 1) - prefixes.grid.pages(before)
            loaded = None if count > self.free_pages else prefixes.load(key, self._layers, count, before == 0)
            if loaded is None:
                return None
            pages = self._taken(count)
            at, parts = np.asarray(pages, np.int32), zip(self._layers, loaded[0], strict=True)
            self._layers = tuple(with_codes(layer, at, codes) for layer, codes in parts)
            prefixes.blocks[key] = Block(tuple(pages), loaded[1])
        return prefixes.blocks[key]

    def _slot(self, slot: int) -> Slot:
        if slot not in self._slots:
            raise ValueError(f"slot {slot} is not in use: expected one of {sorted(self._slots)}")
        return self._slots[slot]

    def _free_slot(self) -> int:
        for i in range(self._total):
            if i not in self._slots:
                return i
        raise NoRoom(f"all {self._total} slots are in use")

    def _coded(self, length: int, held: Any) -> np.ndarray:
        """Tokens of a sequence that each layer has in codes."""
        passed = max(length - self._sinks - self._window, 0)
        return np.maximum(passed // self._units * self._units, held)

    def _pages_of(self, length: int, held: Any = 0) -> int:
        return -(-int(self._coded(length, held).max()) // PAGE)

    def _waits(self, block: Block) -> bool:
        """Whether no slot has its pages."""
        return bool((self._uses[list(block.pages)] == 1).all())

    def _taken(self, count: int) -> list[int]:
        """Pages that were unused."""
        self.evict(count)
        pages = [self._unused.pop() for _ in range(count)]
        self._uses[pages] += 1
        self._stale |= count > 0
        return pages

    def _give(self, pages: Iterable[int]) -> None:
        """Pages back that somebody used."""
        for page in pages:
            self._uses[page] -= 1
            if self._uses[page] == 0:
                self._unused.append(page)
        self._stale = True

    def _place(self, slot: int, length: int, held: int, roots: tuple[Root, ...] | None) -> None:
        """Begins a slot, with what is known of its beginning."""
        self._stale = True
        roots = roots or tuple(jax.tree.map(np.zeros_like, root(layer, slot)) for layer in self._layers)
        parts = zip(self._layers, roots, strict=True)
        self._layers = tuple(placed(layer, root, *map(np.int32, (slot, length, held))) for layer, root in parts)

    def _copy(self, pages: Sequence[int], to: Sequence[int]) -> None:
        for page, copy in zip(pages, to, strict=True):
            self._each(copied_page, page, copy)

    def _each(self, function: Callable[..., KVCache], *numbers: int) -> None:
        """What a function makes of each layer, with its tables as they are now."""
        _ = self.caches
        self._layers = tuple(function(layer, *map(np.int32, numbers)) for layer in self._layers)


def _text(tokens: Iterable[SupportsIndex]) -> np.ndarray:
    return np.asarray(tokens if isinstance(tokens, np.ndarray | jax.Array) else list(tokens), np.int64)
