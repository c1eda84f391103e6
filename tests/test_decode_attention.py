"""The decode attention kernel, interpreted, against decoded vectors in float64, and against attention in XLA.

The interpreter runs what each thread does, but for the few operations of `pallas_kernels.registers`, which have twins.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rqjax
from pallas_kernels import mosaic, registers
from pallas_kernels.decode_attention import Packed, decode_attention
from rqjax import fused, tiles

TOLERANCE = 5e-4
"""Relative root mean square error of a head: queries and weights are rounded to 15 bits of their largest. Measured:
3e-4 at most."""
FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""For the interpreter, whose programs are compiled once and run once."""

CASES = {
    "2 bits, 4 bits, one query head": ("rotorquant_2/rotorquant_4", 64, 1, (256, 200), 1),
    "3 bits, 2 bits, an empty sequence, idle splits": ("rotorquant_3/rotorquant_2", 128, 3, (300, 0), 3),
    "4 bits, 3 bits, heads of 256, 16 query heads": ("eden_4/rotorquant_3", 256, 16, (120, 17), 1),
    "affine groups of 64": ("v2_lean", 128, 8, (384, 129), 3),
    "affine groups of 64, heads of 256": ("affine_rotated/v2_lean", 256, 8, (128, 77), 1),
    "affine, one group": ("rtn/rtn", 128, 5, (256, 1), 1),
    "affine, heads of 64": ("v2_lean/v2_lean", 64, 9, (250, 16), 2),
    "affine keys of 3 bits, values by Lloyd-Max": ("affine_3/v3_4", 128, 8, (128, 99), 1),
    "1 bit, 3 bits": ("identity_1/rotorquant_3", 64, 8, (128, 60), 1),
}
"""Strategy, dimension, query heads a key-value head, lengths, splits."""


def packed(quantizer, codes, *, transposed):
    part = fused.leaf(quantizer, tiles.lay_out(quantizer, codes, transposed=transposed))
    return part, Packed(*fused._packed(part))


def rotated(part, x):
    for rotation in part.rotations:
        x = rotation(x)
    return x


def restored(part, x):
    for rotation in reversed(part.rotations):
        x = rotation.inverse(x)
    return x


def attention(keys, values, y, seen, softcap=None):
    """In float64: the output, and the logarithm of the sum of exp(scores)."""
    scores = np.einsum("bhgd,bhtd->bhgt", y.astype(np.float64), keys)
    scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
    scores = np.where(seen[:, None, None], scores, -np.inf)
    weights = np.exp(scores - np.maximum(scores.max(-1, keepdims=True), -1e30))
    total = weights.sum(-1, keepdims=True)
    output = np.einsum("bhgt,bhtd->bhgd", weights / np.where(total > 0, total, 1), values)
    return output, (np.log(total) + scores.max(-1, keepdims=True))[..., 0]


def error(found, expected):
    """The largest relative root mean square error of a head that has seen something."""
    size = np.sqrt((expected**2).mean(-1))
    return (np.sqrt(((found - expected) ** 2).mean(-1)) / np.where(size > 0, size, 1)).max()


def run(name, dim, query_heads, stop, splits, *, start=None, softcap=None, vary=None):
    """The kernel's output beside the float64 one: of both the output and the log of the total."""
    rng, tokens = np.random.default_rng(0), -(-max(stop) // 128) * 128
    strategy = rqjax.strategy(name, jax.random.key(0), dim)
    k, v = rng.normal(size=(2, len(stop), 1, tokens, dim)).astype(np.float32)
    y = rng.normal(size=(len(stop), 1, query_heads, dim)).astype(np.float32) * (2 * dim**-0.5)
    k, v = (k, v) if vary is None else vary(k, v, y)
    codes = jax.jit(strategy.keys.encode)(k), jax.jit(strategy.values.encode)(v)
    key_part, keys = packed(strategy.keys, codes[0], transposed=False)
    value_part, values = packed(strategy.values, codes[1], transposed=True)
    start = np.zeros(len(stop), np.int32) if start is None else np.asarray(start, np.int32)
    arguments = rotated(key_part, jnp.asarray(y)) * fused._step(key_part), keys, values, start, np.asarray(stop, np.int32)
    call = functools.partial(decode_attention, splits=splits, softcap=softcap, interpret=mosaic.interpreter())
    sums = jax.jit(call).lower(*arguments).compile(compiler_options=FAST)(*arguments)
    assert not mosaic.races_found()
    total = np.asarray(sums.total, np.float64)
    output = np.asarray(restored(value_part, sums.values * fused._step(value_part)))
    output = output / np.where(total > 0, total, 1)[..., None]
    seen = (np.arange(tokens) >= start[:, None]) & (np.arange(tokens) < np.asarray(stop)[:, None])
    decoded = (np.asarray(q.decode(c), np.float64) for q, c in zip((strategy.keys, strategy.values), codes, strict=True))
    with np.errstate(divide="ignore"):
        return (output, np.asarray(sums.largest) + np.log(total)), attention(*decoded, y, seen, softcap)


def check(found, expected):
    assert error(found[0], expected[0]) < TOLERANCE
    some = np.isfinite(expected[1])
    np.testing.assert_array_equal(np.isfinite(found[1]), some)
    np.testing.assert_allclose(found[1][some], expected[1][some], atol=1e-3)


@pytest.mark.parametrize("case", CASES)
def test_matches_attention_to_decoded_vectors(case):
    check(*run(*CASES[case]))


def test_start_and_softcap():
    check(*run("rotorquant_4", 64, 8, (256, 190), 1, start=(130, 5), softcap=1.5))


def test_a_sink_and_tiny_values_cost_no_bits():
    """One token takes nearly all of the weight in its block, and its value is small: the others still count."""

    def vary(k, v, y):
        k[:, :, 3] = 40 * y[:, :, 0]
        v[:, :, 3] *= 1e-4
        return k, v

    check(*run("rotorquant_4", 64, 1, (256, 256), 1, vary=vary))


@pytest.mark.parametrize("width", [64, 128])
def test_swizzled_addresses_are_those_of_the_hardware(width):
    """Of row r the chunk of 16 bytes c lies where chunk c ^ (r mod 8) would (128 bytes), or c ^ (r / 2 mod 4) (64)."""
    rows, columns = np.meshgrid(np.arange(32), np.arange(256), indexing="ij")
    at = registers.swizzled(rows, columns, 256, width)
    assert sorted(at.ravel()) == list(range(32 * 256))
    tile, inside = at // (8 * width), at % (8 * width)
    np.testing.assert_array_equal(tile, rows // 8 * (256 // width) + columns // width)
    np.testing.assert_array_equal(inside // width, rows % 8)
    chunk = columns % width // 16 ^ (rows % 8 if width == 128 else rows // 2 % 4)
    np.testing.assert_array_equal(inside % width, chunk * 16 + columns % 16)
