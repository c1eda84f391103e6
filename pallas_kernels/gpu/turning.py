"""Scores of keys that turn with their positions after their codes have been decoded (rotary positions).

A warp has the levels of its 64 tokens in registers. A matrix makes of them both coordinates of a plane for each thread,
in exact integers. The angle of a token is a sum of three: where the 64 tokens begin, the thread's own first token, and
the distance from there (`TOKENS`). Keys turn by the second and by the distance of a run of four tokens, queries turn
back by the rest. Two columns of a product are one query, turned for the first eight rows and for the last. Keys and
queries are multiplied in float16 and added up in float32: the errors of scores are 3e-4 of their spread.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gpu import registers, warps
from pallas_kernels.gpu.levels import SLICE, TOKENS, Factor, Place
from pallas_kernels.gpu.operands import Arrays, Plan
from pallas_kernels.gpu.warp_softmax import TILE, Queries, begun, capped, grid
from pallas_kernels.packed import limbs

SPAN = 64
"""Tokens of a warp."""
DIMS, MAX_COLUMNS = (64, 128), 128
"""Dimensions of keys, and most columns of levels, for which there is room."""
LARGEST = 2.0**15
"""Bound of the numbers of a key in float16."""
RUN, PAIR = 8, 2
"""Distances that turn keys, and queries: the tokens of a thread are 0 and 1, from 0, `PAIR`, `RUN` and both on."""


class Turning(NamedTuple):
    """Keys as codes hold them, and how they turn: coordinates i and i + d / 2 in the plane i."""

    planes: jax.Array
    """float32 (d, d), by which queries are multiplied from the right to have their coordinates so."""
    matrix: jax.Array
    """float32 (1 or heads, d, columns): unit vectors as queries of `decode_attention`."""
    frequencies: jax.Array
    """(d / 2,) radians a token."""
    begins: jax.Array
    """float32 (2, T / 64, d / 2): cosines and sines of the angles of each 64th token."""


class Turned(NamedTuple):
    """Operands of the kernel that follow from the codes. Two numbers of each plane lie side by side."""

    matrix: jax.Array
    """int8 (1 or heads, 2 d, columns), see `packed.limbs`, all left coordinates before the right ones."""
    shared: jax.Array
    """uint32 (1 or heads, rows, 128): turns of each thread's first token, the means, and turns by `RUN` and `PAIR`."""
    begins: jax.Array
    """float32 (1, T / 64, d): cosines and sines."""


