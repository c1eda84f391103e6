"""A device of somebody else's: a table and a module of calls, and nothing that rqjax knows of."""

from contextvars import ContextVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rqjax
from rqjax.core import dispatch

PLUGGED = ContextVar("plugged", default=False)
"""Whether the device is there."""
dispatch.CONTEXT.append(PLUGGED.get)
FEW = "my_device kernels take up to 8 vectors"

TABLE = [
    rqjax.kernels.Entry(
        rqjax.Quantizer.encode,
        (rqjax.Normalized,),
        lambda quantizer, x: FEW if len(x) > 8 else None,
        lambda quantizer, x: (jnp.full(x.shape[:-1], 7.0), quantizer.inner.encode(x)),
    ),
    rqjax.kernels.Entry(
        rqjax.Quantizer.decode,
        (rqjax.Normalized,),
        lambda quantizer, codes, dtype=None: None,
        lambda quantizer, codes, dtype=None: codes[0][..., None] * jnp.ones(quantizer.dim, dtype),
    ),
    rqjax.kernels.Entry(
        rqjax.attend,
        (rqjax.KVCache,),
        lambda cache, q, mask, **options: None if mask is None else "no my_device kernel with a mask",
        lambda cache, q, mask, **options: jnp.full_like(q, options["scale"]),
        rows=False,
    ),
]
rqjax.kernels.register("my_device", lambda: None if PLUGGED.get() else "my_device is not plugged in", TABLE)
KEY, X = jax.random.key(0), jax.random.normal(jax.random.key(1), (5, 64))


def test_a_device_from_outside_computes_what_its_table_names():
    ours, cache = rqjax.rotorquant(KEY, 64, 3), rqjax.strategy("identity_4", KEY, 64).cache(1, 1, 256)
    plain = ours.encode(X)
    with pytest.raises(rqjax.Unsupported, match="my_device is not plugged in"):
        rqjax.encode(ours, X, implementation="my_device")
    token = PLUGGED.set(True)
    try:
        for norms, _ in (ours.encode(X), jax.jit(ours.encode)(X), rqjax.encode(ours, X, implementation="my_device")):
            np.testing.assert_array_equal(norms, jnp.full(5, 7.0))
        np.testing.assert_array_equal(rqjax.decode(ours, plain, dtype="bfloat16"), plain[0][:, None].repeat(64, 1))
        attended = rqjax.attend(cache, jnp.ones((1, 1, 2, 64)), scale=3)
        np.testing.assert_array_equal(attended, jnp.full((1, 1, 2, 64), 3.0))
        with pytest.raises(rqjax.Unsupported, match=FEW):
            ours.encode(X[:, None].repeat(9, 0), implementation="my_device")
        with pytest.raises(rqjax.Unsupported, match="no my_device kernel with a mask"):
            rqjax.attend(cache, X[None, :1, None], mask=jnp.ones(256, bool), implementation="my_device")
        with pytest.raises(rqjax.UnknownName, match="unknown implementation 'mydevice'; did you mean 'my_device'"):
            rqjax.encode(ours, X, implementation="mydevice")
        jax.tree.map(np.testing.assert_array_equal, ours.encode(X, implementation="xla"), plain)
        jax.tree.map(np.testing.assert_array_equal, ours.encode(X.repeat(2, 0))[0][::2], plain[0])  # it refuses
    finally:
        PLUGGED.reset(token)
    jax.tree.map(np.testing.assert_array_equal, ours.encode(X), plain)
