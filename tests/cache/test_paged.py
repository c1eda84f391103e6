"""Pages against caches in which each sequence has room of its own; the book of pages; cuts."""

import collections
import contextlib
import dataclasses
import multiprocessing

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import rqjax
from rqjax.cache.kv import over
from rqjax.cache.pages import NoRoom
from rqjax.core import treefile
from rqjax.scoring import tiles
from tests.tools.plain import error
from tests.tools.suites import some

HEADS, DIM, SLOTS, PAGES, LONG, CHUNK = 2, 32, 3, 8, 640, 128
RNG = np.random.default_rng(0)
KEYS, VALUES = RNG.standard_normal((2, 1000, HEADS, DIM)).astype(np.float32)
TEXTS = RNG.integers(0, 1000, (2, LONG))
append = jax.jit(
    lambda cache, k, v, **options: rqjax.append(cache, k, None if cache.latent else v, **options), donate_argnums=0
)
attend = jax.jit(rqjax.attend)
truncate = jax.jit(rqjax.truncate)
copied = jax.jit(lambda cache: jax.tree.map(jnp.copy, cache))


def cache(batch, pages=None, name="eden_3+centered", window=16, sinks=2, latent=None, **options):
    strategy = rqjax.strategy(name, jax.random.key(0), DIM, latent=latent)
    rope = rqjax.Rope(1e4, share=1.0 if latent is None else 1 - latent / DIM)
    options = {"rope": rope, "dtype": jnp.float32, **options}
    return strategy.cache(batch, HEADS, LONG, window=window, sinks=sinks, pages=pages, **options)


def padded(tokens, size=CHUNK):
    """Keys and values of tokens, (1, size, heads, dim), and how many there are."""
    rows = np.pad(np.asarray(tokens, int), (size - len(tokens), 0))
    return KEYS[rows][None], VALUES[rows][None], jnp.array([len(tokens)])


def grown(paged, slot, text, size=CHUNK):
    """Appends text to a slot, in one piece."""
    paged.reserve(slot, text)
    k, v, valid = padded(text, size)
    paged.update(append(paged.caches, k, v, valid=valid, slots=jnp.array([slot])))


@jax.jit
def rows(cache, slot):
    """All codes of a sequence."""

    def leaf(x):
        if cache.tables is None:
            x = dataclasses.replace(x, bits=jax.lax.dynamic_slice_in_dim(x.bits, slot, 1))
        return x.read(0, cache.capacity, None if cache.tables is None else cache.tables[slot][None])

    return over(leaf, (cache.keys, cache.values))


