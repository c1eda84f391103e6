"""Layers that keep a window alone beside layers with pages, against caches of one text."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rqjax
from rqjax.paging.pages import NoRoom
from tests.paging.test_paged import CHUNK, DIM, HEADS, KEYS, LONG, PAGES, SLOTS, TEXTS, cache, checked, copied, padded
from tests.tools.plain import error

SEEN = 200
EXACT = rqjax.Exact(DIM, "float32")


@jax.jit
def appended(layers, k, v, valid, slots=None):
    return tuple(rqjax.append(layer, k, v, valid=valid, slots=slots) for layer in layers)


@jax.jit
def attended(layers, q, slots=None):
    windows = (layer.sliding_window for layer in layers)
    return [rqjax.attend(x, q, slots=slots, sliding_window=seen) for x, seen in zip(layers, windows, strict=True)]


def layers(batch, pages=None):
    ring = rqjax.KVCache.init(
        batch, HEADS, LONG, EXACT, EXACT, sinks=2, sliding_window=SEEN, pages=pages, dtype=jnp.float32
    )
    return ring, cache(batch, pages), copied(ring)


def written(paged, slot, start, text):
    """Appends a text from token `start` on as it is cut."""
    for end in paged.pieces(start, len(text)):
        paged.reserve(slot, text[start:end])
        k, v, valid = padded(text[start:end])
        paged.update(appended(paged.caches, k, v, valid, jnp.array([slot])))
        start = end


def alone(text):
    """Makes caches of a text of their own."""
    own, at = layers(1), 0
    for end in [*range(2, len(text), CHUNK), len(text)]:
        own, at = appended(own, *padded(text[at:end])), end
    return own


def same(paged, slot, own):
    q = KEYS[None, :1].repeat(2, axis=2)
    for mine, theirs in zip(attended(paged.caches, q, jnp.array([slot])), attended(own, q), strict=True):
        assert error(mine, theirs) < 1e-6


@pytest.mark.full
def test_prefixes_are_found_where_prompts_ended_and_texts_parted(tmp_path):
    """A prompt of 400 tokens again, and others that part from it after 300 tokens, of which two pieces are known."""
    paged = rqjax.PagedCache(layers(SLOTS, PAGES), chunk=CHUNK, folder=tmp_path)
    parted = [[*TEXTS[0, :300], *TEXTS[1, i : i + 90]] for i in range(2)]
    for text, found in ((TEXTS[0, :400], 0), (TEXTS[0, :400], 258), (parted[0], 0), (parted[1], 130)):
        slot, length = paged.admit(text)
        assert length == found
        written(paged, slot, length, np.asarray(text))
        same(paged, slot, alone(text))
        checked_rings(paged)
        paged.release(slot)
    paged.save()
    again = rqjax.PagedCache(layers(SLOTS, PAGES), chunk=CHUNK, folder=tmp_path)
    assert again.admit(parted[1]) == (0, 258)  # where it ended itself
    written(again, 0, 258, np.asarray(parted[1]))
    same(again, 0, alone(parted[1]))
    for path in tmp_path.glob("*-ring"):
        path.write_bytes(path.read_bytes()[:-9] + bytes(9))
    damaged = rqjax.PagedCache(layers(SLOTS, PAGES), chunk=CHUNK, folder=tmp_path)
    with pytest.warns(UserWarning, match="a prefix is computed again"):
        assert damaged.admit(parted[1]) == (0, 0)
    written(damaged, 0, 0, np.asarray(parted[1]))
    damaged.save()
    assert rqjax.PagedCache(layers(SLOTS, PAGES), chunk=CHUNK, folder=tmp_path).admit(parted[1]) == (0, 258)


def checked_rings(paged):
    """Checks the book, and the number of rings."""
    checked(paged)
    assert len(paged._prefixes.rings) <= 2 * SLOTS


@pytest.mark.full
@pytest.mark.parametrize("seed", [0, 1])
def test_random_schedules(seed):
    """Texts that begin alike, drafts, forks and releases leave in each slot what caches of one text have."""
    rng = np.random.default_rng(seed)
    paged, own = rqjax.PagedCache(layers(SLOTS, PAGES), chunk=CHUNK), {}
    truncated = jax.jit(lambda layers, length: tuple(rqjax.truncate(layer, length) for layer in layers))

    def admit(_):
        text = np.array([*TEXTS[0, : rng.choice([3, 200, 300])], *TEXTS[1, : rng.choice([1, 90])]])
        slot, found = paged.admit(text)
        try:
            written(paged, slot, found, text)
            own[slot] = alone(text)
        except NoRoom:
            paged.release(slot)

    def grow(slot):
        text = TEXTS[0, : rng.choice([1, 20, 100])]
        paged.reserve(slot, text)
        k, v, valid = padded(text)
        paged.update(appended(paged.caches, k, v, valid, jnp.array([slot])))
        own[slot] = appended(own[slot], k, v, valid)

    def fork(slot):
        own[paged.fork(slot)] = tuple(map(copied, own[slot]))

    def cut(slot):
        length = int(own[slot][0].lengths[0])
        kept = max(length - int(rng.choice([1, 15, 16, 300])), 0)
        if kept > 2 and max(length - 2 - SEEN - 15, int(own[slot][0].held[0])) > max(kept - 2 - SEEN, 0):
            with pytest.raises(ValueError, match="has forgotten what"):
                paged.truncate(slot, kept)
            return
        paged.truncate(slot, kept)
        own[slot] = truncated(own[slot], jnp.array([kept]))

    def release(slot):
        paged.release(slot)
        del own[slot]

    for _ in range(25):
        slots = sorted(own)
        action = rng.choice([admit, grow, grow, fork, cut, release]) if slots else admit
        with contextlib.suppress(NoRoom):
            action(int(rng.choice(slots)) if slots else None)
        checked_rings(paged)
        for slot, one in own.items():
            same(paged, slot, one)
