"""Wrong input: one line each, with what was expected and what came, or the nearest name that there is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rqjax
from tests.tools.suites import some

KEY = jax.random.key(0)


def eden(dim=64, bits=3):
    return rqjax.eden(KEY, dim, bits)


def x(*shape):
    return jnp.ones(shape)


def cache(**options):
    return rqjax.KVCache.init(
        **{**dict(batch=1, kv_heads=2, max_len=64, key_quantizer=EDEN, value_quantizer=EDEN), **options}
    )


def index(**options):
    return rqjax.Index.build(EDEN, np.random.default_rng(0).standard_normal((20, 64)).astype(np.float32), **options)


EDEN = eden()
CASES = [
    (lambda: eden(dim=0), "expected dim to be a whole number from 1 to 16777216, got 0"),
    (lambda: rqjax.METHODS["rtn"](KEY, -1, 3), "expected dim to be a whole number from 1 to 16777216, got -1"),
    (lambda: eden(bits=9), "expected bits to be a whole number from 1 to 8, got 9"),
    (lambda: eden(bits=0), "expected bits to be a whole number from 1 to 8, got 0"),
    (lambda: rqjax.METHODS["edem"], "unknown method 'edem'; did you mean 'eden'"),
    (lambda: rqjax.FITTED["klt_treliss"], "unknown fitted method 'klt_treliss'; did you mean 'klt_trellis'"),
    (
        lambda: rqjax.METHODS["kivi_2"],
        "unknown method 'kivi_2'; 'kivi_2' is a strategy of caches: rqjax.strategy; known",
    ),
    (lambda: rqjax.METHODS["pq"], "unknown method 'pq'; 'pq' learns from data: Decoder.calibrate fits it for caches"),
    (lambda: rqjax.METHODS["eden_4"], "unknown method 'eden_4'; did you mean 'eden', with its bits apart?"),
    (lambda: rqjax.FITTED["eden_2"], "unknown fitted method 'eden_2'; 'eden' is a recipe of rqjax.METHODS; known"),
    (
        lambda: rqjax.strategy("eden/klt_treliss_2+pre_rope", KEY, 64),
        "unknown strategy 'klt_treliss_2'; 'klt_trellis' learns from data: Decoder.calibrate fits it for caches",
    ),
    (lambda: rqjax.strategy("klt_trellis_2", KEY, 64), "'klt_trellis' learns from data: Decoder.calibrate"),
    (lambda: rqjax.strategy("kivi_3", KEY, 64), "unknown strategy 'kivi_3'; did you mean 'kivi_2' or 'kivi_4'"),
    (lambda: rqjax.BUDGETED["qet_bst"], "unknown method under a budget 'qet_bst'; did you mean 'qet_best'"),
    (lambda: EDEN.encode(x(3, 60)), r"expected vectors of dimension 64 along the last axis, got shape \(3, 60\)"),
    (lambda: EDEN.encode(jnp.ones((3, 64), int)), "expected vectors of a floating-point dtype .*, got int32"),
    (lambda: EDEN.dot(x(60), EDEN.encode(x(3, 64))), r"expected vectors of dimension 64 .*, got shape \(60,\)"),
    (lambda: EDEN.decode(eden(bits=4).encode(x(2, 64))), r"expected codes of 6 uint32 a vector, got shape \(2, 8\)"),
    (lambda: eden(bits=6).decode(EDEN.encode(x(2, 64))), r"expected codes of 12 uint32 a vector, got shape \(2, 6\)"),
    (
        lambda: rqjax.affine(KEY, 64, 4).decode(rqjax.affine(KEY, 64, 8).encode(x(2, 64))),
        r"expected codes of 8 uint32 a vector, got shape \(2, 16\)",
    ),
    (lambda: EDEN.encode(x(2, 64), implementation="cuda"), "unknown implementation 'cuda'"),
    (lambda: rqjax.encode(EDEN, x(2, 64), implementation="mosaic_gpu"), "need.* jax|need a Hopper or Blackwell GPU"),
    (lambda: rqjax.Affine(64, 4, group_size=48), "expected a group size that divides dim = 64, got 48"),
    (lambda: rqjax.Scaled(EDEN.inner, mode="best"), "expected mode 'mse' or 'unbiased', got 'best'"),
    (
        lambda: rqjax.Scaled(EDEN.inner, dtype="int8"),
        "expected norms of dtype 'uint8' or one of floating point, got 'int8'",
    ),
    (lambda: rqjax.Scalar(jnp.ones(3), jnp.float32(1), dim=8), "expected a power of two of levels, got 3"),
    (lambda: rqjax.Exchange(rqjax.Exact(12), levels=3), r"expected a dimension that 2\^3 = 8 divides"),
    (lambda: rqjax.Affine(4, 64, 128), r"^expected Affine\(dim, bits, \*, group_size, dtype='bfloat16'\): "),
    (lambda: rqjax.MinMax(4, 128, group_size=64), r"expected bits in MinMax\(dim, bits, group_size=\) .*, got 128"),
    (lambda: rqjax.Uniform(x(), x(), 2, 8), r"^expected Uniform\(low, step, \*, dim, bits\): "),
    (lambda: rqjax.Scaled(EDEN.inner, "mse"), r"^expected Scaled\(inner, \*, mode='mse', dtype='bfloat16'\): "),
    (lambda: rqjax.Formats("q4_0", 64), r"expected dim in Formats\(dim, format\) to be a whole number .*, got 'q4_0'"),
    (lambda: rqjax.Exact("float16", 64), r"expected dim in Exact\(dim, dtype\) to be a whole number .*, got 'float16'"),
    (
        lambda: rqjax.Rotated(rqjax.rotations.Identity(64), rqjax.Exact(128)),
        "expected parts of one dimension, got rotation of 64, inner of 128",
    ),
    (
        lambda: rqjax.Residual(rqjax.Exact(64), rqjax.Exact(32)),
        "expected parts of one dimension, got first of 64, second of 32",
    ),
    (
        lambda: rqjax.Centered(x(32), rqjax.Exact(64)),
        "expected parts of one dimension, got mean of 32, inner of 64",
    ),
    (lambda: rqjax.Gain(x(32), rqjax.Exact(64)), "expected parts of one dimension, got weights of 32, inner of 64"),
    (
        lambda: rqjax.PerCell(x(2, 32), rqjax.Exact(64)),
        "expected parts of one dimension, got centers of 32, inner of 64",
    ),
    (
        lambda: rqjax.rotations.Chain((rqjax.rotations.Identity(3), rqjax.rotations.Identity(4))),
        r"expected rotations of one dimension, got 2 of \[3, 4\]",
    ),
    (
        lambda: rqjax.Balanced(rqjax.PerChannel(rqjax.Exact(32), dim=64), tile=48),
        "expected tiles of a multiple of 32 tokens, got 48",
    ),
    (lambda: rqjax.trellis_coded(64, 3, state_bits=5), "expected state_bits to be a whole number from 6 to 12, got 5"),
    (lambda: rqjax.pq(KEY, x(3, 4, 5, 6), 2), r"expected floating-point vectors \(n, d\) or \(heads, n, d\)"),
    (lambda: rqjax.pq(KEY, x(1, 8), 2), r"expected at least 2 vectors in x, got shape \(1, 8\)"),
    (lambda: rqjax.klt_trellis(KEY, x(9, 8), 2), "expected vectors that differ in x, got 9 equal ones"),
    (lambda: rqjax.fit_under_budget("pq", KEY, x(8), 4), r"expected a matrix \(n, d\) of floating-point numbers"),
    (lambda: rqjax.fit_under_budget("l9w", KEY, x(8, 8), 4), "expected a setting like 'l3w8c10p0.7"),
    (lambda: rqjax.fit(EDEN, x(9, 64), KEY, where=lambda q: ()), "where picks no floating-point array"),
    (lambda: rqjax.strategy("v3_5", KEY, 64), "unknown strategy 'v3_5'; did you mean"),
    (lambda: rqjax.strategy("v3_4+centred", KEY, 64), "did you mean 'centered'"),
    (lambda: rqjax.strategy("eden+turned+pre_rope", KEY, 64), r"\+centered\+pre_rope behind 'eden', got \+turned\+pre"),
    (lambda: rqjax.strategy("eden+centered+turned", KEY, 64), r"expected one of \+centered, \+turned, .*, got \+cent"),
    (lambda: cache(key_form=rqjax.SubtractedMean([1.0])), r"expected a mean \(2, 64\) of the keys, got \(1,\)"),
    (lambda: rqjax.strategy("eden/eden/eden", KEY, 64), "expected a strategy, or one for keys and one for values"),
    (lambda: cache(max_len=0), "expected max_len to be a whole number from 1 to 1073741824, got 0"),
    (lambda: cache(window=-1), "expected window to be a whole number from 0"),
    (lambda: cache(value_quantizer=eden(32)), "expected a value_quantizer of dimension 64 like the keys', got 32"),
    (lambda: rqjax.append(cache(), x(1, 4, 3, 64), x(1, 4, 3, 64)), r"expected k of shape \(1, time, 2, 64\), got"),
    (
        lambda: rqjax.append(cache(), x(1, 65, 2, 64), x(1, 65, 2, 64)),
        "expected at most max_len = 64 tokens, got k of 65",
    ),
    (lambda: rqjax.attend(cache(), x(1, 1, 3, 64)), r"expected q of shape \(1, time, a multiple of 2, 64\), got"),
    (lambda: rqjax.attend(cache(), x(1, 1, 2, 64), softcap=0.0), "expected softcap to be positive, got 0.0"),
    (lambda: rqjax.attend(cache(), x(1, 1, 2, 64), sliding_window=0), "expected sliding_window to be a whole number"),
    (lambda: index(metric="cos"), "expected metric 'ip', 'l2' or 'cosine', got 'cos'"),
    (lambda: index().search(x(64), 21), "expected k to be a whole number from 1 to 20, got 21"),
    (lambda: index().search(x(64), 3, rerank=5), "expected an index with a store to rerank with"),
    (lambda: index().remove([50]), "1 ids are not in the index, the first is 50"),
    (lambda: index(ids=[3] * 20), "expected different ids, got 1 more than once, the first is 3"),
    (lambda: rqjax.load("nowhere.safetensors"), "there is no file nowhere.safetensors"),
]


@pytest.mark.parametrize("case", some(range(len(CASES)), range(0, len(CASES), 4)))
def test_one_line_says_what_is_wrong(case):
    call, text = CASES[case]
    with pytest.raises((ValueError, TypeError, LookupError, OSError), match=text) as raised:
        call()
    assert "\n" not in str(raised.value)
