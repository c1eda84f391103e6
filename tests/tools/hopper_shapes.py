"""Realistic uses of the kernels for Hopper, for tests that compile them."""

import functools
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from pallas_kernels.gpu import decode as decoding, encode as encoding, packing, roundtrip, trellis
from pallas_kernels.gpu.append_token import append_token
from pallas_kernels.gpu.attention_epilogue import epilogue
from pallas_kernels.gpu.attention_prologue import Window, prologue
from pallas_kernels.gpu.decode_attention import decode_attention
from tests.tools.hopper_attention_shapes import AROUND, SHAPES, Around

Configuration: TypeAlias = tuple[Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...]]
"""A function and the shapes of its arguments."""

N = 65536
RAGGED = (
    ("rotor_encode_80_3_float32", 9),
    ("rotor_decode_256_3_float16", 130),
    ("rotor_roundtrip_128_3_bfloat16", 300),
    ("sign_sketch_256_bfloat16", 130),
    ("trellis_encode_128_3_float32", 7),
)
"""Configurations that are compiled for a number of vectors, too, that is no multiple of 8."""


def _floats(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def _stage(name: str, dim: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    if "rotor" in name:
        return _floats(dim // 3, 3), _floats(int(dim % 3 == 2))
    return (_floats(dim, dim) if name == "dense" else _floats(dim, dtype="int8"),)


def _levels(bits: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    return _floats(2**bits, dtype="int8" if bits <= 4 else "float32"), _floats()


def _encode(names: tuple[str, ...], dim: int, bits: int, dtype: str, n: int = N, **options: Any) -> Configuration:
    def run(x, levels, step, *stages):
        return encoding.encode(x, tuple(zip(names, stages, strict=True)), levels, step, symmetric=True, **options)

    return run, (_floats(n, dim, dtype=dtype), *_levels(bits), *(_stage(name, dim) for name in names))


def _decode(names: tuple[str, ...], dim: int, bits: int, dtype: str, n: int = N) -> Configuration:
    def run(norm, words, levels, step, *stages):
        rotation = tuple(zip(names, stages, strict=True))
        return decoding.decode(norm, words, rotation, levels, step, dim=dim, dtype=dtype)

    words = jax.ShapeDtypeStruct((n, packing.words_per_vector(dim, bits)), jnp.uint32)
    return run, (_floats(n, dtype="bfloat16"), words, *_levels(bits), *(_stage(name, dim) for name in names))


def _roundtrip(dim: int, bits: int, dtype: str, n: int = N) -> Configuration:
    run = functools.partial(roundtrip.rotor_roundtrip, symmetric=True)
    return run, (_floats(n, dim, dtype=dtype), _stage("rotor", dim), *_levels(bits))


def _sketch(dim: int, dtype: str, n: int = N) -> Configuration:
    def run(x, minus, levels, step, stage):
        options = {"symmetric": True, "minus": minus, "norm_dtype": jnp.float32}
        return encoding.encode(x, (("dense", stage),), levels, step, **options)

    return run, (_floats(n, dim, dtype=dtype), _floats(n, dim), *_levels(1), _stage("dense", dim))


def _trellis(dim: int, bits: int, dtype: str, n: int = N) -> Configuration:
    return functools.partial(trellis.encode, bits=bits), (_floats(n, dim, dtype=dtype), _floats(256))


def attention(name: str, **sizes: int) -> Configuration:
    def run(*arguments):
        latent = {"latent": True, "dim": shape.dim} if shape.latent else {}
        return decode_attention(*arguments[:-2], tables=arguments[-2], turning=arguments[-1], **latent)

    shape = SHAPES[name]._replace(**sizes)
    return run, shape.arguments()


def before_codes(name: str) -> Configuration:
    one = AROUND[name]
    options = {"padded": -(-one.each // 8) * 8, "unit": 1.0, "softcap": one.softcap, "turns": one.turns}

    def run(*arguments):
        *arguments, angles = arguments
        return prologue(*arguments, angles=angles, window=_window(one), tokens=128 * one.spans, **options)

    return run, one.prologue()


def new_token(name: str) -> Configuration:
    one = AROUND[name]
    return functools.partial(append_token, window=_window(one)), one.entering()


def _window(one: Around) -> Window:
    return Window(4, one.slots - 20, 16, None)


def behind_codes(name: str) -> Configuration:
    one = AROUND[name]
    shape = one.batch, 1, one.heads * one.each, one.dim
    return functools.partial(epilogue, shape=shape, dtype=jnp.dtype(one.dtype)), one.epilogue()


OF_VECTORS: dict[str, Callable[..., Configuration]] = {
    **{
        f"rotor_encode_{dim}_{bits}_{dtype}": functools.partial(_encode, ("rotor",), dim, bits, dtype)
        for dim, bits, dtype in (
            *((128, bits, "float32") for bits in (2, 3, 4, 8)),
            *((128, bits, "bfloat16") for bits in (2, 3, 4)),
            *((dim, 3, "float32") for dim in (64, 80, 192, 256, 512)),
        )
    },
    **{
        f"rotor_decode_{dim}_{bits}_{dtype}": functools.partial(_decode, ("rotor_inverse",), dim, bits, dtype)
        for dim, bits, dtype in (
            *((128, bits, "float32") for bits in (2, 3, 4)),
            (128, 4, "bfloat16"),
            (128, 8, "float32"),
            (256, 3, "float16"),
        )
    },
    **{
        f"rotor_roundtrip_128_3_{dtype}": functools.partial(_roundtrip, 128, 3, dtype)
        for dtype in ("float32", "bfloat16")
    },
    **{
        f"hadamard_encode_128_{bits}_float32": functools.partial(_encode, ("hadamard",), 128, bits, "float32")
        for bits in (2, 3, 4)
    },
    "hadamard_encode_192_4_bfloat16": functools.partial(_encode, ("hadamard",), 192, 4, "bfloat16"),
    "hadamard_encode_512_2_float32": functools.partial(_encode, ("hadamard",), 512, 2, "float32"),
    "hadamard_decode_128_3_float32": functools.partial(_decode, ("hadamard_inverse",), 128, 3, "float32"),
    "chain_encode_128_3_float32": functools.partial(_encode, ("rotor", "hadamard"), 128, 3, "float32"),
    "chain_decode_128_3_float32": functools.partial(_decode, ("hadamard_inverse", "rotor_inverse"), 128, 3, "float32"),
    **{
        f"dense_encode_{dim}_3_{dtype}": functools.partial(_encode, ("dense",), dim, 3, dtype)
        for dim, dtype in ((128, "float32"), (128, "bfloat16"), (256, "float32"))
    },
    **{
        f"eden_encode_128_{bits}_float32": functools.partial(_encode, ("dense",), 128, bits, "float32", scaled="mse")
        for bits in (2, 3, 4)
    },
    "sign_sketch_128_float32": functools.partial(_sketch, 128, "float32"),
    "sign_sketch_256_bfloat16": functools.partial(_sketch, 256, "bfloat16"),
    "trellis_encode_128_3_float32": functools.partial(_trellis, 128, 3, "float32"),
    "trellis_encode_80_1_bfloat16": functools.partial(_trellis, 80, 1, "bfloat16"),
}
"""Configurations by name, which take the number of vectors `n`."""

CONFIGURATIONS: dict[str, Callable[[], Configuration]] = {
    **OF_VECTORS,
    **{f"{name}, {n} vectors": functools.partial(OF_VECTORS[name], n=n) for name, n in RAGGED},
    **{f"decode_attention {name}": functools.partial(attention, name) for name in SHAPES},
    **{f"attention_prologue {name}": functools.partial(before_codes, name) for name in AROUND},
    **{f"append_token {name}": functools.partial(new_token, name) for name in AROUND},
    **{f"attention_epilogue {name}": functools.partial(behind_codes, name) for name in AROUND},
}
