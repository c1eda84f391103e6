"""Quantizers of several heads together, of values given keys, and the recipe that makes them."""

import copy
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rqjax
from tests.tools.plain import PlainCache, error
from tests.tools.suites import some

DIM, GROUP = 32, 3
KEY = jax.random.key(0)
NESTS = {
    "levels": lambda key, dim: rqjax.eden(key, dim, 3),
    "trellis": lambda key, dim: rqjax.turboquant_trellis(key, dim, 2),
}


def made(name, groups):
    """A quantizer of one group of heads, or of several, each with its own."""
    if groups == 1:
        return rqjax.AcrossHeads(NESTS[name](KEY, GROUP * DIM), group=GROUP)
    each = jax.vmap(lambda key: NESTS[name](key, GROUP * DIM))(jax.random.split(KEY, groups))
    return rqjax.AcrossHeads(rqjax.PerHead(each), group=GROUP)


def samples(heads, count, dim=DIM, seed=0):
    """Vectors (heads, count, dim) that depend on one another across heads, loud in few directions."""
    rng = np.random.default_rng(seed)
    mixing = rng.standard_normal((heads * dim, heads * dim)) * 0.97 ** np.arange(heads * dim)
    mixed = rng.standard_normal((count, heads * dim)) @ mixing.T
    return np.moveaxis(mixed.reshape(count, heads, dim), 1, 0).astype(np.float32)


CASES = [(name, groups) for groups in (1, 2) for name in NESTS]
CORE = [("levels", 1)]


@pytest.mark.parametrize(("name", "groups"), some(CASES, CORE))
def test_laws(name, groups):
    """Codes are those of vectors side by side; products and sums are those of decoded vectors; bytes are counted."""
    quantizer, x = made(name, groups), np.stack([samples(GROUP * groups, 20, seed=i) for i in range(2)])

    @jax.jit
    def run(quantizer, x, y, w):
        codes = quantizer.encode(x)
        sums = quantizer.restore(quantizer.weigh(w, codes))
        return (
            codes,
            quantizer.decode(codes),
            quantizer.dot(y, codes),
            quantizer.scores(quantizer.prepare(x), codes),
            sums,
        )

    rng = np.random.default_rng(1)
    y, w = (rng.standard_normal(shape).astype(np.float32) for shape in ((5, DIM), (2, GROUP * groups, 4, 20)))
    codes, decoded, products, scores, sums = run(quantizer, x, y, w)
    beside = x.reshape(2, groups, GROUP, 20, DIM).swapaxes(2, 3).reshape(2, groups, 20, GROUP * DIM)
    expected = jax.jit(lambda inner, x: inner.decode(inner.encode(x)))(quantizer.inner, beside)
    expected = expected.reshape(2, groups, 20, GROUP, DIM).swapaxes(2, 3).reshape(x.shape)
    np.testing.assert_allclose(decoded, expected, rtol=1e-5, atol=1e-4)
    assert quantizer.heads == GROUP * groups
    assert rqjax.nbytes(codes) * 8 == quantizer.bits_per_vector * 2 * GROUP * groups * 20
    assert error(products, np.einsum("md,bhnd->mbhn", y, decoded)) < 1e-5
    assert error(scores, np.einsum("bhrd,bhnd->bhrn", x, decoded)) < 1e-3  # queries have 15 bits in integer products
    assert error(sums, np.einsum("bhrn,bhnd->bhrd", w, decoded)) < 1e-3


@pytest.mark.full
@pytest.mark.parametrize("pre_rope", [False, True])
def test_caches_attend_as_a_plain_one(pre_rope):
    """Attends at the default window and sinks to 700 tokens in one call and in pieces, then one by one."""
    form = rqjax.BeforeRope(rope=rqjax.Rope(1e4)) if pre_rope else rqjax.AsGiven()
    heads, (keys, values) = 2 * GROUP, (made(name, 2) for name in ("levels", "trellis"))
    x = np.stack([samples(heads, 716, seed=i).swapaxes(0, 1) for i in range(3)])[:, None]
    found = []
    for sizes in ([700, *[1] * 16], [256, 256, 188, 16]):
        cache = rqjax.KVCache.init(1, heads, 1024, keys, values, key_form=form, dtype=jnp.float32)
        plain, start = PlainCache(cache), 0
        for size in sizes:
            q, k, v = (side[:, start : start + size] for side in x)
            out, cache = rqjax.dot_product_attention(q, k, v, cache)
            plain.append(k, v)
            start += size
        found.append(cache.keys)
        tolerance = 2e-3 if pre_rope else 1e-3  # angles differ in their last bits, so that an index may be another one
        assert error(out, plain.attend(q, own=True)) < tolerance
        assert error(rqjax.attend(cache, q), plain.attend(q)) < tolerance
    for one, other in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_array_equal(one, other)


