"""The kernels for TPUs, interpreted, against decoded vectors in float64, and against attention in XLA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import rqjax
from pallas_kernels.tpu.decode_attention import decode_attention
from rqjax.backends import tpu
from rqjax.core import Unsupported
from tests.tools.packed_codes import attention, encoded, error, hidden, in_pages
from tests.tools.suites import some

TOLERANCE = 5e-4
"""Relative error, as on NVIDIA GPUs: queries and weights are rounded to 15 bits of their largest. Measured: 4e-4."""
STRICT = {"detect_races": True, "uninitialized_memory": "nan", "out_of_bounds_reads": "raise"}
"""Options of the interpreter that simulates memories."""
INTERPRETED = jax.default_backend() != "tpu"
CASES = {
    "4 bits": (128, 8, "4", "4", (300, 77), {}),
    "3 bits, 2 bits, pages, an empty sequence": (128, 4, "3", "2", (300, 0), {"paged": True, "start": (10, 0)}),
    "2 bits, 3 bits, heads of 64": (64, 1, "2", "3", (1500, 77), {"softcap": 1.5}),
    "1 bit, 4 bits, heads of 256, 16 query heads": (256, 16, "1", "4", (200, 77), {"paged": True}),
    "affine groups of 64": (128, 5, "4 affine 64", "4 affine 64", (1300, 77), {"start": (1100, 5)}),
    "affine of 3 bits, 2 bits": (128, 5, "3 affine 128", "2 affine 32", (300, 77), {"paged": True, "softcap": 2.0}),
    "affine keys of 1 bit, heads of 64": (64, 9, "1 affine 64", "1", (250, 16), {}),
    "what is added differs by token": (64, 3, "4", "3", (400, 128), {"paged": True, "shifted": True}),
    "a window behind all codes, pages": (64, 1, "2", "3", (256, 77), {"paged": True, "start": (256, 5)}),
    "a window behind all codes": (64, 1, "2", "3", (1024, 77), {"start": (1024, 5)}),
}
"""Dimension, query heads a key-value head, kinds of keys and values, lengths, and special options."""


def run(dim, rows, keys, values, stop, *, start=None, softcap=None, paged=False, shifted=False, interpret=INTERPRETED):
    """The kernel's output beside the float64 one."""
    rng, batch, heads, tokens = np.random.default_rng(0), len(stop), 2, -(-max(stop) // 128) * 128
    keys, k = encoded(rng, keys, batch, tokens, dim, transposed=False, heads=heads)
    values, v = encoded(rng, values, batch, tokens, dim, transposed=True, heads=heads)
    y = rng.normal(size=(batch, heads, rows, dim)).astype(np.float32) * dim**-0.5
    start, stop = (np.asarray((0,) * batch if x is None else x, np.int32) for x in (start, stop))
    shift = rng.normal(size=(batch, heads, rows, tokens if shifted else 1)).astype(np.float32)
    token, tables = np.arange(tokens), None
    seen = (token >= start[:, None]) & (token < stop[:, None])
    keys, values = hidden(keys, seen), hidden(values, seen)
    if paged:
        tables, keys, values = in_pages(rng, keys, values)
    call = jax.jit(functools.partial(decode_attention, softcap=softcap, interpret=interpret))
    sums = call(y, keys, values, start, stop, shift, tables=tables)
    total = np.asarray(sums.total, np.float64)
    found = np.asarray(sums.values, np.float64) / np.where(total > 0, total, 1)[..., None]
    return found, attention(k, v, y, seen, softcap, shift)[0]


STRICTLY = [list(CASES)[i] for i in (1, 3, 4, 7, 8, 9)]
"""Cases that the interpreter of memories runs, against the same oracle."""


@pytest.mark.parametrize("case", some([case for case in CASES if case not in STRICTLY[1:]], STRICTLY[:1]))
def test_matches_attention_to_decoded_vectors(case):
    *arguments, options = CASES[case]
    found, expected = run(*arguments, **options)
    assert np.isfinite(found).all()
    assert error(found, expected) < TOLERANCE


@pytest.mark.full
@pytest.mark.parametrize("case", STRICTLY)
def test_no_races_nor_reads_of_what_is_not_there(case):
    *arguments, options = CASES[case]
    found, expected = run(*arguments, **options, interpret=INTERPRETED and pltpu.InterpretParams(**STRICT))
    assert error(found, expected) < TOLERANCE


@pytest.fixture
def interpreted():
    token = tpu.INTERPRET.set(INTERPRETED)
    yield
    tpu.INTERPRET.reset(token)


def both(cache, q, **options):
    return [np.asarray(rqjax.attend(cache, q, implementation=name, **options)) for name in ("mosaic_tpu", "xla")]


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "time", "options"),
    some(
        [
            ("rotorquant_4/v3_2+turned", 1, {}),
            ("eden_3/v2_lean+centered", 2, {"softcap": 2.0}),
            ("v2_lean/hadamard_3", 1, {"sliding_window": 140, "scale": 0.3}),
        ],
        [("rotorquant_4/v3_2+turned", 1, {})],
    ),
)
@pytest.mark.parametrize("pages", some([None, 6], [6]))
@pytest.mark.usefixtures("interpreted")
def test_attend_agrees_with_xla(name, time, options, pages):
    """The sinks and the window are in the same softmax; pages lie in any order; means turn with positions."""
    rng, rope = np.random.default_rng(1), rqjax.Rope(1e4) if name.endswith("turned") else None
    strategy = rqjax.strategy(name, jax.random.key(0), 64)
    cache = strategy.cache(2, 2, 320, window=16, sinks=2, rope=rope, pages=pages)
    k, v = rng.normal(size=(2, 2, 310, 2, 64)).astype(np.float32)
    k[0] += 4  # a mean that dominates
    if pages is None:
        cache = rqjax.append(cache, k, v, valid=jnp.array([310, 150]))
        slots = {}
    else:
        paged = rqjax.PagedCache(cache)
        for length, x, y in ((310, k[0], v[0]), (150, k[1], v[1])):
            tokens = rng.integers(0, 99, length)
            slot, _ = paged.admit(tokens)
            paged.reserve(slot, tokens)
            paged.update(rqjax.append(paged.caches, x[None, :length], y[None, :length], slots=jnp.array([slot])))
        cache, slots = paged.caches, {"slots": jnp.array([1, 0])}
    q = jnp.asarray(rng.normal(size=(2, time, 6, 64)), jnp.float32)
    found, expected = both(cache, q, **slots, **options)
    assert error(found.astype(np.float64), expected) < TOLERANCE


