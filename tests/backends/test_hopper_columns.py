"""Attention to transform codes by the decode attention kernel, interpreted, against attention in XLA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rqjax
from pallas_kernels.gpu import mosaic
from rqjax.backends import hopper
from rqjax.core import Unsupported
from rqjax.quantizers.gain import Gain
from rqjax.rotations import Dense, Hadamard
from tests.backends.test_decode_attention import TOLERANCE, error
from tests.tools.computed import FAST
from tests.tools.suites import some

pytestmark = pytest.mark.full

DIM, HEADS = 64, 2
SPECTRUM = jnp.exp(-jnp.arange(DIM) / 24)
MEAN = jnp.sin(jnp.arange(DIM)) * SPECTRUM
ODD = (5,) * 3 + (4,) * 13 + (2.5,) * 16 + (1,) * 25 + (0,) * 7
"""Bits whose ring has a number of bytes that 8 does not divide."""
FINE = (6,) * 4 + (5,) * 4 + (3,) * 40 + (1,) * 8 + (0,) * 8
"""Coordinates of more than 4 bits have two columns each, so that there are as many as coordinates."""


def trellis(scale, bits):
    return rqjax.TrellisPerCoordinate.gaussian(scale * MEAN, scale * SPECTRUM, bits)


def levels(scale, bits):
    return rqjax.PerCoordinate.gaussian(scale * MEAN, scale * SPECTRUM, bits).rounded()


def per_head(make):
    return rqjax.PerHead(jax.vmap(make)(jnp.arange(1.0, 1 + HEADS), jax.random.split(jax.random.key(0), HEADS)))


NESTS = {
    "klt_trellis": lambda: per_head(
        lambda scale, key: rqjax.Scaled(rqjax.Rotated(Dense.haar(key, DIM), trellis(scale / 8, (3,) * 40 + (1,) * 24)))
    ),
    "rotorquant_allocated": lambda: per_head(
        lambda scale, key: rqjax.Rotated(
            Hadamard.random(key, DIM), Gain(jnp.full(DIM, 1 / DIM) / scale**2, levels(scale, FINE))
        )
    ),
    "a trellis without a scale": lambda: trellis(1, ODD),
    "levels without a scale": lambda: levels(1, (6,) * 32 + (1,) * 32),
    "a trellis of fractional bits": lambda: rqjax.turboquant_trellis(jax.random.key(1), DIM, 2.5),
    "scales of eight bits": lambda: rqjax.Scaled(trellis(0.1, (8,) * 2 + (3,) * 46 + (0,) * 16), dtype="uint8"),
    "a trellis of each head": lambda: per_head(lambda scale, key: rqjax.turboquant_trellis(key, DIM, 2)),
    "levels": lambda: rqjax.rotorquant(jax.random.key(2), DIM, 3),
}


@functools.cache
def cache_of(keys, values, window=16):
    return rqjax.KVCache.init(1, HEADS, 320, NESTS[keys](), NESTS[values](), window=window, sinks=2)


@pytest.mark.full
@pytest.mark.parametrize(
    ("keys", "values", "length"),
    some(
        [
            ("klt_trellis", "rotorquant_allocated", 150),
            ("levels without a scale", "levels", 310),
        ],
        [],
    ),
)
def test_attend_agrees_with_xla(keys, values, length):
    rng = np.random.default_rng(0)
    k, v = MEAN + SPECTRUM * rng.normal(size=(2, 1, length, HEADS, DIM)).astype(np.float32)
    q = jnp.asarray(rng.normal(size=(1, 1, 3 * HEADS, DIM)), jnp.float32)
    cache = jax.jit(rqjax.append, compiler_options=FAST)(cache_of(keys, values), k, v)

    def attend(implementation):
        call = functools.partial(rqjax.attend, implementation=implementation)
        return np.asarray(jax.jit(call, compiler_options=FAST)(cache, q), np.float64)

    token = hopper.INTERPRET.set(mosaic.interpret())
    try:
        found = attend("mosaic_gpu")
    finally:
        hopper.INTERPRET.reset(token)
    assert not mosaic.races_found()
    assert error(found, attend("xla")) < TOLERANCE


def test_says_why_there_is_no_kernel():
    def reason(quantizer):
        cache = rqjax.KVCache.init(1, HEADS, 320, quantizer, quantizer, window=16, sinks=2)
        token = hopper.INTERPRET.set(mosaic.interpret())
        try:
            with pytest.raises(Unsupported) as error:
                rqjax.attend(cache, jnp.ones((1, 1, HEADS, quantizer.dim)), implementation="mosaic_gpu")
        finally:
            hopper.INTERPRET.reset(token)
        return str(error.value).removeprefix("no mosaic_gpu kernel for this attention: keys: ")

    floats = rqjax.PerCoordinate.gaussian(MEAN, SPECTRUM, (3,) * DIM)
    assert reason(floats) == "the levels of the PerCoordinate are not whole numbers, or not of a stream of bits"
    assert reason(trellis(1, (5,) * DIM)) == "5 bits, more than 4"
    many, large = (5,) * 10 + (4,) * 246, (8,) * 128 + (0,) * 128
    of_256 = [rqjax.PerCoordinate.gaussian(jnp.zeros(256), jnp.ones(256), bits).rounded() for bits in (many, large)]
    wide, long = map(reason, of_256)
    assert wide == "320 columns of levels, more than 256"
    assert long == "65536 bytes of levels, more than 28672"
    assert reason(per_head(lambda scale, key: rqjax.rotorquant(key, DIM, 3))) == "a Scalar of each head"