def read(cache, slot):
    """The codes of a sequence, and what else is known of it."""
    coded = int(cache.coded[slot])
    leaves = jax.tree.leaves((cache.keys, cache.values), is_leaf=tiles.is_token_array)
    found = zip(leaves, jax.tree.leaves(rows(cache, slot)), strict=True)
    codes = [np.take(np.asarray(x), range(coded // leaf.tokens_per_entry), axis=leaf.axis) for leaf, x in found]
    mean = [] if cache.key_mean is None else [np.asarray(cache.key_mean[slot])]
    return [*codes, *mean, coded, int(cache.lengths[slot])]


def checked(paged):
    """Every page is in use as often as slots and prefixes name it, or it is unused, once."""
    uses = collections.Counter(page for slot in paged._slots.values() for page in slot.pages)
    uses.update(page for block in paged._prefixes.blocks.values() for page in block.pages)
    assert [uses[page] for page in range(paged.pages)] == paged._pool.uses.tolist()
    assert sorted(paged._pool.unused) == [page for page in range(paged.pages) if not uses[page]]
    cache = paged.caches
    for slot, length in paged.slots.items():
        assert int(cache.lengths[slot]) == length
        assert (np.asarray(cache.tables[slot]) >= 0).sum() == -(-int(cache.coded[slot]) // tiles.PAGE)


class Schedule(RuleBasedStateMachine):
    """Random schedules of all verbs leave in each slot what a cache of its own has."""

    @initialize()
    def start(self):
        self.paged = rqjax.PagedCache(copied(self.empty), chunk=CHUNK)
        self.own = {}

    def admitted(self, text):
        slot, found = self.paged.admit(text)
        own, at = copied(self.alone), 0
        for end in self.paged.pieces(0, len(text)):
            k, v, valid = padded(text[at:end])
            own = append(own, k, v, valid=valid)
            if end > found:
                grown(self.paged, slot, text[at:end])
            at = end
        self.own[slot] = own

    @rule(which=st.integers(0, 1), length=st.sampled_from([1, 130, 260, 300, 400]), other=st.sampled_from([0, 1, 150]))
    def admit(self, which, length, other):
        text = [*TEXTS[which, :length], *TEXTS[1 - which, :other]]
        try:
            self.admitted(text)
        except NoRoom:  # the slot that was begun, if any, is given back
            for slot in set(self.paged.slots) - set(self.own):
                self.paged.release(slot)

    @precondition(lambda self: self.own)
    @rule(pick=st.integers(0, 9), count=st.sampled_from([1, 1, 20, 100]))
    def append(self, pick, count):
        slot = sorted(self.own)[pick % len(self.own)]
        length = self.paged.slots[slot]
        if length + count > LONG:
            return
        try:
            grown(self.paged, slot, TEXTS[0, :count])
        except NoRoom:
            return
        k, v, valid = padded(TEXTS[0, :count])
        self.own[slot] = append(self.own[slot], k, v, valid=valid)

    @precondition(lambda self: self.own)
    @rule(pick=st.integers(0, 9))
    def fork(self, pick):
        slot = sorted(self.own)[pick % len(self.own)]
        with contextlib.suppress(NoRoom):
            self.own[self.paged.fork(slot)] = copied(self.own[slot])

    @precondition(lambda self: self.own)
    @rule(pick=st.integers(0, 9), share=st.sampled_from([0.0, 0.3, 0.9, 0.99, 1.0]))
    def truncate(self, pick, share):
        slot = sorted(self.own)[pick % len(self.own)]
        length = int(share * self.paged.slots[slot])
        try:
            self.paged.truncate(slot, length)
        except NoRoom:
            return
        self.own[slot] = truncate(self.own[slot], jnp.array([length]))

    @precondition(lambda self: self.own)
    @rule(pick=st.integers(0, 9))
    def release(self, pick):
        slot = sorted(self.own)[pick % len(self.own)]
        self.paged.release(slot)
        del self.own[slot]

    @rule(pages=st.integers(0, PAGES))
    def evict(self, pages):
        if pages <= self.paged.free_pages:
            self.paged.evict(pages)
            assert len(self.paged._pool.unused) >= pages

    @invariant()
    def the_book_is_right(self):
        if hasattr(self, "paged"):
            checked(self.paged)

    @invariant()
    def slots_are_what_they_are_alone(self):
        q = KEYS[None, :1].repeat(2, axis=2)
        for slot, own in getattr(self, "own", {}).items():
            for a, b in zip(read(self.paged.caches, slot), read(own, 0), strict=True):
                np.testing.assert_array_equal(a, b)
            found = attend(self.paged.caches, q, slots=jnp.array([slot]))
            assert error(found, attend(own, q)) < 1e-6


@pytest.mark.parametrize(("examples", "latent"), some([(5, None), (200, None), (50, 24)], [(5, None)]))
def test_many_schedules(examples, latent):
    Schedule.empty, Schedule.alone = cache(SLOTS, PAGES, latent=latent), cache(1, latent=latent)
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    options = settings(
        max_examples=examples, stateful_step_count=10, deadline=None, suppress_health_check=checks, database=None
    )
    run_state_machine_as_test(Schedule, settings=options)


def test_a_prefix_is_found_and_computed_once():
    """Two pieces of 400 tokens lie in pages when the third has been appended, and are found again by who begins so."""
    paged = rqjax.PagedCache(cache(SLOTS, PAGES), chunk=CHUNK)
    slot, found = paged.admit(TEXTS[0, :400])
    assert (slot, found, paged.pieces(found, 400)) == (0, 0, [2, 130, 258, 386, 400])
    start = 0
    for end in paged.pieces(0, 400):
        grown(paged, slot, TEXTS[0, start:end])
        start = end
    used = paged.pages - paged.free_pages
    assert paged.admit(TEXTS[0, :400]) == (1, 258)
    assert paged.pages - paged.free_pages == used  # shared
    assert paged.admit([*TEXTS[0, :300], *TEXTS[1, :100]]) == (
        2,
        130,
    )  # two pieces are whole, and the second is not coded
    for slot in range(3):
        paged.release(slot)
    assert paged.free_pages == paged.pages
    assert paged.admit(TEXTS[0, :386])[1] == 258  # nobody has it, but it is still known
    paged.release(0)
    paged.evict(PAGES)
    assert paged.admit(TEXTS[0, :386])[1] == 2  # the sinks, which take no page


KINDS = [("kivi_2", None), ("turboquant_trellis_3+turned", None), ("eden_2/nested_e8_2+pre_rope", None)]
KINDS += [("float32", None), ("eden_3/turboquant_trellis_3+pre_rope", 24), ("float32", 16)]


@pytest.mark.parametrize(("name", "latent"), some(KINDS, []))
def test_ragged_calls_and_shared_pages_of_all_kinds_of_codes(name, latent):
    """A chunk of one slot and a token of another in one call; a prefix that a second slot takes over."""
    options = {"name": name, "window": 128 if name == "kivi_2" else 16, "latent": latent}
    paged = rqjax.PagedCache(cache(SLOTS, PAGES, **options), chunk=256)
    own = [cache(1, **options) for _ in range(2)]
    pieces = [TEXTS[0, a:b] for a, b in ((0, 130), (130, 386), (386, 420))]
    paged.admit(TEXTS[0, :420])
    for piece in pieces:
        grown(paged, 0, piece, 256)
    slot, found = paged.admit(TEXTS[0, :420])
    assert (slot, found) == (1, 130)
    grown(paged, 1, pieces[1], 256)
    paged.reserve(0, 1)
    paged.reserve(1, pieces[2])
    k, v, valid = (np.concatenate(x) for x in zip(padded(TEXTS[1, :1], 256), padded(pieces[2], 256), strict=True))
    paged.update(append(paged.caches, k, v, valid=valid, slots=jnp.array([0, 1])))
    for piece in (*pieces, TEXTS[1, :1]):
        k, v, valid = padded(piece, 256)
        own[0] = append(own[0], k, v, valid=valid)
        own[1] = append(own[1], k, v, valid=valid if len(piece) > 1 else jnp.array([0]))
    q = KEYS[None, :1].repeat(2, axis=2)
    for slot in range(2):
        for a, b in zip(read(paged.caches, slot), read(own[slot], 0), strict=True):
            np.testing.assert_array_equal(a, b)
        assert error(attend(paged.caches, q, slots=jnp.array([slot])), attend(own[slot], q)) < 1e-6


CUT = [("kivi_2", None), ("turboquant_trellis_3+centered", None), ("eden_2+pre_rope", None), ("eden_2+centered", 24)]


@pytest.mark.parametrize(("name", "latent"), some(CUT, CUT[2:3]))
def test_what_is_coded_stays_so_when_a_cache_is_cut(name, latent):
    """Whole units keep their codes; the rest of a unit that is cut decodes to what it was; then the text goes on."""
    x, q = KEYS[None, :300], KEYS[None, :1].repeat(2, axis=2)
    whole = append(cache(1, name=name, latent=latent), x, x)
    coded = int(whole.coded[0])
    for length in (295, coded - 3, 2, 0):
        cut = truncate(whole, jnp.array([length]))
        held = min(coded, max(length - 2, 0) // whole.unit * whole.unit)
        assert (int(cut.lengths[0]), int(cut.coded[0])) == (length, held)
        seen = np.arange(whole.max_len) < length  # the whole cache sees as much of the same codes
        if length:
            turn = (lambda x, t: x) if whole.rope is None else whole.rope
            last = turn(jnp.asarray(q), jnp.array([[[length - 300]]]))  # as if from where the cut one asks
            assert error(attend(cut, q), attend(whole, last, mask=seen)) < 2e-3  # decoded by 15 bits of unit vectors
        again = append(cut, x, x)
        assert int(again.coded[0]) == max(held, (length + 300 - 18) // whole.unit * whole.unit)
        n = held // whole.unit
        for a, b in zip(jax.tree.leaves(again.keys), jax.tree.leaves(whole.keys), strict=True):
            if a.ndim == 5:
                np.testing.assert_array_equal(a[:, :, :n], b[:, :, :n])


def test_no_step_compiles_anew():
    paged = rqjax.PagedCache(cache(SLOTS, PAGES, window=8, sinks=0), chunk=CHUNK)
    run = jax.jit(lambda cache, k, v, slots: rqjax.append(cache, k, v, slots=slots))
    for text in TEXTS:
        for _ in range(2):
            slot, found = paged.admit(text[:256])
            for start in range(found, 256, CHUNK):
                piece = text[start : start + CHUNK]
                paged.reserve(slot, piece)
                paged.update(run(paged.caches, *padded(piece)[:2], jnp.array([slot])))
            paged.release(slot)
    assert run._cache_size() == 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda p: [p.admit([1]) for _ in range(4)], "all 3 slots are in use"),
        (lambda p: p.admit(range(641)), "641 tokens take more than the 640 of a slot"),
        (lambda p: p.reserve(2, 1), r"slot 2 is not in use: expected one of \[0\]"),
        (lambda p: p.reserve(0, 641), "slot 0 has room for 640 tokens, not for 641"),
        (lambda p: p.release(5), "slot 5 is not in use"),
        (lambda p: p.truncate(0, 1), "expected length to be a whole number from 0 to 0, got 1"),
        (lambda p: p.evict(9), "8 of 8 pages are free, not 9"),
        (lambda p: rqjax.PagedCache(cache(1)), "expected caches with pages"),
        (lambda p: rqjax.PagedCache(p.caches, chunk=200), "expected a chunk that is a multiple of 128"),
        (lambda p: rqjax.append(p.caches, *padded([1] * 99)[:2], slots=jnp.array([0])), r"no pages for \[128\] tokens"),
        (
            lambda p: rqjax.append(p.caches, *padded([1])[:2], slots=jnp.array([3])),
            "expected slots from 0 to 2, each once",
        ),
        (
            lambda p: rqjax.attend(p.caches, padded([1])[0], slots=jnp.array([[0]])),
            "expected slots to be whole numbers",
        ),
        (lambda p: rqjax.append(cache(1), *padded([1])[:2], slots=jnp.array([0])), "slots are of a cache with pages"),
        (lambda p: rqjax.grow(p.caches, 1000), "a cache with pages does not grow"),
        (lambda p: rqjax.append(p.caches, padded([1])[0], slots=jnp.array([0])), "expected v, got None"),
        (lambda p: rqjax.truncate(p.caches, jnp.array([0, 0, 1])), r"expected lengths from 0 to those of the cache"),
    ],
)
def test_wrong_use_is_one_line_and_the_cache_unharmed(wrong, message):
    paged = rqjax.PagedCache(cache(SLOTS, PAGES), chunk=CHUNK)
    paged.admit([1])
    with pytest.raises(ValueError, match=message) as caught:
        wrong(paged)
    assert "\n" not in str(caught.value)
    checked(paged)


def filled(folder, name="eden_3+centered"):
    """A paged cache that has saved two pieces of 400 tokens, and one that knows the folder only."""
    paged = rqjax.PagedCache(cache(SLOTS, PAGES, name), chunk=CHUNK, folder=folder)
    slot, start = paged.admit(TEXTS[0, :400])
    for end in paged.pieces(0, 400):
        grown(paged, slot, TEXTS[0, start:end])
        start = end
    paged.save()
    return paged, rqjax.PagedCache(cache(SLOTS, PAGES, name), chunk=CHUNK, folder=folder)


def test_prefixes_come_back_from_files(tmp_path):
    first, second = filled(tmp_path)
    assert second.admit(TEXTS[0, :400]) == (0, 258)
    grown(second, 0, TEXTS[0, 258:386])
    grown(second, 0, TEXTS[0, 386:400])
    for a, b in zip(read(second.caches, 0), read(first.caches, 0), strict=True):
        np.testing.assert_array_equal(a, b)
    q = KEYS[None, :1].repeat(2, axis=2)
    assert error(*(attend(paged.caches, q, slots=jnp.array([0])) for paged in (first, second))) < 1e-6
    checked(second)
    second.release(0)
    second.evict(PAGES)
    assert second.admit(TEXTS[0, :400])[1] == 258  # read again
    other = rqjax.PagedCache(cache(SLOTS, PAGES, "eden_4+centered"), chunk=CHUNK, folder=tmp_path)
    assert other.admit(TEXTS[0, :400])[1] == 0  # other codes
    with pytest.raises(ValueError, match="expected a PagedCache with a folder"):
        rqjax.PagedCache(cache(SLOTS, PAGES), chunk=CHUNK).save()


def test_a_damaged_file_is_a_prefix_that_is_computed_again(tmp_path):
    _, second = filled(tmp_path)
    for path in tmp_path.iterdir():
        content = bytearray(path.read_bytes())
        content[-99] ^= 1
        path.write_bytes(content)
    with pytest.warns(UserWarning, match="a prefix is computed again: .* is (damaged|not a whole)"):
        assert second.admit(TEXTS[0, :400])[1] == 0
    checked(second)


@pytest.mark.full
def test_a_killed_writer_leaves_no_half_of_a_file(tmp_path):
    """Killed two hundred times, at moments that are spread over a write."""
    tree, path = [np.arange(200_000), np.ones(5)], tmp_path / "tree"
    fork = multiprocessing.get_context("fork")
    for i in range(200):
        writer = fork.Process(target=lambda: [treefile.save(tree, path, packed=True) for _ in range(99)])
        writer.start()
        writer.join(0.0005 * (i % 40))  # so the kill comes at another moment of a write each time
        writer.kill()
        writer.join()
        if path.exists():
            found = treefile.load(path)[0]
            np.testing.assert_array_equal(found[0], tree[0])