QUANTIZERS = {
    "turboquant_1": (64, 1),
    "turboquant_4": (128, 4),
    "rotorquant_3": (192, 3),
    "hadamard_2": (256, 2),
    "rotor_chain_3": (64, 3),
    "eden_4": (128, 4),
    "eden_unbiased_2": (512, 2),
}


VECTORS = [(name, ("float32", "bfloat16")[i % 2]) for i, name in enumerate(QUANTIZERS)]


@pytest.mark.parametrize(("name", "dtype"), some(VECTORS, [VECTORS[1]]))
@pytest.mark.usefixtures("interpreted")
def test_vectors(name, dtype):
    """Codes differ near boundaries alone, where rounding decides: one in a thousand at most."""
    dim, bits = QUANTIZERS[name]
    quantizer = rqjax.METHODS[name.rpartition("_")[0]](jax.random.key(0), dim, bits)
    x = np.array(3 * jax.random.normal(jax.random.key(1), (2, 350, dim)))
    x[0, :4] = [[0.0], [1e30], [1e-30], [-1.0]] * x[0, :4]
    x = jnp.asarray(x, dtype)
    (norm, words), expected = (quantizer.encode(x, implementation=name) for name in ("mosaic_tpu", "xla"))
    unequal = quantizer.inner.inner.indices(words) != quantizer.inner.inner.indices(expected[1])
    assert unequal.mean() < 1e-3
    whole = ~np.asarray(unequal).any(-1)
    assert whole.mean() > 0.9
    assert (norm == expected[0])[whole].mean() > 0.99  # of others the last bit may differ
    np.testing.assert_allclose(norm.astype(jnp.float32)[whole], expected[0].astype(jnp.float32)[whole], rtol=2**-7)
    decoded, plain = (quantizer.decode(expected, implementation=name) for name in ("mosaic_tpu", "xla"))
    size = np.abs(plain).max(-1, keepdims=True)
    assert (np.abs(decoded - plain) <= 1e-4 * size).all()  # products of what bfloat16 leaves over are left out
    both = rqjax.roundtrip(quantizer, x, implementation="mosaic_tpu").astype(jnp.float32)
    same = whole & np.asarray(norm == expected[0])
    slack = 1e-4 if dtype == "float32" else 2**-7
    assert (np.abs(both - plain) <= slack * size)[same].all()


@pytest.mark.usefixtures("interpreted")
def test_says_why_there_is_no_kernel_for_vectors():
    def reason(name, shape, bits=3, dtype="float32"):
        quantizer = rqjax.METHODS[name](jax.random.key(0), shape[-1], bits)
        with pytest.raises(Unsupported) as error:
            rqjax.encode(quantizer, jnp.ones(shape, dtype), implementation="mosaic_tpu")
        return str(error.value)

    assert "symmetric levels of up to 4 bits, not for 5 bits" in reason("turboquant", (2, 64), 5)
    assert "take vectors of dimension (64, 128, 192, 256, 512), not 96" in reason("turboquant", (2, 96))
    assert "are for Normalized or Scaled(Rotated(rotation, Scalar)), not for" in reason("turboquant_prod", (2, 64))
    assert "take float32, bfloat16, not float16" in reason("turboquant", (2, 64), dtype="float16")
    assert "at least one vector" in reason("turboquant", (0, 64))


@pytest.mark.usefixtures("interpreted")
def test_says_why_there_is_no_kernel():
    def reason(name, dim=64, time=1, q_heads=3, **options):
        cache = rqjax.strategy(name, jax.random.key(0), dim).cache(2, 1, 320, window=16, **options)
        with pytest.raises(Unsupported) as error:
            rqjax.attend(cache, jnp.ones((2, time, q_heads, dim)), implementation="mosaic_tpu")
        return str(error.value).removeprefix("no mosaic_tpu kernel for this attention: ")

    assert reason("identity_4", dim=32) == "head_dim is 32, not one of (64, 128, 256)"
    assert reason("identity_4", q_heads=17) == "17 queries share a head of keys and values, more than 16"
    assert reason("identity_4/rtn_5") == "values: 5 bits, more than 4"
    assert reason("turboquant_trellis_3").startswith("keys: the nest is not rotations and a norm around one Scalar")
    assert reason("eden_4+pre_rope", rope=rqjax.Rope(1e4)) == "codes are of keys before they turn with their positions"


def test_needs_a_tpu():
    cache = rqjax.strategy("eden_4", jax.random.key(0), 64).cache(1, 1, 320, window=16)
    with pytest.raises(Unsupported, match="mosaic_tpu kernels need a TPU, this is cpu"):
        rqjax.attend(cache, jnp.ones((1, 1, 1, 64)), implementation="mosaic_tpu")