def turned(turning: Turning, columned: bool) -> tuple[Turned, jax.Array]:
    """Returns operands, and a matrix by which queries are multiplied from the right, float32 (1 or heads, d, 2 d).

    Then they are as the first eight rows of a product take them, and behind that as the last take them.
    """
    matrix = turning.matrix
    heads, dim = matrix.shape[:2]
    half = dim // 2
    matrix, mean = (matrix[..., :-1], matrix[..., -1]) if columned else (matrix, jnp.zeros(matrix.shape[:2]))
    planes, mean = matrix.reshape(heads, 2, half, -1), mean.reshape(heads, 2, half)
    whole, unit = limbs(jnp.swapaxes(planes, 1, 2).reshape(heads, half, -1))
    whole = jnp.swapaxes(whole.reshape(heads, 2, half, 2, -1), 2, 3).reshape(heads, 2 * dim, -1)
    most = (127 * jnp.abs(planes).sum(-1) + jnp.abs(mean)).max(1) * (math.sqrt(2) / LARGEST)
    most = jnp.where(most > 0, most, 1)

    def turn(tokens: Any) -> jax.Array:
        angles = jnp.asarray(tokens, jnp.float32)[..., None] * turning.frequencies
        return jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=-1)

    own = turn([16 * (g >> 1) + 4 * (g & 1) for g in range(8)]) * (unit / most)[:, None, :, None]
    own = jnp.swapaxes(own.reshape(heads, 8, half // 4, 8), 1, 2)
    means = jnp.round(mean / jnp.where(unit > 0, unit, 1)[:, None]).astype(jnp.int32).reshape(heads, dim)
    means = jnp.tile(jnp.stack([means >> 7, means & 127], axis=-1), 2)
    apart = jnp.broadcast_to(turn([RUN, PAIR]), (heads, 2, half, 2))
    words = [lax.bitcast_convert_type(x, jnp.uint32).reshape(heads, -1) for x in (own, means, apart)]
    shared = jnp.concatenate(words, axis=1)
    shared = jnp.pad(shared, [(0, 0), (0, -shared.shape[1] % 128)]).reshape(heads, -1, 128)

    y = turning.planes.reshape(dim, 2, half) * most[:, None, None]
    queries = jnp.stack([y, turned_back(y, turn(1))], axis=2).reshape(heads, dim, 2 * dim)
    begins = jnp.moveaxis(turning.begins, 0, -1)
    return Turned(whole, shared, begins.reshape(1, -1, dim)), queries


def turned_queries(matrix: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns queries y (n, rows, d) as the kernel takes them, and the factors (n, rows) of their scores.

    Both coordinates for a thread lie side by side in float32 (n, 2 rows d / 128, 128). The matrix is that of `turned`.
    """
    n, rows, dim = y.shape
    heads = len(matrix)
    by_head = y.reshape(n // heads, heads, rows, dim)
    y = jnp.einsum("bhrd,hdc->bhrc", by_head, matrix, precision=lax.Precision.HIGHEST).reshape(n, rows, 2 * dim)
    factor = jnp.abs(y[..., :dim]).max(2)
    y = y / jnp.where(factor > 0, factor, 1)[..., None]
    y = jnp.swapaxes(y.reshape(n, rows, 2, 2, dim // 2), 3, 4)
    y = jnp.swapaxes(y.reshape(n, rows // TILE, 2 * TILE, dim // 8, 8), 2, 3)
    return y.reshape(n, -1, 128), factor


def place_of(row: Any, column: Any, dim: int) -> tuple[Any, Any]:
    """The place in `turned_queries` of a number of multiplied queries (rows, 2 d)."""
    half = dim // 2
    plane, side, lower = column & (half - 1), column // half & 1, column // dim
    place = (((row // TILE * (half // 4) + plane // 4) * TILE + row % TILE) * 2 + lower) * 8 + plane % 4 * 2 + side
    return place // 128, place % 128


def turned_back(y: jax.Array, turn: jax.Array) -> jax.Array:
    """Turns y (..., 2, planes) back by turns (planes, 2)."""
    (left, right), (cos, sin) = jnp.moveaxis(y, -2, 0), jnp.moveaxis(turn, -1, 0)
    return jnp.stack([left * cos + right * sin, right * cos - left * sin], axis=-2)


class Memory(NamedTuple):
    """Refs of `Turned` in shared memory; `begins` is of a block of tokens."""

    shared: Any
    queries: Any
    begins: Any


def turned_scores(
    plan: Plan, arrays: Arrays, table: Any, queries: Queries, memory: Memory, shift: Any, place: Place
) -> list[list[jax.Array]]:
    """Scores of the thread's tokens by tiles of queries, in base 2; `shift` has numbers to be added to them."""
    side, dim, interpret = plan.keys, plan.turned, plan.interpret
    count, parts, steps = 4 // side.passes, side.dim // SLICE, dim // 8
    rows = [(outer, inner) for outer in range(side.passes) for inner in range(count)]  # of four products
    first = [TOKENS[side.token(*row, 0)] for row in rows]
    means, run, pair = 256 * steps, 256 * steps + 16 * dim, 256 * steps + 20 * dim
    lefts: list[list[Factor]] = [[] for _ in range(parts)]
    for outer in range(side.passes):
        for part, factors in side.key_factors(arrays.sections, table, 0, outer, place):
            lefts[part] += [f._replace(total=count * outer + f.total) for f in factors]
            warps.kept_apart(interpret=interpret)

    def load(ref: Any, offset: Any, **options: Any) -> list[jax.Array]:
        words = warps.load(ref, offset, 2, interpret=interpret, **options)
        return [lax.bitcast_convert_type(x, jnp.float32) for x in words]

    def coordinates(tile: Any) -> list[jax.Array]:
        """One of four coordinates of the tokens, the thread's own."""
        mean = warps.load(memory.shared, means + 64 * tile + (place.q << 4), 4, interpret=interpret)
        sums = [[lax.bitcast_convert_type(x, jnp.int32) for x in mean]] * len(rows)
        for part, factors in enumerate(lefts):
            offset = 512 * (parts * tile + part) + (place.lane << 4)
            right = warps.load(queries.ref, offset, 4, interpret=interpret)
            products = [(f.total, f.words, right[f.first : f.first + 2]) for f in factors]
            sums = warps.multiply_add(sums, products, interpret=interpret)
        return [(x[2 * r] * 128 + x[2 * r + 1]).astype(jnp.float32) for x in sums for r in range(2)]

    def step(s: Any, sums: Any) -> Any:
        """Adds the products of four planes."""
        plane = 32 * s + (place.q << 3)
        own = load(memory.shared, 256 * s + (place.lane << 3))
        turns = [own, _turned(own, load(memory.shared, run + plane))]
        both = zip(coordinates(s), coordinates(s + steps), strict=True)
        keys = [_turned(some, turns[first[k // 2] // RUN]) for k, some in enumerate(both)]
        keys = [warps.to_halves(*some, interpret=interpret) for some in keys]
        begin, products = load(memory.begins, 4 * dim * place.part + plane, half=place.half), []
        for t in range(plan.rows // TILE):
            y = _back(load(memory.queries, 256 * (steps * t + s) + (place.lane << 3)), begin)
            words = [
                warps.to_halves(*some, interpret=interpret) for some in (y, _back(y, load(memory.shared, pair + plane)))
            ]
            products += [
                (len(rows) * t + k, keys[2 * k : 2 * k + 2], [words[token % RUN // PAIR]])
                for k, token in enumerate(first)
            ]
        return warps.multiply_add(list(sums), products, interpret=interpret)

    zero = registers.full(jnp.float32(0), (registers.THREADS,), registers.words_layout(), interpret=interpret)
    sums = lax.fori_loop(0, steps, step, [[zero] * 4] * (len(rows) * plan.rows // TILE))
    scale, scores = grid(side, arrays, 0, place)[0], begun(plan, queries, shift, place)
    for t, unit in enumerate(queries.units[0]):
        for k, (row, i) in enumerate((row, i) for row in rows for i in range(2)):
            token = side.token(*row, i)
            scores[t][token] = scores[t][token] + sums[len(rows) * t + k // 2][3 * i] * (scale[token] * unit)
    return capped(plan, scores)


def _turned(pair: Any, turn: list[jax.Array]) -> list[jax.Array]:
    (left, right), (cos, sin) = pair, turn
    return [left * cos - right * sin, left * sin + right * cos]


def _back(pair: list[jax.Array], turn: list[jax.Array]) -> list[jax.Array]:
    (left, right), (cos, sin) = pair, turn
    return [left * cos + right * sin, right * cos - left * sin]
