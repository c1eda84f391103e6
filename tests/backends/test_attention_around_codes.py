"""The kernels before and behind the decode attention kernel, interpreted, against float64, and that which writes a new
token into the rings, against plain JAX."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rqjax
from pallas_kernels.gpu import attention_prologue, mosaic
from pallas_kernels.gpu.attention_epilogue import epilogue
from pallas_kernels.gpu.attention_prologue import Exact, Window, prologue
from pallas_kernels.gpu.turning import turned_queries
from pallas_kernels.packed import LARGEST, NEVER
from rqjax.backends import hopper
from rqjax.backends.hopper_attention import _angles as angles_of
from rqjax.cache.append import entered
from rqjax.cache.queries import Queries
from tests.tools import computed
from tests.tools.suites import some

LOG2E = np.log2(np.e)
TOLERANCE = 3e-6
"""Relative to the largest number of an array: all is computed in float32. Measured: 6e-7 at most."""
CASES = {
    "one query, an empty sequence": {"lengths": (300, 0), "each": 1},
    "heads of 128, six queries, float32": {"dim": 128, "each": 6, "dtype": "float32", "window": 60},
    "heads of 256, means, groups": {"dim": 256, "each": 4, "groups": 4, "mean": True, "window": 100},
    "sliding window, softcap": {"sliding": 20, "softcap": 2.0, "dtype": "float16", "each": 2},
    "sliding window behind all codes": {"sliding": 140, "lengths": (5, 290), "window": 150},
    "tokens in codes that the window has not passed": {"held": (128, 40), "lengths": (150, 60), "window": 120},
    "odd columns, a matrix a head": {"columns": 192, "per_head": True, "mean": True, "each": 3},
    "values that are not numbers, where no query looks": {"hidden": True, "sliding": 20, "window": 60},
}


def relative(found, expected):
    return np.abs(np.asarray(found, np.float64) - expected).max() / np.abs(expected).max()


def cache_of(rng, dim, window, dtype, lengths, held):
    """A cache with any numbers in full precision."""
    heads = 2
    cache = rqjax.strategy("identity_4", jax.random.key(0), dim).cache(2, heads, 420, window=window, sinks=3)
    exact = {
        name: jnp.asarray(rng.normal(size=cache.exact_keys.shape), dtype) for name in ("exact_keys", "exact_values")
    }
    bounds = {"lengths": jnp.asarray(lengths, jnp.int32), "held": jnp.asarray(held, jnp.int32)}
    return dataclasses.replace(cache, **exact, **bounds)


def run_prologue(
    rng, *, dim=64, each=3, dtype="bfloat16", window=16, lengths=(300, 77), held=(0, 0), sliding=None, softcap=None,
    groups=1, mean=False, columns=None, per_head=False, hidden=False,
):  # fmt: skip
    """The kernel's operands and sums beside those in float64."""
    cache = cache_of(rng, dim, window, dtype, lengths, held)
    (batch, heads), columns = cache.exact_keys.shape[:2], columns or dim
    q = jnp.asarray(rng.normal(size=(batch, 1, heads * each, dim)), dtype)
    queries = Queries.of(cache, q, cache.lengths[:, None] - 1, None, 0.3, sliding, softcap)
    seen = np.asarray(queries.sees(cache.exact_tokens()[:, None, None]))[:, :, :1]
    if hidden:
        values = jnp.where(seen[:, 0, 0, :, None][:, None], cache.exact_values, jnp.nan)
        cache = dataclasses.replace(cache, exact_values=values)
    matrix = rng.normal(size=(heads if per_head else 1, dim, columns)).astype(np.float32)
    of_groups = rng.normal(size=(len(matrix), groups, dim)).astype(np.float32)
    mean = rng.normal(size=(batch, heads, dim)).astype(np.float32) if mean else None
    padded = -(-each // 8) * 8

    def call(q, keys, values, lengths, held, matrix, of_groups, mean):
        return prologue(
            q, keys, values, lengths, held, matrix, of_groups, jnp.full(1, 0.3), mean,
            window=Window(cache.sinks, cache.window, cache.unit, sliding), padded=padded, unit=0.5,
            softcap=None if softcap is None else softcap * LOG2E, interpret=mosaic.interpret(),
        )  # fmt: skip

    arguments = q, cache.exact_keys, cache.exact_values, cache.lengths, cache.held, matrix, of_groups, mean
    found, exact, _ = computed.run(call, *arguments)

    y = np.asarray(q, np.float64).reshape(batch, heads, each, dim) * 0.3
    products = [y * LOG2E @ np.float64(x) for x in (matrix, np.swapaxes(of_groups, 1, 2))]
    shift = np.zeros((batch, heads, each)) if mean is None else np.einsum("bhrd,bhd->bhr", y, mean) * LOG2E
    scores = np.einsum("bhrd,bhtd->bhrt", y, np.asarray(cache.exact_keys, np.float64))
    scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
    weights = np.where(seen, np.exp(np.where(seen, scores, 0)), 0)
    sums = weights @ np.nan_to_num(np.asarray(cache.exact_values, np.float64))
    start, stop = (x[:, 0, 0, 0] for x in queries.coded(cache))
    return found, exact, (products, shift, start, stop, weights.sum(-1), sums)


@pytest.mark.parametrize("case", some(CASES, list(CASES)[:1]))
def test_queries_and_tokens_in_full_precision(case):
    rng, options = np.random.default_rng(0), CASES[case]
    found, exact, ((products, groups), shift, start, stop, total, sums) = run_prologue(rng, **options)
    batch, heads, each = total.shape
    by_head = lambda x: np.asarray(x, np.float64).reshape(batch, heads, *x.shape[1:])  # noqa: E731
    limbs, columns = by_head(found.vectors), by_head(found.columns)
    padded = limbs.shape[2] // 2
    unit = columns[:, :, 0] / 0.5
    whole = (limbs[:, :, :padded] * 128 + limbs[:, :, padded:]) * unit[..., None]
    assert np.all(np.abs(whole[:, :, :each] - products) <= 0.51 * unit[:, :, :each, None])
    np.testing.assert_allclose(unit[:, :, :each], np.abs(products).max(-1) / LARGEST, rtol=1e-5)
    assert not shift.any() or relative(columns[:, :, 1, :each], shift) < TOLERANCE
    assert relative(np.swapaxes(columns[:, :, 2:, :each], 2, 3), groups) < TOLERANCE
    assert not whole[:, :, each:].any()
    assert not columns[:, :, :, each:].any()
    np.testing.assert_array_equal(found.start.reshape(batch, heads).T[0], start)
    np.testing.assert_array_equal(found.stop.reshape(batch, heads).T[0], stop)

    largest = by_head(exact.largest)[:, :, :, :each]
    weights = np.exp2(largest, where=largest > NEVER / 2, out=np.zeros_like(largest))
    assert relative((weights * by_head(exact.total)[:, :, :, :each]).sum(2), total) < TOLERANCE
    assert relative((weights[..., None] * by_head(exact.sums)[:, :, :, :each]).sum(2), sums) < TOLERANCE


@pytest.mark.parametrize(("each", "dim"), some([(3, 64), (6, 128)], [(3, 64)]))
def test_queries_of_keys_that_turn(each, dim):
    rng, padded = np.random.default_rng(3), -(-each // 4) * 4
    cache = cache_of(rng, dim, 16, "float32", (300, 77), (0, 0))
    q = rng.normal(size=(2, 1, 2 * each, dim)).astype(np.float32)
    matrix = rng.normal(size=(2, dim, 2 * dim)).astype(np.float32)

    def call(q, keys, values, lengths, held, matrix):
        return prologue(
            q, keys, values, lengths, held, matrix, None, jnp.full(1, 0.3), None,
            window=Window(cache.sinks, cache.window, cache.unit, None), padded=padded, unit=0.5, softcap=None,
            turns=True, interpret=mosaic.interpret(),
        )  # fmt: skip

    exact = cache.exact_keys, cache.exact_values
    found, *_ = computed.run(call, q, *exact, cache.lengths, cache.held, matrix)
    y = np.pad(0.3 * LOG2E * q.reshape(4, each, dim), [(0, 0), (0, padded - each), (0, 0)])
    vectors, factors = turned_queries(matrix, y.astype(np.float32))
    assert found.vectors.shape == vectors.shape
    assert relative(found.vectors, np.float64(vectors)) < TOLERANCE
    assert relative(found.columns[:, 0], 0.5 * np.float64(factors)) < TOLERANCE
    assert not found.columns[:, 1].any()


TURNING = {
    "all coordinates": {"rope": rqjax.Rope(1e4), "each": 3},
    "a share of them, longer ones, a sliding window": {
        "rope": rqjax.Rope(5e5, "yarn", (4.0, 128.0, 32.0, 1.0, 1.3), share=0.5),
        "dim": 128,
        "each": 6,
        "sliding": 150,
    },
    "all turn fast, or not at all": {"rope": rqjax.Rope(1.0), "each": 1, "lengths": (2, 419)},
    "none turns, a sequence without tokens": {"rope": rqjax.Rope(1e4, "none"), "each": 5, "lengths": (0, 77)},
}


@pytest.mark.parametrize("case", some(TURNING, list(TURNING)[:1]))
def test_queries_and_a_mean_turn_with_positions(case, monkeypatch):
    monkeypatch.setattr(attention_prologue, "SHARES", 1)  # so that a block of threads has several spans
    options = {"dim": 64, "lengths": (300, 77), "sliding": None, **TURNING[case]}
    rope, dim, each = options["rope"], options["dim"], options["each"]
    rng, padded = np.random.default_rng(4), -(-each // 4) * 4
    cache = cache_of(rng, dim, 16, "float32", options["lengths"], (0, 0))
    cache = dataclasses.replace(cache, key_form=rqjax.BeforeRope(rope=rope))
    q = rng.normal(size=(2, 1, 2 * each, dim)).astype(np.float32)
    mean = rng.normal(size=(2, 2, dim)).astype(np.float32)
    matrix = rng.normal(size=(1, dim, dim)).astype(np.float32)

    def call(q, keys, values, lengths, held, matrix, mean):
        return prologue(
            q, keys, values, lengths, held, matrix, None, jnp.full(1, 0.3), mean,
            window=Window(cache.sinks, cache.window, cache.unit, options["sliding"]), padded=padded, unit=0.5,
            softcap=None, angles=angles_of(cache), tokens=cache.capacity, interpret=mosaic.interpret(),
        )  # fmt: skip

    exact = cache.exact_keys, cache.exact_values
    found, _, shift = computed.run(call, q, *exact, cache.lengths, cache.held, matrix, mean)

    def turned(x, positions):
        """Turns vectors, in float64."""
        angles = np.asarray(positions, np.float64)[..., None] * rope.frequencies(dim)
        half = angles.shape[-1]
        cos, sin, (left, right, rest) = np.cos(angles), np.sin(angles), np.split(np.float64(x), [half, 2 * half], -1)
        parts = [rope.length * (left * cos - right * sin), rope.length * (right * cos + left * sin)]
        return np.concatenate([*parts, np.broadcast_to(rest, (*parts[0].shape[:-1], rest.shape[-1]))], axis=-1)

    y = np.pad(turned(q[:, 0], cache.lengths[:, None] - 1).reshape(4, each, dim), [(0, 0), (0, padded - each), (0, 0)])
    y *= 0.3 * LOG2E
    limbs = np.asarray(found.vectors, np.float64)
    vectors = (limbs[:, :padded] * 128 + limbs[:, padded:]) * (found.columns[:, 0] / 0.5)[..., None]
    assert relative(vectors, y @ np.float64(matrix[0])) < 1e-4  # 15 bits
    assert not found.columns[:, 1].any()
    keys = turned(mean.reshape(4, 1, dim), cache.sinks + np.arange(cache.capacity))
    expected = np.einsum("nrd,ntd->nrt", y, keys)
    for i, (start, stop) in enumerate(zip(found.start.tolist(), found.stop.tolist(), strict=True)):
        assert start == stop or relative(shift[i, :, start:stop], expected[i, :, start:stop]) < TOLERANCE


@pytest.mark.parametrize(
    ("each", "dim", "columns", "splits", "blocks", "sinks", "per_head"),
    some(
        [
            (3, 64, 64, 3, 1, True, False),
            (5, 128, 129, 17, 2, False, True),
            (16, 256, 256, 8, 3, True, False),
            (1, 128, 128, 130, 1, False, False),
        ],
        [(3, 64, 64, 3, 1, True, False)],
    ),
)
def test_merges_and_rotates_back(each, dim, columns, splits, blocks, sinks, per_head):
    rng, batch, heads = np.random.default_rng(1), 2, 2
    n, padded, rows = batch * heads, -(-each // 8) * 8, -(-each // 4) * 4
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)  # noqa: E731
    sums, largest, total = (
        draw(n, splits, columns, padded),
        3 * draw(n, splits, padded),
        np.exp(draw(n, splits, padded)),
    )
    exact = Exact(draw(n, blocks, rows, dim), 3 * draw(n, blocks, rows), np.exp(draw(n, blocks, rows)))
    largest[0], exact.largest[0], total[0], exact.total[0], sums[0], exact.sums[0] = NEVER / 2, NEVER / 2, 0, 0, 0, 0
    matrix = np.zeros((heads if per_head else 1, -(-columns // 32) * 32, dim), np.float32)
    matrix[:, :columns] = draw(len(matrix), columns, dim)
    logits = np.append(-np.inf, draw(heads * each - 1)) if sinks else None
    shape = batch, 1, heads * each, dim

    def call(*arguments):
        return epilogue(*arguments, shape=shape, dtype=jnp.float32, interpret=mosaic.interpret())

    found = computed.run(call, sums, largest, total, exact, matrix, logits)

    some = lambda x: np.float64(x)[..., :each]  # noqa: E731
    with np.errstate(under="ignore"):
        of_codes, of_exact = np.exp2(some(largest)), np.exp2(some(exact.largest))
    whole = (of_codes * some(total)).sum(1) + (of_exact * some(exact.total)).sum(1)
    z = np.einsum("nscr,nsr->nrc", some(sums), of_codes).reshape(batch, heads, each, columns)
    out = z @ np.float64(matrix[:, :columns])
    out += np.einsum("nerd,ner->nrd", np.float64(exact.sums)[:, :, :each], of_exact).reshape(out.shape)
    whole = whole.reshape(batch, heads, each)
    whole += 0 if logits is None else np.exp(np.float64(logits)).reshape(heads, each)
    out /= np.where(whole > 0, whole, 1)[..., None]
    assert relative(np.asarray(found).reshape(out.shape), out) < TOLERANCE


ENTERING = {
    "held codes, and a sequence that is full": {"dim": 80, "lengths": (300, 77), "held": (288, 0), "count": (1, 0)},
    "a sink, and a unit that is complete": {"dim": 192, "dtype": "float16", "lengths": (2, 39)},
    "no window, no sequence": {"dim": 64, "dtype": "float32", "window": 0, "lengths": (19, 0), "count": (1, 0)},
}


@pytest.mark.parametrize("case", some(ENTERING, list(ENTERING)[:1]))
def test_a_new_token_enters_the_rings(case):
    options = {"dtype": "bfloat16", "window": 20, "held": (0, 0), "count": (1, 1), **ENTERING[case]}
    rng, count = np.random.default_rng(2), jnp.asarray(options.pop("count"), jnp.int32)
    cache = cache_of(rng, **options)
    k, v = (jnp.asarray(rng.normal(size=(2, 2, 1, options["dim"])), dtype) for dtype in ("float32", "bfloat16"))

    def run(implementation):
        token = hopper.INTERPRET.set(mosaic.interpret())
        call = functools.partial(entered, implementation=implementation)
        found = computed.run(call, cache, k, v, cache.lengths, count)
        hopper.INTERPRET.reset(token)
        return jax.tree.map(lambda x: np.asarray(x, np.float32), found)

    jax.tree.map(np.testing.assert_array_equal, run("mosaic_gpu"), run("xla"))
