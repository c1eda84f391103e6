"""Scores of keys that turn with their positions after their codes have been decoded (rotary positions).

A warp has the levels of its 64 tokens in registers. A matrix makes of them both coordinates of a plane for each thread,
in exact integers. The angle of a token is a sum of three: where the 64 tokens begin, the thread's own first token, and
the distance from there, which all threads have alike (`TOKENS`). Keys turn by the second alone, with two numbers a plane
and thread. Queries turn back by the others, anew for each pair of rows of a product. Two columns of a product are one
query, turned for its first eight rows and for its last. Keys and queries are multiplied in float16, added in float32.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu import registers, warps
from pallas_kernels.gpu.columns import Columns
from pallas_kernels.gpu.levels import SLICE, TOKENS, Place
from pallas_kernels.gpu.operands import Arrays, Plan
from pallas_kernels.gpu.warp_softmax import TILE, Queries, begun, capped, grid
from pallas_kernels.packed import limbs

SPAN = 64
"""Tokens of a warp."""
DIMS, MAX_COLUMNS = (64, 128), 128
"""Dimensions of keys, and most columns of levels, for which there is room."""
LARGEST = 2.0**15
"""Bound of the numbers of a key in float16."""
APART = sorted({k - k % 2 for k in TOKENS})
"""Distances of pairs of rows from a thread's first token."""


class Turning(NamedTuple):
    """Keys as codes hold them, and how they turn: coordinates i and i + d / 2 in the plane i."""

    matrix: jax.Array
    """float32 (1 or heads, d, columns): unit vectors as queries of `decode_attention`."""
    frequencies: jax.Array
    """(d / 2,) radians a token."""
    begins: jax.Array
    """float32 (2, T / 64, d / 2): cosines and sines of the angles of each 64th token."""


class Turned(NamedTuple):
    """Operands of the kernel. Numbers of planes lie by pairs, as each four threads read them: see `_by_fours`."""

    matrix: jax.Array
    """int8 (1 or heads, 2 d, columns), see `packed.limbs`."""
    shared: jax.Array
    """uint32 (1 or heads, rows, 128): turns of each thread's first token, the means, and turns by `APART`."""
    queries: jax.Array
    """float32 (n, rows, 128): both coordinates for each thread, in the lower rows of a product as in the upper."""
    begins: jax.Array
    """float32 (1, T / 64, d): cosines and sines."""


