"""A device of somebody else's: a table and its calls, and nothing that rqjax knows of."""

from contextvars import ContextVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rqjax
from tests.tools.steps import Steps

PLUGGED = ContextVar("plugged", default=False)
rqjax.core.dispatch.CONTEXT.append(PLUGGED.get)
FEW = "my_device kernels take up to 8 vectors"


def encode(quantizer, x):
    return jnp.full((*x.shape[:-1], 8), 7, jnp.uint32), jnp.ones((*x.shape[:-1], 1))


def decode(quantizer, codes, dtype=None):
    return codes[1] * jnp.ones(quantizer.dim, dtype)


def attend(cache, q, mask, new, **options):
    return jnp.full_like(q, options["scale"])


Entry = rqjax.kernels.Entry
TABLE = [
    Entry(rqjax.Quantizer.encode, (Steps,), lambda quantizer, x: FEW if len(x) > 8 else None, encode),
    Entry(rqjax.Quantizer.decode, (Steps,), lambda *_, **__: None, decode),
    Entry(
        rqjax.attend,
        (rqjax.KVCache,),
        lambda _, q, mask, *__, **___: mask if mask is None else "no masks",
        attend,
        False,
    ),
]
rqjax.kernels.register("my_device", lambda: None if PLUGGED.get() else "my_device is not plugged in", TABLE)


def test_a_device_from_outside_computes_what_its_table_names():
    quantizer, x = Steps(jnp.float32(0.1), 64), jax.random.normal(jax.random.key(0), (5, 64))
    plain, cache = quantizer.encode(x), rqjax.strategy("identity_4", jax.random.key(0), 64).cache(1, 1, 256)
    with pytest.raises(rqjax.Unsupported, match="my_device is not plugged in"):
        rqjax.encode(quantizer, x, implementation="my_device")
    token = PLUGGED.set(True)
    try:
        for run in (quantizer.encode, jax.jit(quantizer.encode), lambda x: rqjax.encode(quantizer, x)):
            np.testing.assert_array_equal(run(x)[0], jnp.full((5, 8), 7))
        assert (rqjax.decode(quantizer, plain, implementation="my_device") == plain[1]).all()
        assert (rqjax.attend(cache, jnp.ones((1, 1, 2, 64)), scale=3, implementation="my_device") == 3).all()
        np.testing.assert_array_equal(quantizer.encode(x.repeat(2, 0))[0][::2], plain[0])  # more than it takes
        np.testing.assert_array_equal(quantizer.encode(x, implementation="xla")[0], plain[0])
        with pytest.raises(rqjax.Unsupported, match=FEW):
            quantizer.encode(x.repeat(2, 0), implementation="my_device")
        with pytest.raises(rqjax.Unsupported, match="no masks"):
            rqjax.attend(cache, x[None, :1, None], mask=np.ones(256, bool), implementation="my_device")
        with pytest.raises(rqjax.UnknownName, match="unknown implementation 'mydevice'; did you mean 'my_device'"):
            quantizer.encode(x, implementation="mydevice")
    finally:
        PLUGGED.reset(token)
    np.testing.assert_array_equal(quantizer.encode(x)[0], plain[0])
