"""The cache against a plain one; its codes, bytes and errors."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rqjax
from rqjax.cache.coded import BLOCK_BYTES
from tests.tools.apple import formulated
from tests.tools.plain import PlainCache, error, recoded
from tests.tools.suites import some

BATCH, HEADS, DIM = 2, 1, 32
BIAS = np.array([3, 0], np.float32)[:, None, None, None]
"""Bias of the keys: the first sequence's are centered, the second's have a negligible mean."""
append = jax.jit(rqjax.append, donate_argnums=0)
attend = jax.jit(rqjax.attend, static_argnames=("sliding_window", "softcap", "scale"))
attend_anew = jax.jit(rqjax.dot_product_attention)
truncate = jax.jit(rqjax.truncate)
KINDS = {
    "float32": ("float32", 2),
    "levels": ("eden_3", 4),
    "affine": ("v2_lean", 1),
    "trellis": ("turboquant_trellis_2", 3),
    "transform": ("klt_trellis_3", 2),
    "per channel": ("kivi_4", 8),
    "balanced": ("kvarn_4/kvarn_2", 1),
    "blocks": ("mxfp4", 16),
    "latent": ("eden_4/eden_3+turned", 4),
    "centered": ("rotorquant_3+centered", 2),
    "turned": ("eden_3+turned", 1),
    "pre_rope": ("eden_3+centered+pre_rope", 2),
}
"""Strategy of each kind, and query heads a key-value head."""
SIZES = (256, 1, 300, 129, 16, 128)
"""Tokens of a call: as a decoder generates, at the edges of the window, as `generate` and `Engine` read."""
LONG_DIM = 64
TEXTS = np.random.default_rng(7).standard_normal((3, BATCH, 2800, 1, LONG_DIM)).astype(np.float32)
"""Queries, keys and values."""


def empty(
    name="rotorquant_3+centered", *, max_len=192, window=16, sinks=2, batch=BATCH, heads=HEADS, dim=DIM, **options
):
    strategy = rqjax.strategy(name, jax.random.key(0), dim)
    return strategy.cache(batch, heads, max_len, window=window, sinks=sinks, dtype=jnp.float32, **options)


EMPTY = empty()
copied = jax.jit(lambda cache: jax.tree.map(jnp.copy, cache))


def of_kind(kind, max_len):
    """Returns an empty cache of a kind, and its query heads a key-value head."""
    name, groups = KINDS[kind]
    options = {"rope": rqjax.Rope(1e4)} if "+turned" in name or "+pre_rope" in name else {}
    if kind == "latent":
        strategy = rqjax.strategy(name, jax.random.key(0), LONG_DIM, latent=32)
        options["rope"] = rqjax.Rope(1e4, share=0.5)
    elif kind == "transform":
        quantizer = rqjax.klt_trellis(jax.random.key(0), TEXTS[0].reshape(-1, LONG_DIM)[:2000], 3)
        strategy = rqjax.Strategy(quantizer, quantizer)
    else:
        strategy = rqjax.strategy(name, jax.random.key(0), LONG_DIM)
    return strategy.cache(2, 1, max_len, dtype=jnp.float32, **options), groups


def tolerance(kind):
    """Returns the tolerated relative error.

    If keys turn, the last bits of angles differ, so that an index may be another one. If scales of coordinates or of
    groups meet a query of 16 heads, its 15 bits are those of the largest product.
    """
    if KINDS[kind][0].endswith(("turned", "pre_rope")) or kind == "latent":
        return 5e-3
    return 2e-4 if kind in ("transform", "blocks") else 1e-4


class Beside:
    """A cache beside a plain one: all is done to both, and they attend to the same."""

    def __init__(self, kind, cache, texts):
        self.cache, self.plain, self.texts, self.used, self.tolerance = (
            cache,
            PlainCache(cache),
            texts,
            0,
            tolerance(kind),
        )

    @property
    def lengths(self):
        return np.array([len(keys) for keys in self.plain.keys])

    def append(self, size, valid=None):
        """Appends a piece of the text in one call, of which the last `valid` tokens of each sequence count."""
        q, k, v = (x[:, self.used : self.used + size] for x in self.texts)
        self.used, v = self.used + size, None if self.cache.values_in_keys else v
        found, self.cache = attend_anew(q, k, v, self.cache, valid=valid)
        self.plain.append(k, v, valid, self.cache.key_form.mean)
        self.agree(found, q, valid, own=True)

    def attend(self, window):
        q = self.texts[0][:, :3]
        self.agree(attend(self.cache, q, sliding_window=window), q, sliding_window=window)

    def truncate(self, lengths):
        self.cache = truncate(self.cache, lengths)
        self.plain.truncate(lengths)

    def agree(self, found, q, valid=None, **options):
        """Compares two query heads only, since the plain cache is slow, and no queries that are padding."""
        count = q.shape[1]
        rows = np.arange(count) >= count - (np.full(BATCH, count) if valid is None else valid)[:, None]
        expected = self.plain.attend(q[:, :, :2], **options)
        assert error(np.asarray(found)[:, :, :2][rows], expected[rows]) < self.tolerance
        assert self.cache.lengths.tolist() == self.lengths.tolist()


def schedule(beside, sizes, seed, path):
    """Appends pieces of all sizes, some of which are padded for the second sequence. Attends, truncates, saves and
    loads in between, in random order."""
    rng = np.random.default_rng(seed)
    verbs = rng.permutation([*["append"] * (len(sizes) - 1), *["attend", "truncate", "load"] * 2])
    sizes = iter(rng.permutation(sizes).tolist())
    for verb in ("append", *verbs):
        if verb == "append":
            size = next(sizes)
            beside.append(size, np.array([size, rng.choice([0, size // 2, size])]))
        elif verb == "attend":
            beside.attend([None, 30, 200][rng.integers(3)])
        elif verb == "truncate":
            beside.truncate(np.maximum(beside.lengths - rng.choice([1, 5, 127, 150, 300]), 0))
            beside.attend(None)
        else:
            rqjax.save(beside.cache, path)
            beside.cache = rqjax.load(path, beside.cache)


def in_pieces(beside, pieces):
    """Appends a text in one call, or in pieces, of the third of which the second sequence has 100 tokens less. It is
    then cut where tokens in codes are the newest, and goes on."""
    for i, size in enumerate(pieces):
        beside.append(size, np.array([size, size - 100 * (i == 2)]) if len(pieces) > 1 else None)
    beside.truncate(beside.lengths - [131, 40])
    beside.attend(200)
    beside.cache = rqjax.grow(beside.cache, beside.cache.max_len + 1)
    beside.append(1, np.ones(BATCH, int))


def texts_of(groups):
    return TEXTS[0].repeat(groups, axis=2), TEXTS[1] + BIAS, TEXTS[2]


def test_a_short_schedule(tmp_path):
    empty, groups = of_kind("turned", 700)
    schedule(Beside("turned", empty, texts_of(groups)), (1, 129, 300), 0, tmp_path / "cache.safetensors")


def test_many_tokens_at_once():
    """A cache takes many tokens in one call; more of them are in codes if the sinks are not counted."""
    empty, groups = of_kind("centered", 720)
    in_pieces(Beside("centered", empty, texts_of(groups)), [720])


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_schedules_pieces_and_a_long_prompt(kind, tmp_path):
    """Caches and pieces have the same sizes, so that all share their programs; there are two query heads where many
    would take long."""
    empty, groups = of_kind(kind, 2500)
    texts = texts_of(groups if groups <= 4 else 2)
    schedule(Beside(kind, empty, texts), SIZES, list(KINDS).index(kind), tmp_path / "cache.safetensors")
    in_pieces(Beside(kind, empty, texts), SIZES)
    in_pieces(Beside(kind, empty, texts), [2500])


def random(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def leaves(cache):
    """Codes and what else a cache knows of its tokens; slots that hold nothing yet are left out."""
    return jax.tree.leaves(
        (cache.keys, cache.values, cache.key_form.mean, cache.lengths, cache.exact_keys, cache.exact_values)
    )


CHUNKED = ("v3_2.5", "v2_rotated_qjl", "rotor_chain_3+centered", "turboquant_trellis_3")


@pytest.mark.parametrize("name", some(CHUNKED, []))
def test_any_split_into_chunks_gives_the_same_bits(name):
    k, v = random(1, 1, 200, 2, 64) + BIAS[None, :, 0, :, 0], random(2, 1, 200, 2, 64)

    def cached(*sizes):
        cache, start = empty(name, batch=1, heads=2, dim=64, max_len=256), 0
        for size in sizes:
            cache = append(cache, k[:, start : start + size], v[:, start : start + size])
            start += size
        return leaves(cache)

    for whole, parts in zip(cached(200), cached(*[1] * 40, 130, *[1] * 30), strict=True):
        np.testing.assert_array_equal(whole, parts)


FORMULATED = (
    *("v2_lean", "rotorquant_3+centered", "eden_3+turned", "kivi_2", "turboquant_trellis_2"),
    *("eden_4/rtn_3", "v3_3.5", "eden_3+centered+pre_rope", "v2_rotated_qjl", "kvarn_4/kvarn_2"),
)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "pages"), [*((name, None) for name in FORMULATED), ("eden_3+turned", 12), ("kvarn_4/kvarn_2", 12)]
)
def test_gpus_append_the_same_bits(name, pages):
    """All units of a call at once, where a CPU takes one after the other: of ragged calls, after `truncate`, too. All
    sequences attend at once, whose pages a CPU reads one by one."""
    rng, rope = np.random.default_rng(0), rqjax.Rope(1e4) if "turned" in name or "pre_rope" in name else None
    cache = empty(name, batch=3, heads=2, dim=64, max_len=300, window=32, pages=pages, rope=rope)
    if pages:
        cache = dataclasses.replace(cache, tables=jnp.asarray(rng.permutation(12)[:9].reshape(3, 3), jnp.int32))
    there, lengths = copied(cache), np.zeros(3, int)
    with formulated("gpu"):
        appended = jax.jit(lambda cache, k, v, valid: rqjax.append(cache, k, v, valid=valid), donate_argnums=0)
    for size in (60, 1, 1, 130, *[1] * 20, 17, *[1] * 6, 60):
        valid = np.minimum(rng.integers(0, size + 1, 3) if rng.random() < 0.5 else size, 300 - lengths)
        k, v = (random(int(rng.integers(1000)), 3, size, 2, 64) + 1 for _ in range(2))
        cache = append(cache, k, v, valid=valid)
        with formulated("gpu"):
            there = appended(there, k, v, valid)
        lengths += valid
        if size == 17:
            lengths -= rng.integers(0, 40, 3)
            cache, there = truncate(cache, lengths), truncate(there, lengths)
        for one, other in zip(leaves(cache), leaves(there), strict=True):
            np.testing.assert_array_equal(one, other)
    assert cache.lengths.tolist() == lengths.tolist()
    if pages:
        q, options = random(7, 3, 33, 4, 64), {"sliding_window": 100}
        with formulated("gpu"):
            at_once = jax.jit(lambda cache, q: rqjax.attend(cache, q, **options))(there, q)
        # Weights have 15 bits, in units of the largest of what is taken together.
        np.testing.assert_allclose(at_once, attend(cache, q, **options), atol=2e-4)


@pytest.mark.full
def test_ragged_batches_are_their_sequences_one_by_one():
    """Lengths below the sinks, within the window and far beyond, in one batch with left padding and alone."""
    lengths = [1, 2, 17, 34, 100, 190]
    k, v, q = random(1, 6, 190, 2, 32), random(2, 6, 190, 2, 32), random(3, 6, 2, 4, 32)
    cache = append(empty(batch=6, heads=2), k, v, valid=jnp.asarray(lengths))
    assert cache.lengths.tolist() == lengths
    found = attend(cache, q)
    for b, length in enumerate(lengths):
        alone = append(empty(batch=1, heads=2), k[b : b + 1], v[b : b + 1], valid=jnp.asarray([length]))
        assert error(attend(alone, q[b : b + 1])[:, -min(length, 2) :], found[b : b + 1, -min(length, 2) :]) < 1e-6
    assert not np.isnan(found).any()


@pytest.mark.full
@pytest.mark.parametrize("time", some([18, 40], [18]))
def test_no_query_looks_ahead(time):
    """Queries of one token more than all see the same codes, and of tokens in codes; each place in a unit of 16."""
    lengths, name = np.arange(50, 66), "rotorquant_3"
    k, v, q = random(1, 16, 65, 1, 32), random(2, 16, 65, 1, 32), random(3, 16, time, 1, 32)

    def appended(k, v):
        return append(empty(name, batch=16), k, v, valid=jnp.asarray(lengths))

    cache, plain = appended(k, v), PlainCache(empty(name, batch=16))
    assert set(np.asarray(lengths - cache.coded)) == set(range(18, 34))
    plain.append(k, v, lengths)
    found = attend(cache, q)
    assert error(found, plain.attend(q)) < 1e-4
    for last in (0, 1, time // 2):  # the query after which all tokens are others
        later = [np.concatenate([x[:, : 65 - time + last + 1], 9 * x[:, : time - last - 1]], 1) for x in (k, v)]
        changed = attend(appended(*later), q)
        np.testing.assert_allclose(changed[:, : last + 1], found[:, : last + 1], atol=1e-5)
        assert error(changed[:, last + 1 :], found[:, last + 1 :]) > 0.1


@pytest.mark.parametrize("name", some(["v3_4", "v2_lean"], ["v2_lean"]))
def test_a_value_that_nobody_looks_at_costs_the_others_nothing(name):
    k, v, q = random(1, 1, 180, 1, 64), random(2, 1, 180, 1, 64), random(3, 1, 1, 1, 64)
    v[:, 50] *= 1e6
    cache, plain = (make(empty(name, batch=1, dim=64)) for make in (lambda cache: append(cache, k, v), PlainCache))
    plain.append(k, v)
    mask = np.arange(192) != 50
    assert error(attend(cache, q, mask=mask), plain.attend(q, mask=mask)) < 1e-4


def test_sums_of_many_tokens_stay_within_their_integers():
    """Equal weights of values with the largest level, as many as took one block."""
    time = 140_000
    value = np.zeros((1, time, 1, 32), np.float32)
    value[..., 0] = 1
    cache = append(empty("rtn_8", batch=1, max_len=time), np.zeros_like(value), value)
    found = attend(cache, value[:, :1])
    np.testing.assert_allclose(found, recoded(cache.value_quantizer, value[:, :1]), atol=1e-3)


@pytest.mark.full
def test_no_tokens_at_all():
    cache, none = append(copied(EMPTY), KV, KV), KV[:, :0]
    assert rqjax.append(cache, none, none).lengths.tolist() == [3, 3]
    assert append(copied(cache), none, none, valid=jnp.zeros(2, int)).lengths.tolist() == [3, 3]
    for run in (attend, rqjax.attend):
        assert run(cache, none.repeat(3, 2)).shape == (2, 0, 3, 32)


@pytest.mark.full
def test_a_cache_may_be_a_constant_of_a_jitted_function():
    cache = append(copied(EMPTY), KV, KV)
    more = jax.jit(lambda k: rqjax.append(cache, k, k))(KV)
    assert more.lengths.tolist() == [6, 6]
    np.testing.assert_array_equal(jax.jit(lambda q: rqjax.attend(more, q))(KV), attend(more, KV))
    full = dataclasses.replace(more, overflow=jnp.ones(2, bool))
    with pytest.raises(ValueError, match=r"sequences \[0, 1\] were appended to past max_len"):
        jax.jit(lambda q: rqjax.attend(full, q))(KV)


OPTIONS = [
    (1, {}),
    (3, {"scale": 0.3, "softcap": 2.0}),
    (3, {"sliding_window": 20}),
    (1, {"sliding_window": 150, "softcap": 5.0}),
]
"""Query heads a key-value head, and options of `attend`."""


@pytest.mark.full
@pytest.mark.parametrize("options", some(range(4), [1]))
def test_attention_is_that_on_decoded_tokens(options):
    """Causal prefill of more queries than one block, grouped; then one token."""
    groups, options = OPTIONS[options]
    k, v, q = random(1, 2, 180, 2, 32), random(2, 2, 180, 2, 32), random(3, 2, 150, 2 * groups, 32)
    cache, plain = append(empty(heads=2), k, v), PlainCache(empty(heads=2))
    plain.append(k, v)
    assert cache.coded.tolist() == [160, 160]
    assert error(attend(cache, q, **options), plain.attend(q, **options)) < 1e-4
    assert error(attend(cache, q[:, -1:], **options), plain.attend(q[:, -1:], **options)) < 1e-4


@pytest.mark.full
@pytest.mark.parametrize("shape", [(192,), (1, 4, 5, 192)])
def test_masks_are_by_token(shape):
    k, v, q = random(1, 2, 180, 2, 32), random(2, 2, 180, 2, 32), random(3, 2, 5, 4, 32)
    mask = np.random.default_rng(4).random(shape) < 0.5
    cache, plain = append(empty(heads=2), k, v), PlainCache(empty(heads=2))
    plain.append(k, v)
    assert error(attend(cache, q, mask=jnp.asarray(mask)), plain.attend(q, mask=mask)) < 1e-4
    assert (attend(cache, q, mask=jnp.zeros(192, bool)) == 0).all()


@pytest.mark.full
def test_mask_of_a_long_prefill():
    k, v, q = random(1, 1, 180, 1, 32), random(2, 1, 180, 1, 32), random(3, 1, 140, 1, 32)
    mask = np.random.default_rng(4).random((1, 1, 140, 192)) < 0.5
    cache, plain = append(empty(batch=1), k, v), PlainCache(empty(batch=1))
    plain.append(k, v)
    assert error(attend(cache, q, mask=jnp.asarray(mask)), plain.attend(q, mask=mask)) < 1e-4


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "dim", "dtype"),
    some(
        [
            ("rotorquant", 80, jnp.bfloat16),
            ("v3_3.5", 96, jnp.float16),
            ("v2_lean", 576, jnp.bfloat16),
            ("rotor_chain_3", 36, jnp.float16),
        ],
        [("v3_3.5", 96, jnp.float16)],
    ),
)
def test_head_dimensions_and_dtypes(name, dim, dtype):
    k, v, q = (jnp.asarray(random(i, 1, 90, 2, dim), dtype) for i in range(3))
    cache = rqjax.strategy(name, jax.random.key(0), dim).cache(1, 2, 128, window=8, sinks=0, dtype=dtype)
    plain = PlainCache(cache)
    plain.append(k, v)
    found = attend(append(cache, k, v), q[:, :3])
    assert found.dtype == dtype
    expected = plain.attend(q[:, :3].astype(jnp.float32))
    assert error(found.astype(jnp.float32), expected) < 1e-4 + 2 * float(jnp.finfo(dtype).eps)


@pytest.mark.full
def test_full_precision_layers_are_exact():
    k, v, q = random(1, 1, 150, 2, 32), random(2, 1, 150, 2, 32), random(3, 1, 2, 4, 32)
    cache, plain = append(empty("float32", batch=1, heads=2), k, v), PlainCache(empty("float32", batch=1, heads=2))
    plain.append(k, v)
    np.testing.assert_array_equal(plain.decoded(0)[0], k[0])
    assert error(attend(cache, q), plain.attend(q)) < 1e-6


@pytest.mark.full
def test_scan_appends_and_attends_as_calls_do():
    k, v = random(1, 60, 2, 1, 1, 32), random(2, 60, 2, 1, 1, 32)

    def step(cache, kv):
        out, cache = rqjax.dot_product_attention(kv[0], *kv, cache)
        return cache, out

    cache, out = jax.jit(lambda cache: jax.lax.scan(step, cache, (k, v)))(empty())
    assert cache.lengths.tolist() == [60, 60]
    plain = PlainCache(empty())
    for i in range(60):
        plain.append(k[i], v[i])
        if i % 20 == 19:
            assert error(out[i], plain.attend(k[i])) < 1e-4


BOUNDS = {"v3_4": 3.6, "v3_3.5": 4.1, "v3_3": 4.7, "v3_2.5": 5.5, "v3_2": 6.5, "rotorquant": 3.6, "rotor_chain_3": 4.7}


@pytest.mark.skipif(jax.config.jax_enable_x64, reason="rotations have 8 bytes a number, and are in these bytes")
@pytest.mark.parametrize("name", some(BOUNDS, ["v3_3.5", "rotorquant"]))
def test_compression_in_bytes(name):
    """Caches keep their compression at T = 8192, d = 128, 8 heads, window, sinks and the quantizer included."""
    cache = rqjax.strategy(name, jax.random.key(0), 128).cache(1, 8, 8192)
    assert cache.nbytes == sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    assert 2 * 2 * 8192 * 8 * 128 / cache.nbytes >= BOUNDS[name]


def test_codes_take_their_bits_and_no_more():
    strategy = rqjax.strategy("v3_2.5/rotorquant_3", jax.random.key(0), 128)
    cache = strategy.cache(2, 4, 4 + 128 + 1024)
    assert cache.capacity == 1024
    bits = strategy.keys.bits_per_vector + strategy.values.bits_per_vector
    assert 8 * rqjax.nbytes((cache.keys, cache.values)) == 2 * 4 * 1024 * bits


@pytest.mark.full
@pytest.mark.parametrize("name", ["rotorquant_3", "bfloat16"])
def test_memory_beside_the_codes_does_not_grow_with_the_history(name):
    """Temporaries of append and attend, with one token and with 512, are as large at 64k tokens as at 512k."""
    strategy = rqjax.strategy(name, jax.random.key(0), 64)

    def sizes(max_len, time):
        q = jax.ShapeDtypeStruct((1, time, 8, 64), jnp.bfloat16)
        kv = jax.ShapeDtypeStruct((1, time, 2, 64), jnp.bfloat16)
        cache = jax.eval_shape(lambda: strategy.cache(1, 2, max_len))
        parts = (attend.lower(cache, q), append.lower(cache, kv, kv))
        return [part.compile().memory_analysis().temp_size_in_bytes for part in parts]

    for time in (1, 512):
        short, long = sizes(2**16, time), sizes(2**19, time)
        assert all(b <= 1.01 * a for a, b in zip(short, long, strict=True))
        blocks = 4 if name != "bfloat16" else 5  # scores with bfloat16 are three products each before they are added
        blocks = blocks if jax.__version_info__ >= (0, 10) else 6  # jax 0.5 shares less memory between loops
        assert max(long) < blocks * BLOCK_BYTES


def divergence(name, bias):
    """Mean KL of the softmax of one head against that on exact keys, at scores with a deviation of 2."""
    k = random(1, 1, 1000, 1, 64) + bias * random(5, 64)
    v, q = random(2, 1, 1000, 1, 64), 2 * random(3, 1, 64, 1, 64)
    cache = empty(name, batch=1, dim=64, max_len=1024)
    plain = PlainCache(cache)
    plain.append(k, v)
    exact, coded = (q[0, :, 0] @ x[:, 0].T / 8 for x in (k[0], plain.decoded(0)[0]))
    logs = [np.asarray(jax.nn.log_softmax(jnp.asarray(s))) for s in (exact, coded)]
    return (np.exp(logs[0]) * (logs[0] - logs[1])).sum(1).mean()


@pytest.mark.full
def test_centering_takes_a_common_bias_off():
    """The Qwen2.5 failure: a bias of ten deviations on every key ruins the scores; centered it costs nothing."""
    free = divergence("rotorquant", 0)
    assert divergence("rotorquant+centered", 10) < 1.2 * free
    assert divergence("rotorquant", 10) > 20 * free
    assert divergence("v3_4+centered", 10) < 1.2 * divergence("v3_4", 0)


def test_a_mean_is_held_in_float32():
    q = rqjax.eden(jax.random.key(0), 64, 4)
    form = rqjax.SubtractedMean(mean=jnp.ones((2, 64), jnp.bfloat16))
    assert rqjax.KVCache.init(3, 2, 300, q, q, key_form=form).key_form.mean.dtype == jnp.float32


def test_centering_leaves_keys_without_a_dominant_mean_as_they_are():
    """A mean that the first keys share by chance, or by slow rotary angles, is not that of all, nor subtracted."""
    k = random(1, 2, 300, 1, DIM) + np.array([1.5, 2.0], np.float32)[:, None, None, None]  # shares of 0.69 and 0.8
    cache = append(empty(max_len=320), k, random(2, 2, 300, 1, DIM))
    np.testing.assert_array_equal(cache.key_form.mean[0], 0)
    np.testing.assert_allclose(cache.key_form.mean[1], 2, atol=0.8)


def test_quantizer_belongs_to_the_cache():
    """A quantizer that many caches share outlives the donation of each."""
    quantizer = rqjax.turboquant(jax.random.key(0), 32, 3)
    caches = [rqjax.KVCache.init(1, 1, 64, quantizer, quantizer) for _ in range(2)]
    k = random(1, 1, 3, 1, 32)
    assert [append(cache, k, k).lengths.tolist() for cache in caches] == [[3], [3]]
    assert caches[0].value_quantizer is caches[0].key_quantizer
    assert quantizer.encode(k)[0].shape == (1, 3, 1)


@pytest.mark.full
def test_a_cache_too_small_for_codes():
    cache = empty(max_len=10)
    assert cache.capacity == 0
    k, v = random(1, 2, 10, 1, 32), random(2, 2, 10, 1, 32)
    plain = PlainCache(cache)
    plain.append(k, v)
    cache = append(cache, k, v)
    assert error(attend(cache, k), plain.attend(k)) < 1e-6
    cache = rqjax.grow(cache, 200)
    more = random(3, 2, 60, 1, 32)
    plain.append(more, more)
    assert error(attend(append(cache, more, more), k), plain.attend(k)) < 1e-4


def test_overflow_under_jit_spoils_nothing_and_is_reported():
    cache = append(copied(EMPTY), random(1, 2, 180, 1, 32), random(2, 2, 180, 1, 32))
    before = [np.asarray(leaf) for leaf in leaves(cache)]
    k = random(3, 2, 20, 1, 32)
    after = append(cache, k, k, valid=jnp.asarray([12, 13]))
    assert after.lengths.tolist() == [192, 180]
    assert after.overflow.tolist() == [False, True]
    for a, b in zip(leaves(after), before, strict=True):
        np.testing.assert_array_equal(a[1], b[1])
    with pytest.raises(ValueError, match=r"sequences \[1\] were appended to past max_len = 192"):
        rqjax.attend(after, k)


KV = np.ones((2, 3, 1, 32), np.float32)
WRONG = [
    (lambda c: rqjax.append(c, KV[:1], KV), r"expected k of shape \(2, time, 1, 32\), got \(1, 3, 1, 32\)"),
    (lambda c: rqjax.append(c, KV, KV.repeat(2, 2)), r"expected v of shape \(2, time, 1, 32\), got \(2, 3, 2, 32\)"),
    (lambda c: rqjax.append(c, KV[..., :16], KV), r"expected k of shape \(2, time, 1, 32\), got \(2, 3, 1, 16\)"),
    (lambda c: rqjax.append(c, KV, KV[:, :2]), r"expected k and v of one shape, got \(2, 3, 1, 32\) and"),
    (lambda c: rqjax.append(c, KV.astype(int), KV), "expected k of a floating-point dtype, got int"),
    (lambda c: rqjax.append(c, KV, KV, valid=np.array([1, 4])), r"expected valid from 0 to 3, got \[1, 4\]"),
    (lambda c: rqjax.append(c, KV, KV, valid=np.array([1, -1])), r"expected valid from 0 to 3, got \[1, -1\]"),
    (lambda c: rqjax.append(c, KV, KV, valid=np.array([1.0, 2.0])), "expected valid to be whole numbers, got float64"),
    (lambda c: rqjax.append(c, KV, KV, valid=np.array([True, True])), "expected valid to be whole numbers, got bool"),
    (lambda c: rqjax.append(c, KV, KV, valid=np.array([1, 2**32 + 1])), r"expected valid from 0 to 3, got"),
    (
        lambda c: rqjax.append(c, KV, KV, valid=np.array([1])),
        r"expected valid to be whole numbers of shape \(2,\), got \(1,\)",
    ),
    (
        lambda c: rqjax.append(c, KV.repeat(99, 1), KV.repeat(99, 1)),
        "expected at most max_len = 192 tokens, got k of 297",
    ),
    (lambda c: rqjax.append(c, KV.repeat(61, 1), KV.repeat(61, 1)), r"no room: lengths \[10, 10\] and 183 more tokens"),
    (lambda c: rqjax.attend(c, KV[:1]), r"expected q of shape \(2, time, a multiple of 1, 32\), got \(1, 3, 1, 32\)"),
    (lambda c: rqjax.attend(c, KV.astype(int)), "expected q of a floating-point dtype, got int"),
    (
        lambda c: rqjax.attend(c, KV, mask=np.ones(5, bool)),
        r"expected a boolean mask broadcastable to \(2, 1, 3, 192\), got bool \(5,\)",
    ),
    (lambda c: rqjax.attend(c, KV, mask=np.ones(192)), "expected a boolean mask"),
    (lambda c: rqjax.attend(c, KV, sliding_window=0), "expected sliding_window to be a whole number from 1 to"),
    (lambda c: rqjax.attend(c, KV, softcap=-1.0), "expected softcap to be positive, got -1.0"),
    (lambda c: rqjax.attend(c, KV, sink_logits=np.zeros(3)), r"expected sink_logits of shape \(1,\), got \(3,\)"),
    (lambda c: rqjax.attend(c, KV, sink_logits=np.zeros(1, int)), "expected sink_logits of a floating-point dtype"),
    (lambda c: rqjax.grow(c, 100), "expected max_len to be a whole number from 192 to"),
    (lambda c: empty(max_len=0), "expected max_len to be a whole number from 1 to"),
    (lambda c: empty(window=-1), "expected window to be a whole number from 0 to"),
    (
        lambda c: rqjax.KVCache.init(1, 1, 9, rqjax.Exact(32), rqjax.Exact(64)),
        "value_quantizer of dimension 32 .* got 64",
    ),
    (
        lambda c: rqjax.KVCache.init(1, 1, 9, rqjax.Exact(32), rqjax.Exact(32), dtype=int),
        "expected dtype to be a float",
    ),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=[message[:40] for _, message in WRONG])
def test_wrong_use_is_one_clear_error_and_the_cache_unharmed(call, message):
    cache = append(copied(EMPTY), *[random(1, 2, 10, 1, 32)] * 2)
    with pytest.raises((ValueError, TypeError), match=message):
        call(cache)
    assert cache.lengths.tolist() == [10, 10]
    assert append(cache, KV, KV).lengths.tolist() == [13, 13]


@pytest.mark.full  # annotations, which the core checks, say so themselves
def test_other_things_than_a_cache_are_refused():
    for call in (
        lambda: rqjax.append(KV, KV, EMPTY),
        lambda: rqjax.append((EMPTY, EMPTY), KV, KV),
        lambda: rqjax.attend(KV, EMPTY),
        lambda: rqjax.dot_product_attention(EMPTY, KV, KV, KV),
    ):
        with pytest.raises(TypeError, match=r"^expected cache to be a KVCache, got (ndarray|ArrayImpl|tuple)$"):
            call()
