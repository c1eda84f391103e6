"""The decode attention kernel, interpreted, against decoded vectors in float64, and against attention in XLA.

The interpreter runs what each thread does, but for the few operations of `pallas_kernels.gpu.registers`: these have
twins.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rqjax
from pallas_kernels.gpu import columns, mosaic, registers, rings
from pallas_kernels.gpu.decode_attention import decode_attention
from pallas_kernels.gpu.turning import Turning
from pallas_kernels.packed import Packed
from rqjax.backends import hopper
from rqjax.core import Unsupported
from rqjax.core.dispatch import only_xla
from tests.tools import computed
from tests.tools.packed_codes import attention, by_token, encoded, error, hidden, in_pages
from tests.tools.suites import some

TOLERANCE = 5e-4
"""Relative root mean square error of a head: queries and weights are rounded to 15 bits of their largest. Measured:
3e-4 at most."""

CASES = {
    "2 bits, 4 bits, one query head": (64, 1, "2", "4", (256, 200), 1),
    "3 bits, 2 bits, an empty sequence, idle splits": (128, 3, "3", "2", (300, 0), 3),
    "4 bits, 3 bits, heads of 256, 16 query heads": (256, 16, "4", "3", (120, 17), 1),
    "affine groups of 64": (128, 8, "4 affine 64", "4 affine 64", (384, 129), 3),
    "affine, one group, more blocks than stages": (128, 5, "4 affine 128", "4 affine 128", (600, 1), 1),
    "affine keys, heads of 64": (64, 9, "4 affine 64", "1", (250, 16), 2),
    "affine values of 2 bits": (64, 8, "3", "2 affine 64", (128, 60), 1),
    "trellis of 3 bits, 2 bits": (128, 3, "3 trellis", "2 trellis", (300, 77), 2),
    "trellis of 4 bits, 1 bit, heads of 256": (256, 2, "4 trellis", "1 trellis", (128, 40), 1),
    "affine keys, trellis values": (128, 2, "4 affine 64", "4 trellis", (256, 9), 1),
    "columns": (64, 3, "16 columns", "13 columns", (256, 200), 2),
    "columns, heads of 256": (256, 2, "50 columns", "128 columns", (128, 40), 1),
}
"""Dimension, query heads a key-value head, kinds of keys and values, lengths, splits. Kinds begin with bits, those for
columns with the bytes of a ring."""
TURNED = {
    "trellis in pages": ((64, 5, "3 trellis", "2 trellis", (128, 77), 1), True),
    "columns, heads of 128": ((128, 4, "32 columns", "2", (200, 130), 1), False),
    "columns of odd rows in pages, two calls": ((64, 9, "13 columns", "13 columns", (128, 100), 1), True),
}
"""Cases of keys that turn after they are decoded, and whether they are in pages."""
IN_FLOAT16 = 5
"""Times the tolerance for keys that turn: they and their queries are rounded to 11 bits, not to 15 of the largest.
Measured: 3.2 at most."""
PAGED = (
    "3 bits, 2 bits, an empty sequence, idle splits",
    "trellis of 4 bits, 1 bit, heads of 256",
    "columns, heads of 256",
)
"""Cases with pages: each kind once, the others side by side."""


def of_kind(rng, kind, batch, tokens, dim, *, transposed):
    """Random codes, and the vectors that they stand for."""
    if kind.endswith(" trellis"):
        return encoded_on_a_trellis(rng, int(kind.split()[0]), batch, tokens, dim)
    if kind.endswith(" columns"):
        return encoded_in_columns(rng, int(kind.split()[0]), batch, tokens, dim)
    return encoded(rng, kind, batch, tokens, dim, transposed=transposed)


def encoded_on_a_trellis(rng, bits, batch, tokens, dim):
    """Random codes of a trellis, and their vectors: any bits are codes of some vector."""
    leaf = rqjax.trellis_coded(dim, bits)
    words = jnp.asarray(rng.integers(0, 2**32, (batch, 1, tokens, dim * bits // 32)), jnp.uint32)
    scale = jnp.asarray(rng.lognormal(sigma=0.4, size=(batch, 1, 1, tokens)) / 60, jnp.bfloat16)
    stream = leaf.laid_out(words, transposed=False).array
    vectors = np.asarray(leaf.table(leaf.states(words)), np.float64)
    levels = np.asarray(leaf.table(jnp.arange(256, dtype=jnp.uint8)))
    vectors *= np.asarray(scale, np.float64).swapaxes(2, 3)
    return Packed((stream.bits,), scale, None, rings.StateLevels(tuple(levels.tolist()))), vectors


def encoded_in_columns(rng, rows, batch, tokens, dim):
    """Random codes of columns with any bits of the ring and levels anywhere. The last column has the scale alone."""
    ring = rng.integers(0, 256, (batch, 1, rows, tokens), np.uint8)
    starts, widths = rng.integers(0, 8 * rows, dim), rng.integers(0, 9, dim)
    places, levels = rng.integers(0, 1024, dim) >> widths << widths, rng.integers(-127, 128, (1, 1280), np.int8)
    bits = np.unpackbits(ring, axis=2, bitorder="little")[:, :, (starts[:, None] + np.arange(8)) % (8 * rows)]
    indices = (bits * (1 << np.arange(8) & (1 << widths[:, None]) - 1)[..., None]).sum(3)
    vectors = np.swapaxes(levels[0][places[:, None] + indices], 2, 3).astype(np.float64)
    scale = jnp.asarray(rng.lognormal(sigma=0.4, size=(batch, 1, 1, tokens)) / 60, jnp.bfloat16)
    vectors = np.concatenate([vectors, np.ones((batch, 1, tokens, 1))], axis=3)
    lookup = columns.Lookup(*(x.astype(np.int32) for x in (starts, widths, places)), levels)
    return Packed((ring,), scale, None, lookup), vectors * np.asarray(scale, np.float64).swapaxes(2, 3)


def turning_of(rng, k, dim):
    """A matrix that makes keys of vectors of levels, with planes of all sizes; and the keys, turned."""
    tokens, half, first = k.shape[2], dim // 2, 300
    sizes = np.tile(rng.lognormal(size=half), 2)[:, None]
    matrix = (rng.normal(size=(1, dim, k.shape[3])) * sizes / np.sqrt((sizes**2).sum())).astype(np.float32)
    frequencies = rqjax.Rope(1e4).frequencies(dim)
    left, right = np.split(k @ np.swapaxes(matrix[0].astype(np.float64), 0, 1), 2, axis=3)
    angles = (first + np.arange(tokens))[:, None] * frequencies.astype(np.float64)
    cos, sin = np.cos(angles), np.sin(angles)
    begins = np.stack([cos[::64], sin[::64]]).astype(np.float32)
    k = np.concatenate([left * cos - right * sin, right * cos + left * sin], axis=3)
    return Turning(np.eye(dim, dtype=np.float32), matrix, frequencies, begins), k


@functools.cache
def kernel(splits, softcap, latent):
    """The kernel with options, one function for all cases; `latent` is the dimension of values that are in keys."""
    options = {"splits": splits, "softcap": softcap} | ({} if latent is None else {"latent": True, "dim": latent})
    return lambda *a: decode_attention(*a[:6], tables=a[6], turning=a[7], **options, interpret=mosaic.interpret())


def run(
    dim,
    query_heads,
    keys,
    values,
    stop,
    splits,
    *,
    start=None,
    softcap=None,
    vary=None,
    paged=False,
    turned=False,
    latent=False,
):
    """The kernel's output beside the float64 one: of both the output and the log of the total."""
    rng, batch, tokens = np.random.default_rng(0), len(stop), -(-max(stop) // 128) * 128
    keys, k = of_kind(rng, keys, batch, tokens, 64 if latent else dim, transposed=latent)
    values, v = of_kind(rng, values, batch, tokens, dim, transposed=True)
    k = np.concatenate([k, v], axis=3) if latent else k
    turning = None
    if turned:
        turning, k = turning_of(rng, k, dim)
    y = rng.normal(size=(batch, 1, query_heads, k.shape[3])).astype(np.float32) * dim**-0.5
    if vary is not None:
        y, keys, values, k, v = vary(y, keys, values, k, v)
    start = np.zeros(batch, np.int32) if start is None else np.asarray(start, np.int32)
    seen = (np.arange(tokens) >= start[:, None]) & (np.arange(tokens) < np.asarray(stop)[:, None])
    keys, values = hidden(keys, seen), hidden(values, seen)
    shift, tables = None, None
    if paged:
        tables, keys, values = in_pages(rng, keys, values, 3 if latent else None)
        tables = np.where(seen.reshape(*tables.shape, 128).any(2), tables, -1)  # others need not be there
        shift = rng.normal(size=(batch, 1, query_heads, tokens if by_token(keys) else 1)).astype(np.float32)
    arguments = y, keys, values, start, np.asarray(stop, np.int32)[:, None], shift, tables, turning
    sums = computed.run(kernel(splits, softcap, dim if latent else None), *arguments)
    total = np.asarray(sums.total, np.float64)
    output = np.asarray(sums.values, np.float64) / np.where(total > 0, total, 1)[..., None]
    expected = attention(k, v, y, seen, softcap, 0 if shift is None else shift)
    with np.errstate(divide="ignore"):
        return (output, np.asarray(sums.largest) + np.log(total)), expected


def check(found, expected, *, times=1):
    assert error(found[0], expected[0]) < times * TOLERANCE
    some = np.isfinite(expected[1])
    np.testing.assert_array_equal(np.isfinite(found[1]), some)
    np.testing.assert_allclose(found[1][some], expected[1][some], atol=times * 1e-3)


@pytest.mark.parametrize("case", some([case for case in CASES if case not in PAGED], list(CASES)[:1]))
def test_matches_attention_to_decoded_vectors(case):
    check(*run(*CASES[case]))


@pytest.mark.parametrize("case", some(PAGED, []))
def test_pages_in_any_order_and_what_is_added_to_each_token(case):
    check(*run(*CASES[case], paged=True))


@pytest.mark.full
@pytest.mark.parametrize("case", TURNED)
def test_keys_that_turn_after_they_are_decoded(case):
    arguments, paged = TURNED[case]
    check(*run(*arguments, paged=paged, turned=True), times=IN_FLOAT16)


@pytest.mark.full
def test_start_and_softcap():
    check(*run(64, 8, "4", "4", (256, 190), 1, start=(130, 5), softcap=1.5))


@pytest.mark.full
def test_a_large_weight_of_a_small_value_costs_no_bits():
    """One token takes nearly all of the weight in its block, and its value is small: the others still count."""

    def vary(y, keys, values, k, v):
        k, v, scales = k.copy(), v.copy(), (np.array(keys.scales), np.array(values.scales))
        scores = np.einsum("bhgd,bhtd->bt", y, k)[:, :100]
        for b, t in enumerate(scores.argmax(1)):
            for x, scale, factor in ((k, scales[0], 14 / scores[b, t]), (v, scales[1], 2.0**-12)):
                factor = 2 ** np.round(np.log2(factor))
                x[b, :, t] *= factor
                scale[b, :, :, t] *= np.asarray(factor, scale.dtype)
        return y, keys._replace(scales=scales[0]), values._replace(scales=scales[1]), k, v

    check(*run(64, 1, "4", "4", (256, 256), 1, vary=vary))


@pytest.mark.full
@pytest.mark.parametrize(("dtype", "kind"), [("float16", "4"), ("float32", "4 affine 64")])
def test_scales_of_other_dtypes(dtype, kind):
    """The vectors are those of the scales in bfloat16, which both dtypes hold."""

    def vary(y, keys, values, k, v):
        def of(codes):
            biases = None if codes.biases is None else np.asarray(codes.biases, dtype)
            return codes._replace(scales=np.asarray(codes.scales, dtype), biases=biases)

        return y, of(keys), of(values), k, v

    check(*run(64, 3, kind, kind, (128, 70), 1, vary=vary))


@pytest.mark.full
@pytest.mark.parametrize("unseen", [np.inf, -np.inf, 3e38])
def test_numbers_of_tokens_that_no_query_sees_do_not_count(unseen, monkeypatch):
    before = hidden

    def hidden_by(codes, seen):
        codes = before(codes, seen)
        return codes._replace(scales=np.where(np.isnan(codes.scales), unseen, codes.scales).astype(codes.scales.dtype))

    monkeypatch.setitem(globals(), "hidden", hidden_by)
    check(*run(64, 4, "2", "2", (200, 60), 1, start=(130, 5)))


@pytest.mark.parametrize("width", [64, 128])
def test_swizzled_addresses_are_those_of_the_hardware(width):
    """The chunk c of 16 bytes in row r lies where chunk c ^ (r mod 8) would (128 bytes), or c ^ (r / 2 mod 4) (64)."""
    rows, columns = np.meshgrid(np.arange(32), np.arange(256), indexing="ij")
    at = registers.swizzled(rows, columns, 256, width)
    assert sorted(at.ravel()) == list(range(32 * 256))
    tile, inside = at // (8 * width), at % (8 * width)
    np.testing.assert_array_equal(tile, rows // 8 * (256 // width) + columns // width)
    np.testing.assert_array_equal(inside // width, rows % 8)
    chunk = columns % width // 16 ^ (rows % 8 if width == 128 else rows // 2 % 4)
    np.testing.assert_array_equal(inside % width, chunk * 16 + columns % 16)


def test_columns_find_their_rows_where_the_hardware_has_them():
    rows, tokens = np.meshgrid(np.arange(48), np.arange(0, 128, 4), indexing="ij")
    swizzled, plain = (columns.Columns(64, count, 1280)._row(rows) ^ tokens for count in (48, 50))
    np.testing.assert_array_equal(swizzled, registers.swizzled(rows, tokens, 128, 128))
    np.testing.assert_array_equal(plain, 128 * rows + tokens)


@functools.cache
def empty(name="identity_4", *, batch=2, dim=64, window=16, pages=None, latent=None):
    rope = rqjax.Rope(1e4, share=64 / dim) if "turned" in name or "pre_rope" in name else None
    strategy = rqjax.strategy(name, jax.random.key(0), dim, latent=latent)
    cache = strategy.cache(batch, 1, 320, window=window, sinks=2, rope=rope, pages=pages)
    if pages is None:
        return cache
    order = np.random.default_rng(0).permutation(pages)[: cache.tables.size].astype(np.int32)
    return dataclasses.replace(cache, tables=jnp.asarray(order.reshape(cache.tables.shape)))


def filled(name, *, lengths, time, pages=None):
    """A cache, and queries of its newest tokens."""
    rng, batch = np.random.default_rng(1), len(lengths)
    k, v = rng.normal(size=(2, batch, max(lengths), 1, 64)).astype(np.float32)
    k[0] += 4  # a mean that dominates
    append = rqjax.append if "trellis" not in name else only_xla(rqjax.append)  # its kernel takes minutes interpreted
    append = jax.jit(append, compiler_options=computed.FAST)
    cache = append(empty(name, batch=batch, pages=pages), k, v, valid=jnp.asarray(lengths))
    return cache, jnp.asarray(rng.normal(size=(batch, time, 3, 64)), jnp.float32)


@pytest.fixture
def interpreted():
    token = hopper.INTERPRET.set(mosaic.interpret())
    yield
    hopper.INTERPRET.reset(token)


@functools.cache
def attends(implementation):
    """Attention without options, one function, so that operands of equal shapes share its program."""
    return functools.partial(rqjax.attend, implementation=implementation)


def both(cache, q, **options):
    """Attention by the kernel, and by XLA."""
    names = "mosaic_gpu", "xla"
    by_kernel, plain = (functools.partial(attends(name), **options) if options else attends(name) for name in names)
    found = computed.run(by_kernel, cache, q)
    expected = computed.compiled(plain)(cache, q)
    return np.asarray(found, np.float64), np.asarray(expected, np.float64)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "lengths", "time", "options"),
    some(
        [
            ("rotorquant_4/v3_2", (150, 20), 2, {}),
            (
                "eden_3/v2_lean+centered",
                (290, 0),
                1,
                {"softcap": 2.0, "sink_logits": np.array([0.5, -np.inf, 3]), "scale": 0.3},
            ),
            ("turboquant_trellis_3/rotorquant_trellis_2", (310, 150), 1, {"sliding_window": 140}),
            ("eden_3+centered+pre_rope", (310, 1), 1, {"pages": 9}),
            ("eden_4/eden_3+turned", (310, 180), 1, {"sliding_window": 140}),
        ],
        [("rotorquant_4/v3_2", (150, 20), 2, {})],
    ),
)
@pytest.mark.usefixtures("interpreted")
def test_attend_agrees_with_xla(name, lengths, time, options):
    """The sinks and the window are in the same softmax, and sums are rotated back."""
    options = dict(options)
    pages = options.pop("pages", None)
    found, expected = both(*filled(name, lengths=lengths, time=time, pages=pages), **options)
    assert error(found, expected) < TOLERANCE * (IN_FLOAT16 if "pre_rope" in name else 1)


@pytest.mark.full
@pytest.mark.usefixtures("interpreted")
def test_a_transform_code_of_keys_before_they_turn():
    """Heads have quantizers of their own, some coordinates do not turn, and those that do grow longer."""
    rng, lengths = np.random.default_rng(2), (300, 130, 1)
    loud = np.exp(np.linspace(0, -3, 64)).astype(np.float32)
    x, k, v = (rng.normal(size=(*shape, 64)).astype(np.float32) * loud for shape in ((2, 999), *[(3, 300, 2)] * 2))
    keys = rqjax.klt_trellis(jax.random.key(0), x + 0.5, 2)
    rope = rqjax.Rope(1e4, "yarn", (4.0, 64.0, 32.0, 1.0, 1.2), 0.5)
    strategy = rqjax.Strategy(keys, rqjax.eden(jax.random.key(1), 64, 4), rqjax.BeforeRope())
    cache = strategy.cache(3, 2, 512, window=128, sinks=4, rope=rope)
    append = jax.jit(only_xla(rqjax.append), compiler_options=computed.FAST)
    cache = append(cache, k + 0.5, v, valid=jnp.asarray(lengths))
    found, expected = both(cache, jnp.asarray(rng.normal(size=(3, 1, 8, 64)), jnp.float32))
    assert error(found, expected) < IN_FLOAT16 * TOLERANCE


@pytest.mark.full
@pytest.mark.usefixtures("interpreted")
def test_queries_of_a_truncated_cache_see_no_later_codes():
    """The newest tokens are in codes, so that the first of two queries sees one less than the second."""
    cache, q = filled("rotorquant_4/v3_2", lengths=(150, 120), time=2)
    cache = rqjax.truncate(cache, jnp.array([130, 118]))
    assert (cache.coded[0] + cache.sinks, cache.lengths[0]) == (130, 130)
    found, expected = both(cache, q)
    assert error(found, expected) < TOLERANCE


@pytest.mark.full
@pytest.mark.usefixtures("interpreted")
def test_says_why_there_is_no_kernel():
    def reason(name="identity_4", *, time=1, q_heads=3, mask=None, sliding_window=None, **options):
        cache = empty(name, **options)
        q = jnp.ones((2, time, q_heads, cache.exact_keys.shape[-1]))
        with pytest.raises(Unsupported) as error:
            rqjax.attend(cache, q, mask=mask, sliding_window=sliding_window, implementation="mosaic_gpu")
        return str(error.value).removeprefix("no mosaic_gpu kernel for this attention: ")

    assert reason(dim=32) == "head_dim is 32, not one of (64, 128, 256)"
    assert reason(q_heads=17) == "17 queries share a head of keys and values, more than 16"
    assert reason(mask=np.ones(320, bool)) == "there is a mask"
    late = "before they turn with their positions"
    assert reason("eden_4+pre_rope", dim=256) == f"keys: 256 dimensions {late}, not (64, 128)"
    assert reason("v2_lean+pre_rope") == f"keys: an Affine of keys {late}"
    assert reason("turboquant_trellis_3+turned") == "keys: a mean that turns, around other than a Scalar or an Affine"
    assert reason(time=3, sliding_window=9) == "the 3 queries of a sequence do not all see the same codes"
    assert reason(window=320) == "the cache has room for no codes (capacity 0)"
    assert reason("v2_lean", dim=256, q_heads=16) == "keys: 4 groups with 16 queries, more than 32 products"
    assert reason("identity_4/rtn_5") == "values: 5 bits, more than 4"
    assert reason("eden_4", dim=160, latent=96) == (
        "keys: parts of (64, 96) dimensions, not one of (64, 128) and behind it one of (128, 256, 512)"
    )
    assert reason("eden_4/kivi_4", dim=192, latent=128).startswith("values: ")
    assert reason("rotorquant_prod_3").startswith("keys: the nest is not rotations and a norm")
    assert reason("rotorquant_paper_3") == "keys: a rotation into more dimensions"
    paper = rqjax.METHODS["rotorquant_paper"](jax.random.key(0), 64, 3).inner.rotation
    wide = rqjax.Normalized(rqjax.Rotated(paper, rqjax.lloyd_max(paper.wide_dim, 3)))
    cache = rqjax.KVCache.init(2, 2, 320, wide, wide)
    with pytest.raises(Unsupported, match="keys: a rotation into more dimensions"):
        rqjax.attend(cache, jnp.ones((2, 1, 6, 64)), implementation="mosaic_gpu")


def test_refuses_by_name(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    with pytest.raises(Unsupported, match="need a Hopper or Blackwell GPU"):
        rqjax.attend(empty(), jnp.ones((2, 1, 3, 64)), implementation="mosaic_gpu")