def given_keys(name, groups, scale=0.2):
    """A quantizer of values given keys, by matrices for each group."""
    prediction = scale * jax.random.normal(jax.random.key(1), (groups, GROUP * DIM, GROUP * DIM))
    return rqjax.GivenKeys(made(name, groups), prediction=prediction)


@pytest.mark.parametrize(("name", "groups"), some(CASES, CORE))
def test_laws_of_values_given_keys(name, groups):
    """Codes are of what keys leave of values; sums are those of decoded values; bytes are those of what is left."""
    keys, quantizer = made("levels", groups), given_keys(name, groups)
    quantizer = dataclasses.replace(quantizer, keys=keys)
    key, value = (np.stack([samples(GROUP * groups, 20, seed=i + j) for i in range(2)]) for j in (0, 5))
    w = np.random.default_rng(1).standard_normal((2, GROUP * groups, 4, 20)).astype(np.float32)

    @jax.jit
    def run(quantizer, key, value, w):
        of_keys = quantizer.keys.encode(key)
        codes = of_keys, quantizer.encode(quantizer.left(value, of_keys))
        return codes, quantizer.decode(codes), quantizer.restore(quantizer.weigh(w, codes))

    codes, decoded, sums = run(quantizer, key, value, w)
    beside = lambda x: x.reshape(2, groups, GROUP, 20, DIM).swapaxes(2, 3).reshape(2, groups, 20, -1)  # noqa: E731
    given = np.einsum("bgtn,gnm->bgtm", beside(np.array(keys.decode(codes[0]))), quantizer.prediction)
    given = given.reshape(2, groups, 20, GROUP, DIM).swapaxes(2, 3).reshape(value.shape)
    assert error(decoded - given, value - given) < 0.4
    np.testing.assert_allclose(decoded, given + quantizer.inner.decode(codes[1]), atol=1e-4)
    assert rqjax.nbytes(codes[1]) * 8 == quantizer.bits_per_vector * 2 * GROUP * groups * 20
    assert error(sums, np.einsum("bhrn,bhnd->bhrd", w, decoded)) < 1e-3
    y = np.random.default_rng(2).standard_normal((3, DIM)).astype(np.float32)
    assert error(quantizer.dot(y, codes), np.einsum("rd,bhnd->rbhn", y, decoded)) < 1e-4


@pytest.mark.full
@pytest.mark.parametrize(("pre_rope", "pages"), [(False, None), (True, 16)])
def test_caches_of_values_given_keys_attend_as_a_plain_one(pre_rope, pages):
    """Attends at the default window and sinks to 700 tokens in one call and in pieces, cuts, and is coded anew."""
    form = rqjax.BeforeRope(rope=rqjax.Rope(1e4)) if pre_rope else rqjax.AsGiven()
    heads, keys, values = 2 * GROUP, made("levels", 2), given_keys("trellis", 2)
    x = np.stack([samples(heads, 716, seed=i).swapaxes(0, 1) for i in range(3)])[:, None]
    for sizes in ([700, *[1] * 16], [256, 256, 188, 16]):
        cache = rqjax.KVCache.init(1, heads, 1024, keys, values, key_form=form, dtype=jnp.float32, pages=pages)
        if pages:
            cache = dataclasses.replace(cache, tables=jnp.arange(pages)[::-1][None, : cache.tables.shape[1]])
        plain, start = PlainCache(cache), 0
        for size in sizes:
            q, k, v = (side[:, start : start + size] for side in x)
            out, cache = rqjax.dot_product_attention(q, k, v, cache)
            plain.append(k, v)
            start += size
        tolerance = 2e-3 if pre_rope else 1e-3  # angles differ in their last bits, so that an index may be another one
        assert error(out, plain.attend(q, own=True)) < tolerance
        assert error(rqjax.attend(cache, q), plain.attend(q)) < tolerance
    cut, shorter = rqjax.truncate(cache, np.array([400])), copy.deepcopy(plain)
    shorter.truncate([400])
    assert error(rqjax.attend(cut, q), shorter.attend(q)) < tolerance
    exact = rqjax.requantize(cache, rqjax.Strategy(*[rqjax.Exact(DIM, dtype="float32")] * 2, form))
    again = rqjax.requantize(exact, rqjax.Strategy(keys, values, form))
    for other in (exact, again):  # codes of decoded tokens decode to nearly the same again
        assert error(rqjax.attend(other, q), rqjax.attend(cache, q)) < (1e-3 if other is exact else 0.2)


