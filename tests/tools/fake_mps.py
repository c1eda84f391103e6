"""`jax_plugins.mps.ops` of jax-mps 0.11.1 on a CPU: its signatures and limits, computed by MLX itself.

Like the real operations these have no rule for `jax.vmap` and no derivative.
"""

from typing import Any

import jax
import jax.numpy as jnp
import mlx.core as mx
import numpy as np


def quantize(w, *, group_size=64, bits=4):
    _check(bits, group_size, w.shape[-1])
    words = jax.ShapeDtypeStruct((*w.shape[:-1], w.shape[-1] * bits // 32), jnp.uint32)
    grid = jax.ShapeDtypeStruct((*w.shape[:-1], w.shape[-1] // group_size), w.dtype)
    return _called(lambda w: mx.quantize(w, group_size, bits), (words, grid, grid), w)


def dequantize(packed, scales, biases, *, group_size=64, bits=4):
    dim = packed.shape[-1] * 32 // bits
    _check(bits, group_size, dim, packed, scales, biases)
    out = jax.ShapeDtypeStruct((*packed.shape[:-1], dim), scales.dtype)
    return _called(lambda *codes: mx.dequantize(*codes, group_size, bits), out, packed, scales, biases)


def quantized_matmul(x, packed, scales, biases, *, transpose=True, group_size=64, bits=4):
    dim = packed.shape[-1] * 32 // bits
    _check(bits, group_size, dim, packed, scales, biases)
    inner, outer = (dim, packed.shape[-2]) if transpose else (packed.shape[-2], dim)
    assert x.shape[:-2] == packed.shape[:-2], (x.shape, packed.shape)
    assert x.shape[-1] == inner, (x.shape, inner)
    assert x.dtype == scales.dtype, (x.dtype, scales.dtype)
    out = jax.ShapeDtypeStruct((*x.shape[:-1], outer), x.dtype)
    multiply = lambda x, *codes: mx.quantized_matmul(x, *codes, transpose, group_size, bits)  # noqa: E731
    return _called(multiply, out, x, packed, scales, biases)


def sdpa(q, k, v, *, scale=None, is_causal=False, mask=None):
    assert not is_causal
    assert q.dtype == k.dtype == v.dtype
    attend = lambda q, k, v, mask: mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask)  # noqa: E731
    return _called(attend, jax.ShapeDtypeStruct(q.shape, q.dtype), q, k, v, mask)


def _check(bits, group_size, dim, *codes):
    if bits not in (4, 8):
        raise ValueError(f"quantization bits must be one of (4, 8), got {bits}")
    assert group_size in (32, 64, 128)
    assert dim % group_size == 0
    if codes:
        packed, scales, biases = codes
        assert scales.shape == biases.shape == (*packed.shape[:-1], dim // group_size)


def _called(function, out: Any, *operands):
    def run(*arrays):
        made = function(*(mx.array(np.asarray(a)) for a in arrays))
        return jax.tree.map(np.array, tuple(made) if isinstance(made, list | tuple) else made)

    return jax.pure_callback(run, out, *operands)
