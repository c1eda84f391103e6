"""Random packed keys and values, the vectors that they stand for, and attention to those in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.packed import Packed
from rqjax.scoring import tiles

LEVELS = {1: (-50, 50), 2: (-127, -38, 38, 127), 3: (-127, -79, -45, -14, 14, 45, 79, 127)}
LEVELS[4] = (-127, -96, -75, -58, -44, -31, -18, -6, 6, 18, 31, 44, 58, 75, 96, 127)
"""Levels, symmetric and near those of Lloyd and Max."""


def encoded(rng, kind, batch, tokens, dim, *, transposed, heads=1):
    """Random codes (bits, with groups of so many dimensions if affine), and the vectors that they stand for."""
    bits, _, group = kind.partition(" affine ")
    bits, groups = int(bits), dim // int(group or dim)
    indices = rng.integers(0, 2**bits, (batch, heads, tokens, dim))
    scale = np.asarray(jnp.asarray(rng.lognormal(sigma=0.4, size=(2, batch, heads, groups, tokens)) / 60, jnp.bfloat16))
    levels, biases = np.asarray(LEVELS[bits], np.int8), None
    if group:
        levels, scale = None, scale * np.where(rng.random(scale.shape) < 0.5, 8, -8).astype(scale.dtype)
        biases = -(2.0 ** (bits - 1)) * scale[0] + scale[1]
    whole = lambda x: np.repeat(np.swapaxes(x.astype(np.float64), 2, 3), dim // groups, axis=3)  # noqa: E731
    vectors = whole(scale[0]) * (indices if group else levels[indices]) + (whole(biases) if group else 0)
    return Packed(
        tuple(np.asarray(x.bits) for x in pack(indices, bits, transposed).sections), scale[0], biases, levels
    ), vectors


@functools.partial(jax.jit, static_argnums=(1, 2))
def pack(indices, bits, transposed):
    return tiles.tile(indices, bits, transposed=transposed)


def in_pages(rng, keys, values, axis=None):
    """Tables of pages in random order, and codes of sequences in them; pages of no sequence are full of 255 or NaN. The
    tokens of keys are on an axis, or on that of their kind."""
    batch, tokens = keys.scales.shape[0], keys.scales.shape[3]
    count = batch * tokens // 128
    tables = rng.permutation(count + 3)[:count].reshape(batch, -1).astype(np.int32)

    def paged(x, axis=3):
        parts = np.stack(np.split(np.asarray(x), tables.shape[1], axis), axis=1)
        pages = np.full((count + 3, *parts.shape[2:]), 255 if x.dtype == np.uint8 else np.nan, x.dtype)
        pages[tables.reshape(-1)] = parts.reshape(count, *parts.shape[2:])
        return pages

    def whole(codes, axis):
        biases = None if codes.biases is None else paged(codes.biases)
        sections = tuple(paged(section, axis) for section in codes.sections)
        return codes._replace(sections=sections, scales=paged(codes.scales), biases=biases)

    return tables, whole(keys, axis or (2 if by_token(keys) else 3)), whole(values, 3)


def hidden(codes, seen):
    """Codes whose scales and biases of tokens (batch, T) that no query sees are not-a-number."""

    def of(x):
        return None if x is None else np.where(seen[:, None, None], np.asarray(x), np.nan).astype(x.dtype)

    return codes._replace(scales=of(codes.scales), biases=of(codes.biases))


def by_token(keys):
    """Returns whether the rows of packed keys are tokens, as in all that are no streams."""
    return keys.levels is None or isinstance(keys.levels, np.ndarray)


def attention(keys, values, y, seen, softcap=None, shift=0):
    """Computes attention in float64: the output, and the logarithm of the sum of exp(scores)."""
    scores = np.einsum("bhgd,bhtd->bhgt", y.astype(np.float64), keys) + shift
    scores = scores if softcap is None else softcap * np.tanh(scores / softcap)
    scores = np.where(seen[:, None, None], scores, -np.inf)
    weights = np.exp(scores - np.maximum(scores.max(-1, keepdims=True), -1e30))
    total = weights.sum(-1, keepdims=True)
    output = np.einsum("bhgt,bhtd->bhgd", weights / np.where(total > 0, total, 1), values)
    with np.errstate(divide="ignore"):
        return output, (np.log(total) + scores.max(-1, keepdims=True))[..., 0]


def error(found, expected):
    """The largest relative root mean square error of a head that has seen something."""
    size = np.sqrt((expected**2).mean(-1))
    return (np.sqrt(((found - expected) ** 2).mean(-1)) / np.where(size > 0, size, 1)).max()
