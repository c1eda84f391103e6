"""Operations of a paged cache on slots and pages of the device, and the cuts of texts by which pages can be shared."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from rqjax.arrays.planes import put
from rqjax.cache.kv import KVCache, over
from rqjax.cache.requantize import requantize
from rqjax.cache.strategy import Strategy
from rqjax.cache.truncate import truncate
from rqjax.core import PAGE, check_int, check_text, treefile
from rqjax.core.mesh import fetched

CHUNK = 128
"""Tokens of a piece of text that may be shared."""
Root: TypeAlias = tuple[Array | np.ndarray, ...]
"""Part of a text that slots hold, not pages: keys and values of the sinks, and the mean key if it is learned. Layers
that keep a window alone have all of it there."""


class NoRoom(ValueError):
    """Error where all slots are in use, or too few pages are free."""


@dataclasses.dataclass
class Slot:
    """A sequence of `length` tokens. Each layer has those that were `appended`; the others are reserved. `held` tokens
    are in codes although the window has not passed them. `chain` has hashes of all whole pieces. `marks` are numbers of
    pieces after which layers without pages are kept for other texts."""

    pages: list[int]
    length: int
    appended: np.ndarray
    held: np.ndarray
    chain: list[bytes]
    marks: frozenset[int] = frozenset()


class Grid(NamedTuple):
    """Cuts of texts: a piece of `chunk` tokens begins with a page, and the first piece ends with one."""

    chunk: int
    sinks: int

    def end(self, pieces: int) -> int:
        """Token at which a number of whole pieces end."""
        return pieces and self.chunk - -self.sinks % PAGE + (pieces - 1) * self.chunk

    def whole(self, lengths: int | np.ndarray) -> int:
        """Whole pieces in so many tokens of each layer."""
        return (int(np.min(lengths)) - self.end(1)) // self.chunk + 1

    def pages(self, pieces: int) -> int:
        """Pages that hold the codes of a number of whole pieces."""
        return pieces and (self.end(pieces) - self.sinks) // PAGE

    def pieces(self, start: int, stop: int) -> list[int]:
        """Ends of the pieces of the text from token `start` to `stop`."""
        ends = [end for end in range(self.end(1), stop, self.chunk) if end > start]
        return [*ends, stop] if stop > start else []


class Pool:
    """Counts of how often each page is in use: once by each slot and each known prefix that has it."""

    def __init__(self, count: int):
        self.unused = list(range(count))[::-1]
        self.uses = np.zeros(count, np.int64)

    def take(self, count: int) -> list[int]:
        """Takes unused pages."""
        pages = [self.unused.pop() for _ in range(count)]
        self.use(pages)
        return pages

    def grow(self, count: int) -> None:
        """Grows to `count` pages."""
        self.unused += range(len(self.uses), count)
        self.uses = np.pad(self.uses, (0, count - len(self.uses)))

    def use(self, pages: Sequence[int]) -> None:
        self.uses[list(pages)] += 1

    def give(self, pages: Sequence[int]) -> None:
        """Gives pages back that were in use."""
        self.uses[list(pages)] -= 1
        self.unused += [page for page in pages if not self.uses[page]]

    def once(self, pages: Sequence[int]) -> bool:
        """Returns whether each is in use once."""
        return bool((self.uses[list(pages)] == 1).all())


class Layers:
    """The caches of all layers on the device, alike but for their quantizers. Those that keep a window alone have no
    pages."""

    def __init__(self, caches: KVCache | Sequence[KVCache]):
        self.single = isinstance(caches, KVCache)
        self.all = (caches,) if isinstance(caches, KVCache) else tuple(caches)
        self.in_pages = np.array([not layer.sliding_window for layer in self.all])
        if not self.in_pages.any():
            raise ValueError("expected a layer with pages, got layers that keep a window of tokens alone")
        widths, pages = zip(*map(_size, self.paged), strict=True)
        sizes = [*zip(pages, (layer.window for layer in self.paged), strict=True)]
        shapes = [(len(layer.lengths), layer.sinks, layer.max_len) for layer in self.all]
        if len(set(sizes)) > 1 or len(set(shapes)) > 1:
            got = sorted({(*size, *shape) for size, shape in zip(sizes, shapes, strict=False)})
            raise ValueError(f"expected layers alike in pages, window, sinks and max_len, got {got}")
        (self.pages, self.window), (self.slots, self.sinks, self.max_len) = sizes[0], shapes[0]
        self.lag = int(self.window > 0)
        """Pieces that come after a piece before all of it is in codes."""
        self.width = max(widths)
        """Most pages of a slot: layers that encode more tokens together may have fewer."""
        self.units, self.windows = (np.array([getattr(x, name) for x in self.all]) for name in ("unit", "window"))
        self.learned = max((x.sinks + x.window + x.unit for x in self.paged if x.key_form.learned), default=0)
        """Tokens that decide the mean of all keys of a text in codes."""

    @property
    def paged(self) -> list[KVCache]:
        """Layers with pages."""
        return [layer for layer in self.all if not layer.sliding_window]

    @property
    def rings(self) -> list[KVCache]:
        """Layers that keep a window alone."""
        return [layer for layer in self.all if layer.sliding_window]

    @property
    def caches(self) -> Any:
        """Caches as they were given."""
        return self.all[0] if self.single else self.all

    def grid(self, chunk: int) -> Grid:
        """Makes the cuts of texts for these layers."""
        chunk, least = check_int("chunk", chunk, 1, 2**20), max(self.window, self.sinks)
        if chunk % PAGE or chunk < least:
            raise ValueError(f"expected a chunk that is a multiple of {PAGE} and at least {least}, got {chunk}")
        return Grid(chunk, self.sinks)

    def update(self, caches: Any, slots: dict[int, Slot]) -> None:
        """Takes caches back, and counts the tokens appended to each slot in use. Tokens of other slots are dropped."""
        layers = tuple(jax.tree.leaves(caches, is_leaf=lambda x: isinstance(x, KVCache)))
        if len(layers) != len(self.all) or not all(isinstance(layer, KVCache) for layer in layers):
            raise ValueError(f"expected as many caches as layers, {len(self.all)}, got {len(layers)}")
        for layer in layers:
            layer.lengths.copy_to_host_async()  # so that one wait is for all
        lengths = np.stack([fetched(layer.lengths) for layer in layers], axis=1)
        for i, s in slots.items():
            if ((lengths[i] < s.appended) | (lengths[i] > s.length)).any():
                wanted, got = f"{s.appended.max()} tokens, or up to {s.length} as reserved", lengths[i].tolist()
                raise ValueError(f"expected slot {i} to have {wanted}, got {got}")
        self.all = layers
        for i, s in slots.items():
            s.appended = lengths[i]
        for i in {*np.flatnonzero(lengths.any(1)).tolist()} - {*slots}:
            self.begin(i, 0, 0)

    def coded(self, length: Any, held: Any) -> np.ndarray:
        """Tokens of a sequence that each layer has in codes, or has forgotten; some are `held` in any case."""
        passed = np.maximum(length - self.sinks - self.windows, 0)
        return np.maximum(passed // self.units * self.units, held)

    def filled(self, coded: np.ndarray) -> tuple[int, int]:
        """Pages that tokens in codes fill in each layer, and those that they begin in some layer."""
        coded = coded[self.in_pages]
        return int(coded.min()) // PAGE, -(-int(coded.max()) // PAGE)

    def remembers(self, coded: np.ndarray, length: int) -> bool:
        """Tells whether layers that keep a window alone hold what the tokens before `length` may see."""
        seen = np.array([length - self.sinks - (layer.sliding_window or 0) for layer in self.all])
        return length <= self.sinks or not (coded > np.maximum(seen, 0))[~self.in_pages].any()

    def each(self, function: Callable[..., KVCache], *numbers: int) -> None:
        """Applies a function to each layer."""
        self.all = tuple(function(layer, *map(np.int32, numbers)) for layer in self.all)

    def each_paged(self, function: Callable[..., KVCache], *arguments: Iterable[Any]) -> None:
        """Applies a function to each layer with pages, and to its own of each of the arguments."""
        made = iter([function(*each) for each in zip(self.paged, *arguments, strict=True)])
        self.all = tuple(layer if layer.sliding_window else next(made) for layer in self.all)

    def tell(self, tables: np.ndarray) -> None:
        """Tells the layers the pages of each slot."""
        own = lambda layer: jnp.array(tables[:, : layer.tables.shape[1]])  # noqa: E731
        self.each_paged(lambda layer: dataclasses.replace(layer, tables=own(layer)))

    def begin(
        self,
        slot: int,
        length: int,
        held: int,
        roots: Iterable[Root] | None = None,
        rings: Iterable[Root] | None = None,
    ) -> None:
        """Begins a slot with `length` tokens, and what slots hold of its known prefix in layers with and without
        pages."""
        of_paged, of_rings = iter(roots or map(empty_root, self.paged)), iter(rings or map(empty_root, self.rings))

        def begun(layer: KVCache) -> KVCache:
            found, own = (next(of_rings), 0) if layer.sliding_window else (next(of_paged), held)
            return _placed(layer, found, *map(np.int32, (slot, length, own)))

        self.all = tuple(map(begun, self.all))

    def requantize(self, strategies: Sequence[Strategy], pages: int) -> None:
        """Encodes codes again by other quantizers, a layer at a time, so that the codes of but one are held twice."""
        if len(strategies) != len(self.all):
            raise ValueError(f"expected {len(self.all)} strategies, one a layer, got {len(strategies)}")
        anew = functools.partial(requantize, pages=pages)
        jax.eval_shape(lambda: tuple(map(anew, self.all, strategies)))  # so that nothing changes if one does not fit
        for i, strategy in enumerate(strategies):
            self.all = (*self.all[:i], anew(self.all[i], strategy), *self.all[i + 1 :])
        self.pages = pages

    def copy(self, pages: Sequence[int], to: Sequence[int]) -> None:
        for page, copy in zip(pages, to, strict=True):
            self.each_paged(lambda layer, page=page, copy=copy: _copied_page(layer, np.int32(page), np.int32(copy)))

    def fill(self, pages: Sequence[int], codes: Any) -> None:
        at = np.asarray(pages, np.int32)
        self.each_paged(lambda layer, new: _with_codes(layer, at, new), codes)


def _size(cache: KVCache) -> tuple[int, int]:
    """Pages that a slot may have, and pages in all."""
    if cache.tables is None:
        raise ValueError("expected caches with pages: KVCache.init(..., pages=)")
    return cache.tables.shape[1], jax.tree.leaves(cache.keys)[0].shape[0]


def root(cache: KVCache, slot: int) -> Root:
    count = None if cache.sliding_window else cache.sinks
    exact = (fetched(x[slot, :, :count]) for x in (cache.exact_keys, cache.exact_values))
    form = cache.key_form
    return (*exact, fetched(form.mean[slot])) if form.learned else (*exact,)


def empty_root(cache: KVCache, *, whole: bool = False) -> Root:
    """Zeros in the form of a `root`, which itself would wait for the device; of the sinks alone unless `whole`."""
    _, heads, slots, dim = cache.exact_keys.shape
    keys = np.zeros((heads, slots if whole else cache.sinks, dim), cache.exact_keys.dtype)
    exact = keys, keys[..., : cache.exact_values.shape[3]]
    return (*exact, np.zeros((heads, dim), np.float32)) if cache.key_form.learned else exact


def digest(layers: Sequence[KVCache]) -> str:
    """Hash of caches: equal if their codes mean the same."""
    names = ("key_quantizer", "own_value_quantizer", "window", "sinks", "sliding_window")
    exact = [layer.exact_keys[0, :, :0] for layer in layers]  # no tokens, but their dtype before encoding
    forms = [layer.key_form for layer in layers]
    forms = [f if f.mean is None else f.changed(mean=None if f.learned else f.mean[0]) for f in forms]
    return treefile.digest([[{name: getattr(layer, name) for name in names} for layer in layers], forms, exact])


def codes_in(cache: KVCache, pages: Iterable[int]) -> Any:
    """Codes of keys and of values in some pages."""
    at = np.asarray(list(pages), np.int32)
    return over(lambda leaf: dataclasses.replace(leaf, bits=leaf.bits[at]), (cache.keys, cache.values))


in_place = functools.partial(jax.jit, donate_argnums=0)


@in_place
def _placed(cache: KVCache, root: Root, slot: Array, length: Array, held: Array) -> KVCache:
    exact = cache.exact_keys, cache.exact_values
    exact = [
        put(x, (slot, slice(None), slice(new.shape[1])), jnp.asarray(new))
        for x, new in zip(exact, root[:2], strict=True)
    ]
    form = cache.key_form
    if form.learned:
        form = form.changed(mean=form.mean.at[slot].set(root[2]))
    return dataclasses.replace(
        cache,
        exact_keys=exact[0],
        exact_values=exact[1],
        key_form=form,
        lengths=cache.lengths.at[slot].set(length),
        held=cache.held.at[slot].set(held),
        overflow=cache.overflow.at[slot].set(False),
    )


@in_place
def copied_slot(cache: KVCache, slot: Array, to: Array) -> KVCache:
    return cache.with_sequences(to[None], cache.of(slot[None]))


@in_place
def cut_slot(cache: KVCache, slot: Array, length: Array) -> KVCache:
    cache = dataclasses.replace(cache, overflow=cache.overflow.at[slot].set(False))
    return truncate(cache, length[None], slots=slot[None])


@in_place
def _with_codes(cache: KVCache, pages: Array, codes: Any) -> KVCache:
    filled = lambda old, new: dataclasses.replace(old, bits=old.bits.at[pages].set(new.bits))  # noqa: E731
    keys, values = over(filled, (cache.keys, cache.values), codes)
    return dataclasses.replace(cache, keys=keys, values=values)


@in_place
def _copied_page(cache: KVCache, page: Array, to: Array) -> KVCache:
    copied = lambda codes: over(  # noqa: E731
        lambda leaf: dataclasses.replace(leaf, bits=leaf.bits.at[to].set(leaf.bits[page])), codes
    )
    return dataclasses.replace(cache, keys=copied(cache.keys), values=copied(cache.values))


def as_text(tokens: Any) -> np.ndarray:
    return check_text(tokens).astype(np.int64)
