"""Pages against caches in which each sequence has room of its own; the book of pages; cuts."""

import collections
import contextlib
import dataclasses
import gzip
import multiprocessing

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
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
from rqjax.core import PAGE, TokenArray, treefile
from rqjax.paging.pages import NoRoom, codes_in, root
from rqjax.paging.prefixes import Block
from rqjax.recipes.strategies import STRATEGIES
from tests.tools.plain import PlainCache, error
from tests.tools.suites import some

HEADS, DIM, SLOTS, PAGES, LONG, CHUNK = 2, 32, 3, 8, 640, 128
RNG = np.random.default_rng(0)
KEYS, VALUES = np.append(RNG.standard_normal((2, 1000, HEADS, DIM)), np.full((2, 1, HEADS, DIM), np.inf), 1).astype(
    "f4"
)
BAD = 1000
"""Token whose key and value are not finite."""
TEXTS = RNG.integers(0, 1000, (2, LONG))
append = jax.jit(
    lambda cache, k, v, **options: rqjax.append(cache, k, None if cache.values_in_keys else v, **options),
    donate_argnums=0,
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
    leaves = jax.tree.leaves((cache.keys, cache.values), is_leaf=TokenArray.is_one)
    found = zip(leaves, jax.tree.leaves(rows(cache, slot)), strict=True)
    codes = [np.take(np.asarray(x), range(coded // leaf.tokens_per_entry), axis=leaf.axis) for leaf, x in found]
    mean = [] if cache.key_form.mean is None else [np.asarray(cache.key_form.mean[slot])]
    return [*codes, *mean, coded, int(cache.lengths[slot])]


def checked(paged):
    """Every page is in use as often as slots and prefixes name it, or it is unused, once."""
    uses = collections.Counter(page for slot in paged._slots.values() for page in slot.pages)
    uses.update(page for block in paged._prefixes.blocks.values() for page in block.pages)
    assert [uses[page] for page in range(paged.pages)] == paged._pool.uses.tolist()
    assert sorted(paged._pool.unused) == [page for page in range(paged.pages) if not uses[page]]
    for cache in jax.tree.leaves(paged.caches, is_leaf=lambda x: isinstance(x, rqjax.KVCache)):
        lengths, coded, tables = map(np.asarray, (cache.lengths, cache.coded, cache.tables))
        for slot, length in paged.slots.items():
            assert lengths[slot] == length
            assert cache.sliding_window or (tables[slot] >= 0).sum() == -(-coded[slot] // PAGE)


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
    @rule(pick=st.integers(0, 9), count=st.sampled_from([1, 100, 128]))
    def reserve_and_give_back(self, pick, count):
        slot = sorted(self.own)[pick % len(self.own)]
        length = self.paged.slots[slot]
        with contextlib.suppress(ValueError):
            self.paged.reserve(slot, TEXTS[0, :count])
        self.paged.truncate(slot, length)

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
    assert used == 3
    assert paged.admit(TEXTS[0, :400]) == (1, 258)
    assert paged.pages - paged.free_pages == used  # shared
    assert paged.admit([*TEXTS[0, :300], *TEXTS[1, :100]]) == (
        2,
        130,
    )  # two pieces are whole, and the second is not coded
    paged.release(1)
    assert paged.admit([3, 4, *TEXTS[0, 2:400]]) == (1, 0)  # the same pieces after another one
    for slot in range(3):
        paged.release(slot)
    assert paged.free_pages == paged.pages
    assert paged.admit(TEXTS[0, :386])[1] == 258  # nobody has it, but it is still known
    paged.release(0)
    paged.evict(PAGES)
    assert paged.admit(TEXTS[0, :386])[1] == 0


@pytest.mark.parametrize("given_back", [lambda p: (p.release(0), p.admit([])), lambda p: p.truncate(0, 0)])
def test_a_text_that_is_not_finite_leaves_nothing_behind(given_back):
    """Tokens of the sinks, of the mean key, in codes and in the window; others come in their slot, on their pages."""
    paged = rqjax.PagedCache(cache(SLOTS, PAGES), chunk=CHUNK)
    text = TEXTS[0, :300].copy()
    text[[0, 10, 100, 271, 299]] = BAD
    paged.admit(text)
    written(paged, 0, 0, text)
    given_back(paged)
    paged.evict(PAGES)
    for start, end in ((0, 2), (2, 18), (18, 40), (40, 150)):
        grown(paged, 0, TEXTS[1, start:end])
        same(paged, 0, TEXTS[1, :end])


@pytest.mark.parametrize("cut", [0, 130])
def test_what_is_appended_after_a_cut_is_another_prefix(cut):
    """A prefix from before the cut is found if it is still known; tokens that took its place are another prefix."""
    paged = rqjax.PagedCache(cache(SLOTS, PAGES), chunk=CHUNK)
    text = np.concatenate([TEXTS[0, :cut], TEXTS[1, : 400 - cut]])
    paged.admit(TEXTS[0])
    written(paged, 0, 0, TEXTS[0, :400])
    paged.truncate(0, cut)
    if not cut:
        paged.evict(PAGES)
    written(paged, 0, cut, text)
    for slot, tokens, most in ((1, text, 258), (2, TEXTS[0, :400], 258 if cut else 0)):
        assert paged.admit(tokens) == (slot, most)
        if slot == 2:
            paged.release(0)
            paged.evict(2)
        written(paged, slot, most, tokens)
        same(paged, slot, tokens)
    checked(paged)


def test_a_fork_and_what_it_was_made_of_go_on_apart():
    """The third page is begun: 272 of 300 tokens are in codes."""
    paged = rqjax.PagedCache(cache(SLOTS, PAGES), chunk=CHUNK)
    paged.admit(TEXTS[0])
    written(paged, 0, 0, TEXTS[0, :300])
    assert paged.fork(0) == 1
    assert paged.free_pages == PAGES - 4
    for slot in range(2):
        grown(paged, slot, TEXTS[slot, :100])
    for slot in range(2):
        same(paged, slot, [*TEXTS[0, :300], *TEXTS[slot, :100]])
    paged.truncate(1, 60)  # in a page that both have
    grown(paged, 1, TEXTS[1, :100])
    same(paged, 0, [*TEXTS[0, :300], *TEXTS[0, :100]])
    checked(paged)


@pytest.mark.full
def test_a_page_of_two_texts_is_free_once_nobody_holds_it():
    paged = rqjax.PagedCache(cache(SLOTS, PAGES, "eden_3", sinks=0), chunk=CHUNK)
    paged.admit(TEXTS[0])
    written(paged, 0, 0, TEXTS[0, :384])
    paged.truncate(paged.fork(0), 256)
    grown(paged, 1, TEXTS[1, :CHUNK])
    checked(paged)
    for slot in range(2):
        paged.release(slot)
    assert paged.free_pages == PAGES


@pytest.mark.parametrize(("length", "together"), some([(300, 256), (300, 1), (700, 256), (700, 1)], [(700, 256)]))
def test_pages_at_the_defaults_against_plain_attention(length, together):
    """A window of 128 tokens, 4 sinks, pieces of 128 or a token at a time, pages that another text takes over."""
    strategy = rqjax.strategy("eden_3", jax.random.key(0), DIM)
    empty = lambda batch, pages: strategy.cache(batch, HEADS, 1024, pages=pages, dtype=jnp.float32)  # noqa: E731
    paged, plain = rqjax.PagedCache(empty(3, 16)), PlainCache(empty(1, None))
    text = np.concatenate([TEXTS[0], TEXTS[1]])[:length]
    plain.append(KEYS[text][None], VALUES[text][None])
    queries = RNG.standard_normal((1, 100, 2 * HEADS, DIM)).astype(np.float32)
    found = [paged.admit(text)[1]]
    ends = paged.pieces(0, length) if together > 1 else range(1, length + 1)
    for start, end in zip([0, *ends], ends, strict=False):
        free = paged.free_pages
        paged.reserve(0, text[start:end])
        paged.truncate(0, start)
        assert paged.free_pages == free
        grown(paged, 0, text[start:end], together)
    found.append(paged.admit(text)[1])
    for end in paged.pieces(found[1], length):
        grown(paged, 1, text[found[1] : end], 256)
        found[1] = end
    assert found == [0, length]
    for slot in range(2):
        assert error(attend(paged.caches, queries, slots=jnp.array([slot])), plain.attend(queries)) < 1e-4


KINDS = [("kivi_2", None), ("turboquant_trellis_3/nested_e8_2+turned", None)]
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


@pytest.mark.full
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
            turn = (lambda x, t: x) if whole.key_form.rope is None else whole.key_form.rope
            last = turn(jnp.asarray(q), jnp.array([[[length - 300]]]))  # as if from where the cut one asks
            assert error(attend(cut, q), attend(whole, last, mask=seen)) < 2e-3  # decoded by 15 bits of unit vectors
        again = append(cut, x, x)
        assert int(again.coded[0]) == max(held, (length + 300 - 18) // whole.unit * whole.unit)
        n = held // whole.unit
        for a, b in zip(jax.tree.leaves(again.keys), jax.tree.leaves(whole.keys), strict=True):
            if a.ndim == 5:
                np.testing.assert_array_equal(a[:, :, :n], b[:, :, :n])


def written(paged, slot, found, text):
    """Appends the rest of a text to a slot, by pieces."""
    for end in paged.pieces(found, len(text)):
        grown(paged, slot, text[found:end])
        found = end


def same(paged, slot, text):
    """A slot has what a cache of its own has, to which a text was appended by pieces."""
    own, found, q = cache(1), 0, KEYS[None, :1].repeat(2, axis=2)
    for end in paged.pieces(0, len(text)):
        k, v, valid = padded(text[found:end])
        own, found = append(own, k, v, valid=valid), end
    for a, b in zip(read(paged.caches, slot), read(own, 0), strict=True):
        np.testing.assert_array_equal(a, b)
    assert error(attend(paged.caches, q, slots=jnp.array([slot])), attend(own, q)) < 1e-6


def fails(paged):
    """An append is refused after pages were reserved for it."""
    with pytest.raises(ValueError, match="expected k of shape"):
        rqjax.append(paged.caches, np.zeros((1, 128, 1, 1)), np.zeros((1, 128, 1, 1)), slots=jnp.array([0]))


ROLLED_BACK = {
    "truncate": lambda p: p.truncate(0, 130),
    "truncate further": lambda p: p.truncate(0, 40),
    "truncate in what is reserved": lambda p: p.truncate(0, 200),
    "release": lambda p: p.release(0),
    "a failed append": lambda p: (fails(p), p.truncate(0, 130)),
    "fork": lambda p: (p.fork(0), p.release(0)),
    "fork and truncate": lambda p: (p.fork(0), p.truncate(0, 130), p.release(1)),
    "two pieces": lambda p: (p.reserve(0, TEXTS[0, 258:386]), p.truncate(0, 130)),
    "evict": lambda p: (p.evict(p.free_pages), p.truncate(0, 130)),
    "the same text": lambda p: (p.admit(TEXTS[0, :300]), p.truncate(0, 130), p.release(1)),
    "nothing": lambda p: None,
}


@pytest.mark.parametrize("name", ROLLED_BACK)
def test_what_is_pending_is_rolled_back_with_the_rest(name):
    """Tokens 130 to 258 are reserved and do not come. Pages that they would have filled are not found again, whatever
    else is appended. A later text that begins so fills them."""
    paged = rqjax.PagedCache(cache(SLOTS, PAGES), chunk=CHUNK)
    paged.admit(TEXTS[0, :300])
    written(paged, 0, 0, TEXTS[0, :130])
    paged.reserve(0, TEXTS[0, 130:258])
    ROLLED_BACK[name](paged)
    slot, _ = paged.admit(TEXTS[1, :40])
    written(paged, slot, 0, TEXTS[1, :40])
    assert not paged._prefixes.blocks
    same(paged, slot, TEXTS[1, :40])
    paged.release(slot)
    slot, found = paged.admit(TEXTS[0, :300])
    assert found <= 2
    written(paged, slot, found, TEXTS[0, :300])
    same(paged, slot, TEXTS[0, :300])
    if name not in ("nothing", "truncate in what is reserved"):
        checked(paged)
    if name in ("truncate", "a failed append", "two pieces", "evict"):
        written(paged, 0, 130, TEXTS[0, :300])  # the tokens come after all
        same(paged, 0, TEXTS[0, :300])
        checked(paged)


def test_pieces_are_shared_once_their_tokens_have_come():
    """Two are reserved and appended before the caches come back; a third in parts, which others do not make so."""
    paged = rqjax.PagedCache(cache(SLOTS, PAGES), chunk=CHUNK)
    paged.admit(TEXTS[0])
    ends = [2, 130, 258]
    for start, end in zip([0, *ends], ends, strict=False):
        paged.reserve(0, TEXTS[0, start:end])
    caches, blocks = paged.caches, paged._prefixes.blocks
    for start, end in zip([0, *ends], ends, strict=False):
        k, v, valid = padded(TEXTS[0, start:end])
        caches = append(caches, k, v, valid=valid, slots=jnp.array([0]))
        paged.update(copied(caches))
        assert len(blocks) == (end == 258)  # the sinks alone are not kept
    paged.reserve(0, TEXTS[0, 258:386])
    for part in (TEXTS[0, 258:300], TEXTS[0, 300:386]):
        k, v, valid = padded(part)
        paged.update(append(paged.caches, k, v, valid=valid, slots=jnp.array([0])))
    grown(paged, 0, TEXTS[0, 386:514])
    assert len(blocks) == 1
    checked(paged)
    slot, found = paged.admit(TEXTS[0, :514])
    assert found == 130
    written(paged, slot, found, TEXTS[0, :514])
    same(paged, slot, TEXTS[0, :514])


def test_caches_from_before_another_verb_are_refused():
    paged = rqjax.PagedCache(cache(SLOTS, PAGES), chunk=CHUNK)
    paged.admit(TEXTS[0, :300])
    written(paged, 0, 0, TEXTS[0, :130])
    k, v, valid = padded(TEXTS[0, 130:258])
    paged.reserve(0, TEXTS[0, 130:258])
    late, before = append(copied(paged.caches), k, v, valid=valid, slots=jnp.array([0])), paged.caches
    for wrong in (late, jax.tree.map(jnp.zeros_like, before), (before, before), None):
        paged.truncate(0, 130)
        with pytest.raises(ValueError, match=r"expected (slot 0 to have 130|as many caches as layers, 1)") as caught:
            paged.update(wrong)
        assert "\n" not in str(caught.value)
        same(paged, 0, TEXTS[0, :130])
        checked(paged)
    paged.release(0)
    paged.update(late)  # what has come for a slot that nobody has is dropped
    assert paged.caches.lengths.tolist() == [0, 0, 0]


def test_an_append_that_fails_in_the_second_layer_is_rolled_back_in_both():
    """The first has 240 tokens in codes by then, the second 112; a fork in between has what each of them has."""
    paged = rqjax.PagedCache((cache(SLOTS, PAGES), cache(SLOTS, PAGES)), chunk=CHUNK)

    def grown_in(slot, start, end, layers):
        paged.reserve(slot, TEXTS[0, start:end])
        k, v, valid = padded(TEXTS[0, start:end])
        for layer in layers:
            caches = [*paged.caches]
            caches[layer] = append(caches[layer], k, v, valid=valid, slots=jnp.array([slot]))
            paged.update(caches)

    paged.admit(TEXTS[0, :300])
    grown_in(0, 0, 2, (0, 1))
    grown_in(0, 2, 130, (0, 1))
    grown_in(0, 130, 258, (0,))
    assert [cache.lengths.tolist() for cache in paged.caches] == [[258, 0, 0], [130, 0, 0]]
    assert not paged._prefixes.blocks
    paged.truncate(paged.fork(0), 130)
    paged.truncate(0, 130)
    q = KEYS[None, :1].repeat(2, axis=2)
    for slot in range(2):
        grown_in(slot, 130, 258, (0, 1))
        grown_in(slot, 258, 300, (0, 1))
    own, at = cache(1), 0
    for end in (2, 130, 258, 300):
        k, v, valid = padded(TEXTS[0, at:end])
        own, at = append(own, k, v, valid=valid), end
    for slot in range(2):
        for layer in paged.caches:
            for a, b in zip(read(layer, slot), read(own, 0), strict=True):
                np.testing.assert_array_equal(a, b)
            assert error(attend(layer, q, slots=jnp.array([slot])), attend(own, q)) < 1e-6


def test_a_slot_without_room_goes_on():
    """Tokens without pages leave a mark under jit. `truncate` removes it, together with what was reserved."""
    paged = rqjax.PagedCache(cache(SLOTS, PAGES), chunk=CHUNK)
    paged.admit(TEXTS[0, :300])
    written(paged, 0, 0, TEXTS[0, :130])
    k, v, valid = padded(TEXTS[0, 130:258])
    paged.update(append(paged.caches, k, v, valid=valid, slots=jnp.array([0])))
    with pytest.raises(ValueError, match=r"sequences \[0\] were appended to past max_len"):
        rqjax.attend(paged.caches, KEYS[None, :1], slots=jnp.array([0]))
    paged.truncate(0, 130)
    paged.caches.check()
    written(paged, 0, 130, TEXTS[0, :300])
    same(paged, 0, TEXTS[0, :300])


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
        (lambda p: p.reserve(0, -1), "expected tokens to be a whole number from 0 to"),
        (lambda p: p.reserve(0, jnp.array([0.5])), "expected tokens to be whole numbers, got float32"),
        (lambda p: p.admit(np.zeros((2, 5), int)), r"expected tokens of one text, \(time,\) or \(1, time\), got"),
        (lambda p: rqjax.PagedCache(cache(1, 8, sinks=200), chunk=128), "a multiple of 128 and at least 200, got 128"),
        (lambda p: p.truncate(0, 1), "expected length to be a whole number from 0 to 0, got 1"),
        (lambda p: p.evict(9), "8 of 8 pages are free, not 9"),
        (lambda p: rqjax.PagedCache(cache(1)), "expected caches with pages"),
        (lambda p: rqjax.PagedCache(p.caches, chunk=200), "expected a chunk that is a multiple of 128"),
        (lambda p: rqjax.append(p.caches, *padded([1] * 99)[:2], slots=jnp.array([0])), r"no pages for \[128\] tokens"),
        (
            lambda p: rqjax.append(p.caches, *padded([1])[:2], slots=jnp.array([3])),
            r"expected slots from 0 to 2, got \[3\]",
        ),
        (lambda p: rqjax.attend(p.caches, padded([1] * 2)[0], slots=jnp.array([1, 1])), "expected slots that differ"),
        (lambda p: rqjax.append(p.caches, *padded([1])[:2], slots=jnp.array([True])), "expected slots to be whole"),
        (lambda p: p.admit(jnp.array([1.5])), "expected tokens to be whole numbers"),
        (lambda p: p.reserve(0, np.ones((2, 3), int)), "expected tokens of one text"),
        (
            lambda p: rqjax.attend(p.caches, padded([1])[0], slots=jnp.array([[0]])),
            "expected slots to be whole numbers",
        ),
        (lambda p: rqjax.append(cache(1), *padded([1])[:2], slots=jnp.array([0])), "slots are of a cache with pages"),
        (lambda p: rqjax.grow(p.caches, 1000), "a cache with pages does not grow"),
        (lambda p: rqjax.append(p.caches, padded([1])[0], slots=jnp.array([0])), "expected v, got None"),
        (lambda p: rqjax.truncate(p.caches, jnp.array([0, 0, 1])), r"expected lengths from 0 to \[0, 0, 0\], got"),
        (lambda p: rqjax.truncate(p.caches, np.zeros(3)), "expected lengths to be whole numbers, got float64"),
        (lambda p: rqjax.truncate(p.caches, np.full(3, 2**32)), "expected lengths from 0 to"),
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


@pytest.mark.full
def test_prefixes_come_back_from_files(tmp_path):
    first, second = filled(tmp_path, "eden_3+turned")
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


OTHERS = {
    "quantizer": {"name": "eden_4+turned"},
    "key": {"seed": 1},
    "window": {"window": 32},
    "sinks": {"sinks": 3},
    "chunk": {"chunk": 256},
    "rope": {"rope": rqjax.Rope(2e4)},
    "dtype": {"dtype": jnp.float16},
    "mean": {"name": "eden_3", "key_form": rqjax.SubtractedMean(np.zeros((HEADS, DIM), np.float32))},
    "another mean": {"name": "eden_3", "key_form": rqjax.SubtractedMean(np.ones((HEADS, DIM), np.float32))},
    "no mean": {"name": "eden_3"},
    "no rope": {"name": "eden_3+centered"},
    "pre_rope": {"name": "eden_3+centered+pre_rope"},
    "seed": {"bytes": b"other weights"},
    "layers": {"layers": 2},
    "split": {"name": None},
    "latent": {"name": None, "latent": True},
}


@pytest.mark.full
def test_pages_of_other_caches_are_other_files(tmp_path):
    """Each kind of cache finds its own files in a folder that texts of many kinds are saved to."""

    def new(name="eden_3+turned", seed=0, chunk=CHUNK, bytes=b"", layers=1, latent=False, **options):
        options = {"window": 16, "sinks": 2, "pages": PAGES, "rope": rqjax.Rope(1e4, share=0.25), **options}
        if name is None:
            options["key_form"] = rqjax.AsGiven(rope=options.pop("rope"))
            half = rqjax.eden(jax.random.key(0), DIM // 2, 3)
            q = rqjax.Split((half, half))
            one = rqjax.KVCache.init(SLOTS, HEADS, LONG, q, rqjax.LastPart() if latent else q, **options)
        else:
            one = rqjax.strategy(name, jax.random.key(seed), DIM).cache(SLOTS, HEADS, LONG, **options)
        caches = one if layers == 1 else (one, jax.tree.map(jnp.copy, one))
        return rqjax.PagedCache(caches, chunk=chunk, folder=tmp_path, seed=bytes)

    for options in ({}, *OTHERS.values()):
        paged = new(**options)
        key = paged._prefixes.hashes(TEXTS[0, :400])[1]
        assert paged.admit(TEXTS[0, :400])[1] == 0
        count = paged._prefixes.grid.pages(1)
        roots = tuple(root(layer, 0) for layer in paged._layers.all)
        paged._prefixes.blocks[key] = Block(tuple(range(count)), roots)
        paged.save()
    assert len(list(tmp_path.iterdir())) == 1 + len(OTHERS)


def damaged(path, other):
    content = path.read_bytes()
    yield content[:-99] + bytes([content[-99] ^ 1]) + content[-98:]
    yield from (content[:size] for size in (0, 1, 2, 20, len(content) // 2, len(content) - 1))
    yield gzip.decompress(content)[:-1]
    yield b"\x1f\x8b" + content[:100]
    yield safetensors.numpy.save({"a": np.zeros(3)})
    yield other


@pytest.mark.full
def test_a_damaged_or_foreign_file_is_a_prefix_that_is_computed_again(tmp_path):
    """Prefixes are computed again whatever lies at their place; `save` then writes it anew."""
    second, first = (tmp_path / key.hex() for key in filled(tmp_path)[0]._prefixes.blocks)
    rqjax.save(rqjax.Rope(1e4), tmp_path / "tree")
    for content in (*damaged(first, second.read_bytes()), (tmp_path / "tree").read_bytes(), None):
        first.unlink()
        first.mkdir() if content is None else first.write_bytes(content)
        paged = rqjax.PagedCache(cache(SLOTS, PAGES), chunk=CHUNK, folder=tmp_path)
        with pytest.warns(UserWarning, match="^a prefix is computed again: [^\n]*$"):
            assert paged.admit(TEXTS[0, :400])[1] == 0
        checked(paged)
        written(paged, 0, 0, TEXTS[0, :258])
        paged.save()
        if content is not None:
            assert rqjax.PagedCache(cache(SLOTS, PAGES), chunk=CHUNK, folder=tmp_path).admit(TEXTS[0, :400])[1] == 258


FILES = [*STRATEGIES, "turboquant_trellis_3", "nested_e8_2/eden_3+turned", "eden_2+pre_rope", "turboquant_prod_3"]
CORE = ["float8", "kvarn_4", "eden_2+pre_rope"]


@pytest.mark.parametrize("name", some([*FILES, "klt_trellis_2", "latent"], CORE))
def test_pages_of_all_kinds_of_codes_come_back_from_files(name, tmp_path):
    """Two layers; what a second book reads is, bit for bit, what the first wrote: any bits, so nothing is encoded."""

    def layer(i):
        key, options, rope = jax.random.key(i), {"window": 16, "sinks": 2, "pages": PAGES}, rqjax.Rope(1e4, share=0.5)
        if name == "klt_trellis_2":
            q = rqjax.klt_trellis(key, jnp.asarray(np.nan_to_num(KEYS.swapaxes(0, 1), posinf=0)), bits=2)
            return rqjax.KVCache.init(SLOTS, HEADS, LONG, q, q, key_form=rqjax.AsGiven(rope=rope), **options)
        latent, name_ = (DIM // 2, "nested_e8_2/eden_3") if name == "latent" else (None, name)
        return rqjax.strategy(name_, key, DIM, latent=latent).cache(SLOTS, HEADS, LONG, rope=rope, **options)

    def random(x):
        return jnp.asarray(RNG.integers(0, 256, (*x.shape, x.dtype.itemsize), np.uint8).view(x.dtype)[..., 0])

    def filled(cache):
        names = "keys", "values", "exact_keys", "exact_values"
        return dataclasses.replace(cache, **jax.tree.map(random, {name: getattr(cache, name) for name in names}))

    empty = tuple(layer(i) for i in range(2))
    first, second = (
        rqjax.PagedCache(caches, chunk=256, folder=tmp_path) for caches in (tuple(map(filled, empty)), empty)
    )
    first._pool.take(1)
    first._prefixes.blocks[b"key"] = Block((7,), tuple(root(layer, 1) for layer in first._layers.all))
    first.save()
    found = second._known(b"key", 0)
    expected = [codes_in(layer, [7]) for layer in first._layers.all], first._prefixes.blocks[b"key"].roots
    got = [codes_in(layer, found.pages) for layer in second._layers.all], found.roots
    assert len(jax.tree.leaves(got)) == len(jax.tree.leaves(expected))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(*(np.atleast_1d(np.asarray(x)).view(np.uint8) for x in (a, b)))


def test_a_first_piece_without_pages_stays_while_the_next_is_loaded(tmp_path):
    """Loading takes pages of another text, not the beginning of its own, which has none."""
    paged = rqjax.PagedCache(cache(SLOTS, 6), chunk=CHUNK, folder=tmp_path)

    def begun(text):
        slot, known = paged.admit(text)
        at = known
        for end in paged.pieces(known, len(text)):
            grown(paged, slot, text[at:end])
            at = end
        return slot, known

    for _ in range(2):
        paged.release(begun(TEXTS[0, :300])[0])
    paged.evict(6)
    for text in (TEXTS[1], TEXTS[1, 100:400]):
        paged.release(begun(text)[0])
    begun(TEXTS[1, 50:250])
    assert len(paged._pool.unused) == 0
    assert paged.admit(TEXTS[0, :300])[1] == 130
    checked(paged)


@pytest.mark.full
def test_a_killed_writer_leaves_no_half_of_a_file(tmp_path):
    """Killed sixty times, at moments that are spread over a write."""
    tree, path = [np.arange(200_000), np.ones(5)], tmp_path / "tree"
    fork = multiprocessing.get_context("fork")
    for i in range(60):
        writer = fork.Process(target=lambda: [treefile.save(tree, path, packed=True) for _ in range(99)])
        writer.start()
        writer.join(0.001 * (i % 20))  # so the kill comes at another moment of a write each time
        writer.kill()
        writer.join()
        if path.exists():
            found = treefile.load(path)[0]
            np.testing.assert_array_equal(found[0], tree[0])