def test_heads_that_are_not_there_are_refused():
    quantizer = made("levels", 2)
    with pytest.raises(ValueError, match=r"expected vectors \(..., 6 heads, tokens, 32\), got shape \(3, 5, 32\)"):
        quantizer.encode(jnp.ones((3, 5, DIM)))
    with pytest.raises(ValueError, match="expected vectors of 5 heads alike, got inner of dimension 96"):
        rqjax.AcrossHeads(quantizer.inner, group=5)


@pytest.mark.full
def test_heads_together_lose_less_in_fewer_bits():
    """Heads that depend on one another: one scale in the place of four, and half the error."""
    x, test = samples(4, 3000, 64), samples(4, 3400, 64)[:, 3000:]
    alone, together = (rqjax.FITTED[name](KEY, x, 2) for name in ("klt_trellis", "klt_joint"))
    assert together.group == 4
    assert together.bits_per_vector < alone.bits_per_vector
    errors = [np.mean((q.decode(q.encode(test)) - test) ** 2) for q in (alone, together)]
    assert errors[1] < 0.5 * errors[0]


@pytest.mark.full
def test_values_that_follow_from_keys_lose_less():
    """Values that are functions of keys but for a tenth, and few samples, of which nothing is predicted."""
    keys = samples(4, 3000)
    noise = np.random.default_rng(2).standard_normal(keys.shape).astype(np.float32)
    keys, values = jnp.asarray(keys), jnp.asarray(keys[::-1] + 0.1 * keys.std() * noise)
    quantizer = rqjax.klt_joint(KEY, keys, 3)
    alone, given = (
        rqjax.klt_joint(KEY, values[:, :2000], 2, **more)
        for more in ({}, {"keys": keys[:, :2000], "key_quantizer": quantizer})
    )
    assert isinstance(given, rqjax.GivenKeys)
    given = dataclasses.replace(given, keys=quantizer)
    of_keys = quantizer.encode(keys[:, 2000:])
    decoded = given.decode((of_keys, given.encode(given.left(values[:, 2000:], of_keys))))
    lost = [error(x, values[:, 2000:]) for x in (alone.decode(alone.encode(values[:, 2000:])), decoded)]
    assert lost[1] < 0.7 * lost[0]
    few = rqjax.klt_joint(KEY, values[:, :500], 2, keys=keys[:, :500], key_quantizer=quantizer)
    assert isinstance(few, rqjax.AcrossHeads)


def test_keys_of_other_heads_are_refused():
    q = rqjax.eden(KEY, DIM, 3)
    for keys in (q, rqjax.AcrossHeads(rqjax.eden(KEY, 2 * DIM, 3), group=2)):
        with pytest.raises(ValueError, match="expected AcrossHeads of 3 heads for values given keys, got"):
            rqjax.KVCache.init(1, GROUP, 512, keys, given_keys("levels", 1))
    with pytest.raises(ValueError, match="expected a prediction of 96 by 96 numbers a group"):
        rqjax.GivenKeys(made("levels", 2), prediction=jnp.ones((1, 96, 96)))


@pytest.mark.full
@pytest.mark.parametrize(("heads", "dim", "group"), [(8, 64, 4), (3, 64, 3), (2, 300, 1), (5, 64, 1)])
def test_heads_are_grouped_up_to_256_coordinates(heads, dim, group):
    quantizer = rqjax.klt_joint(KEY, samples(heads, 400, dim), 1)
    assert quantizer.heads == heads
    assert getattr(quantizer, "group", 1) == group