def turned(turning: Turning, y: jax.Array, columned: bool) -> tuple[Turned, jax.Array]:
    """Returns operands for queries y (n, rows, d), and the factors (n, rows) of their scores."""
    n, rows, dim = y.shape
    matrix, half, heads = turning.matrix, dim // 2, len(turning.matrix)
    matrix, mean = (matrix[..., :-1], matrix[..., -1]) if columned else (matrix, jnp.zeros(matrix.shape[:2]))
    planes, mean = matrix.reshape(heads, 2, half, -1), mean.reshape(heads, 2, half)
    whole, unit = limbs(jnp.swapaxes(planes, 1, 2).reshape(heads, half, -1))
    whole = jnp.swapaxes(whole.reshape(heads, 2, half, 2, -1), 2, 3).reshape(heads, 2 * dim, -1)
    most = (127 * jnp.abs(planes).sum(-1) + jnp.abs(mean)).max(1) * (math.sqrt(2) / LARGEST)
    most = jnp.where(most > 0, most, 1)

    def turn(tokens: Any) -> jax.Array:
        angles = jnp.asarray(tokens, jnp.float32)[..., None] * turning.frequencies
        return jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=-1)

    own = _by_fours(turn([16 * (g >> 1) + 4 * (g & 1) for g in range(8)]) * (unit / most)[:, None, :, None])
    means = jnp.round(mean / jnp.where(unit > 0, unit, 1)[:, None]).astype(jnp.int32).reshape(heads, dim)
    means = jnp.tile(jnp.stack([means >> 7, means & 127], axis=-1), 2)
    apart = jnp.broadcast_to(_by_fours(turn(APART)), (heads, len(APART), half // 8, 4, 4))
    words = [lax.bitcast_convert_type(x, jnp.uint32).reshape(heads, -1) for x in (jnp.swapaxes(own, 1, 2), means, apart)]
    shared = jnp.concatenate(words, axis=1)
    shared = jnp.pad(shared, [(0, 0), (0, -shared.shape[1] % 128)]).reshape(heads, -1, 128)

    y = y.reshape(n // heads, heads, rows, 2, half) * most[:, None, None]
    y = jnp.stack([y, turned_back(y, turn(1))], axis=3).reshape(n, rows, 2, 2, half)
    factor = jnp.abs(y[:, :, 0]).max((2, 3))
    y = jnp.swapaxes(y / jnp.where(factor > 0, factor, 1)[:, :, None, None, None], 3, 4)
    queries = jnp.swapaxes(_by_fours(y).reshape(n, rows // TILE, 2 * TILE, half // 8, 4, 4), 2, 3)
    begins = _by_fours(jnp.moveaxis(turning.begins, 0, -1))
    return Turned(whole, shared, queries.reshape(n, -1, 128), begins.reshape(1, -1, dim)), factor


def turned_back(y: jax.Array, turn: jax.Array) -> jax.Array:
    """Turns y (..., 2, planes) back by turns (planes, 2)."""
    (left, right), (cos, sin) = jnp.moveaxis(y, -2, 0), jnp.moveaxis(turn, -1, 0)
    return jnp.stack([left * cos + right * sin, right * cos - left * sin], axis=-2)


def _by_fours(x: jax.Array) -> jax.Array:
    """Orders pairs of numbers of planes (..., planes, 2): (..., planes / 8, 4, 4) has those of a thread side by side."""
    x = x.reshape(*x.shape[:-2], -1, 2, 4, 2)
    return jnp.swapaxes(x, -3, -2).reshape(*x.shape[:-4], -1, 4, 4)


class Memory(NamedTuple):
    """Refs of `Turned` in shared memory; `matrix` has right sides of products, `begins` is of a block of tokens."""

    shared: Any
    queries: Any
    begins: Any


def turned_scores(
    plan: Plan, arrays: Arrays, table: Any, queries: Queries, memory: Memory, shift: Any, place: Place
) -> list[list[jax.Array]]:
    """Scores of the thread's tokens by tiles of queries, in base 2; `shift` has numbers to be added to them."""
    side, dim, interpret, tiles = plan.keys, plan.turned, plan.interpret, plan.rows // TILE
    scores = begun(plan, queries, shift, place)
    scale = grid(side, arrays, 0, place)[0]
    count, parts, steps = 4 // side.passes, side.dim // SLICE, dim // 16
    means, apart = 512 * steps, 512 * steps + 16 * dim

    def load(ref: Any, offset: Any, **options: Any) -> list[jax.Array]:
        return warps.load(ref, offset, 4, interpret=interpret, **options)

    def floats(ref: Any, offset: Any, **options: Any) -> list[list[jax.Array]]:
        """Two pairs of numbers."""
        words = [lax.bitcast_convert_type(x, jnp.float32) for x in load(ref, offset, **options)]
        return [words[:2], words[2:]]

    for outer in range(side.passes):
        lefts = list(side.key_factors(arrays.sections, table, 0, outer, place))

        def coordinates(tile: Any, lefts=lefts) -> list[jax.Array]:
            """One of four coordinates of the tokens, the thread's own."""
            mean = load(memory.shared, means + 64 * tile + (place.q << 4))
            sums = [[lax.bitcast_convert_type(x, jnp.int32) for x in mean]] * count
            for part, factors in lefts:
                right = load(queries.ref, 512 * (parts * tile + part) + (place.lane << 4))
                products = [(f.total, f.words, right[f.first : f.first + 2]) for f in factors]
                sums = warps.multiply_add(sums, products, interpret=interpret)
            return [(x[2 * r] * 128 + x[2 * r + 1]).astype(jnp.float32) for x in sums for r in range(2)]

        def step(s: Any, sums: Any, outer=outer, coordinates=coordinates) -> Any:
            """Adds the products of 16 coordinates."""
            keys, own = [], floats(memory.shared, 512 * s + (place.lane << 4))
            for k, (cos, sin) in enumerate(own):
                left, right = (coordinates(2 * s + k + dim // 8 * i) for i in range(2))
                pairs = [(a * cos - b * sin, a * sin + b * cos) for a, b in zip(left, right, strict=True)]
                keys.append([warps.to_halves(*pair, interpret=interpret) for pair in pairs])
            fours = 64 * s + (place.q << 4)
            begin = floats(memory.begins, 4 * dim * place.part + fours, half=place.half)
            products = []
            for t in range(tiles):
                y = floats(memory.queries, 512 * (steps * t + s) + (place.lane << 4))
                y = [_back(*pair) for pair in zip(y, begin, strict=True)]
                for k in range(count):
                    number = APART.index(TOKENS[side.token(outer, k, 0)])
                    turns = floats(memory.shared, apart + 64 * steps * number + fours) if number else None
                    own_y = [_back(*pair) for pair in zip(y, turns, strict=True)] if turns else y
                    words = [warps.to_halves(*pair, interpret=interpret) for pair in own_y]
                    products.append((count * t + k, [keys[i][2 * k + r] for i in range(2) for r in range(2)], words))
            return warps.multiply_add(list(sums), products, interpret=interpret, halves=True)

        zero = registers.full(jnp.float32(0), (registers.THREADS,), registers.words_layout(), interpret=interpret)
        sums = lax.fori_loop(0, steps, step, [[zero] * 4] * (count * tiles))
        for t in range(tiles):
            for inner in range(count):
                for i in range(2):
                    k, number = side.token(outer, inner, i), sums[count * t + inner][3 * i]
                    scores[t][k] = scores[t][k] + number * (scale[k] * queries.unit[t])
    return capped(plan, scores)


def _back(pair: list[jax.Array], turn: list[jax.Array]) -> list[jax.Array]:
    (left, right), (cos, sin) = pair, turn
    return [left * cos + right * sin, right * cos - left * sin]
