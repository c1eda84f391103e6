"""Caches whose sequences share pages of codes: the owners of pages, and the places of prefixes.

Codes depend on tokens alone, not on how they were appended. If texts are always cut at the same places, a page is a
function of the tokens up to it, and their hash finds it again. (Pages: Kwon et al., 2023, arXiv:2309.06180.)
"""

import collections
import os
from collections.abc import Iterable, Sequence
from typing import Any, SupportsIndex

import numpy as np

from rqjax.cache.kv import KVCache
from rqjax.cache.strategy import Strategy
from rqjax.core import PAGE, check_int
from rqjax.paging.pages import CHUNK, Layers, NoRoom, Pool, Slot, as_text, copied_slot, cut_slot
from rqjax.paging.prefixes import Block, Prefixes


class PagedCache:
    """The caches of all layers, whose slots (sequences) share pages of 128 tokens, and the book of the pages.

    `caches` goes through jit: `rqjax.append` and `rqjax.attend` take it, with `slots=` for some of the sequences. The
    methods here run outside jit. Pages are reserved before tokens are appended, and the result of `append` is given
    back:

      slot, found = paged.admit(prompt)
      for end in paged.pieces(found, len(prompt)):
          paged.reserve(slot, prompt[found:end])
          paged.update(append(paged.caches, k[:, found:end], v[:, found:end], slots=jnp.array([slot])))
          found = end

    If all texts are cut by `pieces`, a prefix has the same keys, values and pages in all layers whoever computes it.
    `admit` then gives them to the next text with this prefix. Unless the window is 0, the last whole piece that is
    known is computed once more, since its newest tokens are to be in full precision. Tokens that are reserved
    otherwise, such as one after the other, are not shared. With layers that keep a window alone, a prefix is found up
    to where an earlier prompt ended, or two texts parted.

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
        """Makes the book of empty caches.

        Args:
          caches: a cache of `KVCache.init(..., pages=)`, or one for each layer, alike but for their quantizers. Some
            may keep a window alone (`sliding_window=`).
          chunk: tokens of a piece: a multiple of 128, at least the window and the sinks.
          folder: where prefixes are kept that are forgotten or that `save` writes, a file for each piece, for any
            number of processes at once; nowhere, if not given.
          seed: anything else that pages depend on beside tokens and quantizers, as a digest of a model's weights.

        Raises:
          ValueError: a cache has no pages, layers differ in slots, pages, windows or sinks, or the chunk is too short.
        """
        self._layers, self._stale = Layers(caches), False
        self._prefixes = Prefixes(self._layers, self._layers.grid(chunk), folder, seed)
        self.chunk = self._prefixes.grid.chunk
        self._pool = Pool(self._layers.pages)
        self._slots: dict[int, Slot] = {}

    @property
    def caches(self) -> Any:
        """Caches as they were given: one, or one for each layer."""
        self._told()
        return self._layers.caches

    def _told(self) -> None:
        """Tells the layers which pages slots have."""
        if self._stale:
            tables = np.full((self._layers.slots, self._layers.width), -1, np.int32)
            for i, slot in self._slots.items():
                tables[i, : len(slot.pages)] = slot.pages
            self._layers.tell(tables)
            self._stale = False

    @property
    def pages(self) -> int:
        """Number of pages, used and unused."""
        return self._layers.pages

    @property
    def slots(self) -> dict[int, int]:
        """Slots in use, and how many tokens have been reserved in each."""
        return {i: slot.length for i, slot in sorted(self._slots.items())}

    @property
    def free_pages(self) -> int:
        """Pages that can be had: unused ones, and those that only wait for a text with their prefix."""
        return len(self._pool.unused) + len(self._waiting())

    def pieces(self, start: int, stop: int) -> list[int]:
        """Ends of the pieces of the text from token `start` to `stop`; those after the first begin with a page."""
        return self._prefixes.grid.pieces(start, stop)

    def pages_for(self, tokens: int, held: Any = 0) -> int:
        """Pages that a sequence of so many tokens takes, of which `held` are in codes in any case."""
        return self._layers.filled(self._layers.coded(tokens, held))[1]

    def missing(self, slot: int, length: int) -> int:
        """Pages that a slot still lacks for `length` tokens in all."""
        return max(0, self.pages_for(length, self._slot(slot).held) - len(self._slot(slot).pages))

    def admit(self, tokens: Iterable[SupportsIndex]) -> tuple[int, int]:
        """Takes a slot for a text, with the pages of its known prefix.

        Args:
          tokens: tokens of the text.

        Returns:
          The slot, and how many tokens it holds already; those after them are to be appended.

        Raises:
          NoRoom: all slots are in use.
          ValueError: the text is longer than a slot, or takes more pages than there are.
        """
        text = as_text(tokens)
        if len(text) > self._layers.max_len or self.pages_for(len(text)) > self.pages:
            most = f"the {self._layers.max_len} of a slot or all {self.pages} pages"
            raise ValueError(f"{len(text)} tokens take more than {most}")
        i, found, lag = self._free_slot(), [], self._layers.lag
        chain = self._prefixes.hashes(text[: len(text) - 1 + lag])  # a token at least is to be computed
        keys = chain[lag:]
        self._prefixes.touch(keys)
        for key in keys:
            block = self._known(key, len(found))
            if block is None:
                break
            self._pool.use(block.pages)
            found.append(block)
        if found and not found[-1].pages:
            found.pop()
        known, rings = len(found), None
        while found and (rings := self._prefixes.ring(chain[len(found) - 1])) is None:
            self._pool.give(found.pop().pages)
        self._prefixes.touch(keys)
        pages = [page for block in found for page in block.pages]
        held = PAGE * len(pages)
        length = self._layers.sinks + held if found else 0
        appended, coded = np.full_like(self._layers.units, length), np.where(self._layers.in_pages, held, 0)
        marks = [n for n in (known, len(keys)) if self._layers.rings and self._prefixes.grid.pages(n)]
        self._slots[i] = Slot(pages, length, appended, coded, chain[: len(found)], frozenset(marks))
        self._stale = True
        roots = next((block.roots for block in found if block.roots), None)
        self._layers.begin(i, length, held, roots, rings)
        return i, length

    def reserve(self, slot: int, tokens: Iterable[SupportsIndex] | int) -> None:
        """Reserves pages for tokens that are appended to a slot next, all in one call. If they do not come, `truncate`
        to the tokens before gives the pages back.

        Args:
          slot: slot that `admit` or `fork` returned.
          tokens: the tokens, so that a whole piece of `pieces` may be shared; or their number.

        Raises:
          NoRoom: too few pages are free; nothing has changed.
          ValueError: the slot is not in use, or is too short for so many tokens.
        """
        s, text = self._slot(slot), None if isinstance(tokens, int | np.integer) else as_text(tokens)
        length = s.length + (check_int("tokens", tokens, 0, 2**30) if text is None else len(text))
        if length > self._layers.max_len:
            raise ValueError(f"slot {slot} has room for {self._layers.max_len} tokens, not for {length}")
        s.pages += self._taken(self.pages_for(length, s.held) - len(s.pages))
        known, grid = len(s.chain), self._prefixes.grid
        if text is not None and (s.length, length) == (grid.end(known), grid.end(known + 1)):
            s.chain.append(self._prefixes.hashed(s.chain, text))
        s.length = length

    def update(self, caches: Any) -> None:
        """Takes back the caches after the reserved tokens have been appended. Pieces that are whole now are shared.

        Raises:
          ValueError: a slot has fewer tokens than before or more than were reserved, as in caches from before another
            verb; nothing has changed.
        """
        before = [(i, s, s.appended, [*s.pages]) for i, s in self._slots.items()]
        self._layers.update(caches, self._slots)
        for i, s, appended, pages in before:
            self._prefixes.add(i, s, appended, self._pool)
            self._stale |= s.pages != pages

    def fork(self, slot: int) -> int:
        """Copies a slot with the tokens that have been appended. Whole pages are shared, the others copied, so that
        each slot goes on in its own way.

        Raises:
          NoRoom: all slots are in use, or too few pages are free; nothing has changed.
          ValueError: the slot is not in use.
        """
        s, i = self._slot(slot), self._free_slot()
        shared, last = self._layers.filled(self._layers.coded(s.appended, s.held))
        copies = self._taken(last - shared)
        self._pool.use(s.pages[:shared])
        chain = s.chain[: self._prefixes.grid.whole(s.appended)]
        self._slots[i] = Slot(s.pages[:shared] + copies, int(s.appended.max()), s.appended, s.held, chain)
        self._stale = True
        self._layers.each(copied_slot, slot, i)
        self._layers.copy(s.pages[shared:last], copies)
        return i

    def truncate(self, slot: int, length: int) -> None:
        """Keeps the first `length` tokens of a slot, as `rqjax.truncate`. Pages that they do not take are free, and
        those that were reserved beyond are given back.

        Raises:
          NoRoom: others share the last page, and none is free to copy it to; nothing has changed.
          ValueError: the slot is not in use, has fewer tokens, or has forgotten what these see.
        """
        s, length = self._slot(slot), check_int("length", length, 0, self._slot(slot).length)
        whole = np.maximum(length - self._layers.sinks, 0) // self._layers.units * self._layers.units
        coded = self._layers.coded(s.appended, s.held)
        if not self._layers.remembers(coded, length):
            raise ValueError(f"slot {slot} has forgotten what {length} tokens see, of {s.length}")
        held = np.minimum(coded, whole)
        first, last = self._layers.filled(held)
        first = last if self._pool.once(s.pages[first:last]) else first
        copies, count = self._taken(last - first), self.pages_for(length, held)
        self._told()
        self._layers.each(cut_slot, slot, length)
        self._layers.copy(s.pages[first:last], copies)
        self._pool.give(s.pages[first:last] + s.pages[count:])
        self._stale = True
        # Codes that stay may be relative to a mean of tokens that do not: no other text finds them.
        kept = 0 if length < self._layers.learned and held.any() else self._prefixes.grid.whole(length)
        s.pages, s.chain = s.pages[:first] + copies + s.pages[last:count], s.chain[:kept]
        s.length, s.appended, s.held = length, np.minimum(s.appended, length), held

    def release(self, slot: int) -> None:
        """Gives a slot back, and the pages that nobody else needs.

        Raises:
          ValueError: the slot is not in use.
        """
        self._pool.give(self._slot(slot).pages)
        del self._slots[slot]
        self._stale = True
        self._layers.begin(slot, 0, 0)

    def evict(self, pages: int) -> None:
        """Forgets prefixes, the least recently used first, until so many pages are unused.

        Raises:
          NoRoom: slots in use hold too many; nothing has changed.
        """
        if pages <= len(self._pool.unused):  # as for each token that begins no page
            return
        if pages > self.free_pages:
            raise NoRoom(f"{self.free_pages} of {self.pages} pages are free, not {pages}")
        waiting = self._waiting()
        keys = (key for key, block in [*self._prefixes.blocks.items()] if not waiting.isdisjoint(block.pages))
        while len(self._pool.unused) < pages:
            key = next(keys)
            self._prefixes.leave(self._prefixes.save, key)
            self._pool.give(self._prefixes.blocks.pop(key).pages)

    def requantize(self, strategies: Strategy | Sequence[Strategy], pages: int) -> None:
        """Encodes all codes again by other quantizers, as `rqjax.requantize` does. The folder is no longer used, since
        its codes are encoded once."""
        self._layers.requantize([strategies] if isinstance(strategies, Strategy) else strategies, pages)
        self._pool.grow(pages)
        self._prefixes.folder, self._prefixes.mixed = None, True

    def save(self) -> None:
        """Writes all known prefixes to the folder.

        Raises:
          ValueError: there is no folder.
        """
        if self._prefixes.folder is None:
            raise ValueError("expected a PagedCache with a folder to save to, got none")
        for key in self._prefixes.blocks:
            self._prefixes.save(key)
        for key in self._prefixes.rings:
            self._prefixes.save_ring(key)

    def forget(self, seed: bytes) -> None:
        """Forgets all prefixes in memory, as those of other weights. Slots keep their tokens, of which no more are
        shared. From now on prefixes are those of this seed, in the same folder."""
        for block in self._prefixes.blocks.values():
            self._pool.give(block.pages)
        self._prefixes = Prefixes(self._layers, self._prefixes.grid, self._prefixes.folder, seed)
        for s in self._slots.values():
            s.chain, s.marks = [], frozenset()

    def _known(self, key: bytes, before: int) -> Block | None:
        """Finds the pages of a piece after `before` others, if need be in its file and if there are pages for it."""
        prefixes = self._prefixes
        count = prefixes.grid.pages(before + 1) - prefixes.grid.pages(before)
        if not count:  # of the sinks alone
            return Block((), None)
        if key not in prefixes.blocks:
            loaded = None if count > self.free_pages else prefixes.load(key, count, not prefixes.grid.pages(before))
            if loaded is None:
                return None
            pages = self._taken(count)
            self._layers.fill(pages, loaded[0])
            prefixes.blocks[key] = Block(tuple(pages), loaded[1])
        return prefixes.blocks[key]

    def _waiting(self) -> set[int]:
        """Pages that are in use by prefixes alone."""
        named = collections.Counter(page for block in self._prefixes.blocks.values() for page in block.pages)
        return {page for page, count in named.items() if self._pool.uses[page] == count}

    def _slot(self, slot: int) -> Slot:
        if slot not in self._slots:
            raise ValueError(f"slot {slot} is not in use: expected one of {sorted(self._slots)}")
        return self._slots[slot]

    def _free_slot(self) -> int:
        free = [i for i in range(self._layers.slots) if i not in self._slots]
        if not free:
            raise NoRoom(f"all {self._layers.slots} slots are in use")
        return free[0]

    def _taken(self, count: int) -> list[int]:
        """Takes unused pages."""
        self.evict(count)
        self._stale |= count > 0
        return self._pool.take(count)
