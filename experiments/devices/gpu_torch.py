"""Yardsticks in torch, where it is installed: the dense pipeline of the published implementations, and attention.

The pipeline is TurboQuant's: divide by the norm, a product with a d x d matrix in float32, `bucketize`; indices take a
byte each, not packed. Decoding gathers levels and multiplies back. Each is timed as it is and through `torch.compile`
(once for all numbers of vectors); ratios take the faster one.
"""

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from experiments.devices import gpu_clock
from experiments.devices.gpu_clock import Settings, Time
from rqjax import codebooks

WAYS = ("torch", "torch.compile")

os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no forks of a process in which jax has threads


@functools.cache
def available() -> bool:
    """Returns whether torch is there, with a GPU if jax has one."""
    if importlib.util.find_spec("torch") is None:
        return False
    import jax
    import torch

    return torch.cuda.is_available() or jax.default_backend() == "cpu"


@functools.cache
def _pipeline(way: str, operation: str, dtype: str) -> Callable[..., Any]:
    import torch

    def encode(x: Any, rotation: Any, levels: Any) -> Any:
        x = x.float()
        norm = x.norm(dim=-1, keepdim=True)
        index = torch.bucketize(x / norm @ rotation.T, (levels[1:] + levels[:-1]) / 2, out_int32=True)
        return norm, index.to(torch.uint8)

    def decode(codes: Any, rotation: Any, levels: Any) -> Any:
        norm, index = codes
        return (levels[index.int()] @ rotation * norm).to(getattr(torch, dtype))

    def roundtrip(x: Any, rotation: Any, levels: Any) -> Any:
        return decode(encode(x, rotation, levels), rotation, levels)

    function = {"encode": encode, "decode": decode, "roundtrip": roundtrip}[operation]
    return torch.compile(function, dynamic=True) if way == "torch.compile" else function


@functools.cache
def time(
    way: str,
    operation: str,
    n: int,
    dim: int,
    bits: int,
    dtype: str,
    calls: int,
    sets: int,
    clock: Settings,
) -> Time:
    """Measures the dense pipeline on n vectors."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    rotation = torch.linalg.qr(torch.randn(dim, dim, generator=generator, device=device))[0]
    levels = torch.tensor(np.asarray(codebooks.beta(dim, bits)), dtype=torch.float32, device=device)
    with torch.no_grad():
        x = [torch.randn(n, dim, generator=generator, device=device).to(getattr(torch, dtype)) for _ in range(sets)]
        if operation == "decode":
            x = [_pipeline("torch", "encode", dtype)(x, rotation, levels) for x in x]
        calls_ = gpu_clock.over(_pipeline(way, operation, dtype), [(x, rotation, levels) for x in x], calls)
        result = gpu_clock.of_torch(clock).time(calls_)
        del x, calls_
    if device == "cuda":
        torch.cuda.empty_cache()
    return result


@functools.cache
def attention(shape: tuple[int, int, int, int, int], calls: int, sets: int, clock: Settings) -> Time:
    """Measures scaled dot-product attention of one token to bfloat16 keys and values."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    batch, tokens, groups, kv_heads, dim = shape
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.no_grad():
        random = functools.partial(torch.randn, device=device, dtype=torch.bfloat16)
        q = random(batch, kv_heads * groups, 1, dim)
        inputs = [(q, *(random(batch, kv_heads, tokens, dim) for _ in range(2))) for _ in range(sets)]
        attend = functools.partial(scaled_dot_product_attention, enable_gqa=groups > 1)
        result = gpu_clock.of_torch(clock).time(gpu_clock.over(attend, inputs, calls))
        del inputs
    if device == "cuda":
        torch.cuda.empty_cache()
    return result
