"""Decode attention to keys and values by levels, in which every warp has tokens and a running softmax of its own.

Products are `mma.m16n8k32` with codes as the left side. Their 8 columns are two limbs of 4 queries. No warp waits for
another but for copies, so that there are no barriers within a step; the sums of the four are put together at the end.
A page is half of a block of tokens.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import latents, registers, warps
from pallas_kernels.gpu.columns import Columns, Lookup
from pallas_kernels.gpu.levels import BLOCK, PAGE, SLICE, Levels, Place
from pallas_kernels.gpu.operands import Operands, Plan, share
from pallas_kernels.gpu.rings import Ring, StateLevels
from pallas_kernels.gpu.turning import SPAN, Memory, Turned, turned_scores
from pallas_kernels.gpu.warp_softmax import (
    LARGEST,
    TILE,
    Carry,
    Queries,
    Side,
    accumulated,
    over_tokens,
    scores_of,
    seen,
)
from pallas_kernels.packed import NEVER, Packed

MAX_SUMS = 2048
"""Most queries times dimensions: each thread has a sixteenth of them in registers."""
STAGES = 2
"""Blocks of tokens that are being copied or used; of latents one, beside that of another block of threads."""
PROCESSORS = 132
SHARED, OWN = 228 * 1024, 1024 + 32
"""Bytes of shared memory of a processor, and those that each block of threads has besides its own arrays."""
WARPS = registers.THREADS // 32


def most_rows(keys: Packed, values: Packed, dim: int, *, turned: bool = False, latent: bool = False) -> int:
    """Returns the queries of a head that registers suffice for at once."""
    if turned:
        return 2 * TILE
    if latent:
        return min(4 * TILE, WARPS * MAX_SUMS // dim)
    lookups = [codes.levels for codes in (keys, values) if isinstance(codes.levels, Lookup | StateLevels)]
    columns = [len(lookup.starts) for lookup in lookups if isinstance(lookup, Lookup)]
    return min(2 * TILE if lookups else 4 * TILE, MAX_SUMS // max([dim, *columns]))


def splits_of(plan: Plan, heads: int, tokens: int) -> int:
    """Returns the shares of a head's tokens for which whole waves of thread blocks take least.

    A share takes as long as its blocks of tokens, and one more to begin and to end.
    """
    blocks, slots = -(-tokens // BLOCK), PROCESSORS * resident(plan)

    def cost(splits: int) -> int:
        return -(-heads * splits // slots) * (-(-blocks // splits) + 1)

    return min(range(1, blocks + 1), key=cost)


def resident(plan: Plan) -> int:
    """Returns the blocks of threads that a processor has room for: a test holds it to what the compiler reports."""
    sides = plan.keys, plan.values
    if plan.latent:
        codes = BLOCK * sum(side.bits * side.dim // 8 + 2 for side in sides)
        own = codes + 2 * plan.rows * sum(side.dim for side in sides) + 512 * latents.Exchange.rows(plan.rows // TILE)
        return min(SHARED // (own + OWN), 2)
    of_token = sum(int(side.bits * plan.dim) // 8 + 2 * side.groups * (1 + side.biased) for side in sides)
    queries = plan.rows // TILE * plan.dim // 16 // plan.keys.loaded * 512
    if plan.turned:
        of_token += plan.turned * 4 // SPAN
        queries = plan.turned * (2 * plan.keys.dim + plan.rows // TILE * 32 + 56)
    tables = 128 * sum(side.memory for side in _tabled(plan))
    by_memory = SHARED // (STAGES * BLOCK * of_token + queries + tables + OWN)
    rings = any(side.memory for side in sides)
    untabled = not rings and not any(side.tabled for side in sides)
    if plan.turned:
        by_registers = 2
    elif rings:
        by_registers = 3 if plan.dim == 64 else 2
    elif plan.rows == TILE:
        by_registers = 4 if plan.dim == 64 or untabled or max(side.bits for side in sides) < 3 else 3
    else:
        few = plan.dim == 64 or (untabled and plan.keys.groups == plan.values.groups == 1)
        by_registers = 3 if few and plan.rows == 2 * TILE else 2
    return max(1, min(by_memory, by_registers))


def latent_side(codes: Packed, dim: int) -> latents.Latents:
    """Codes of keys, or of values, that lie as values."""
    return latents.Latents(*value_side(codes, dim, dim)._replace(interleaved=False))


def key_side(codes: Packed, dim: int, columns: int) -> Side:
    """Keys that are multiplied by so many columns, queries or coordinates."""
    return _side(codes, codes.scales.shape[3], dim, columns)


def value_side(codes: Packed, dim: int, rows: int) -> Side:
    return _side(codes, dim, dim, rows)


def _side(codes: Packed, period: int, dim: int, rows: int) -> Side:
    if isinstance(codes.levels, Lookup):
        return Columns(len(codes.levels.starts), codes.sections[0].shape[2], codes.levels.levels.shape[1])
    if isinstance(codes.levels, StateLevels):
        return Ring(dim, 8 * codes.sections[0].shape[2] // dim, codes.levels)
    bits = sum(8 * section.shape[-2] // period for section in codes.sections)
    tabled = codes.levels is not None or bits < 4
    return Levels(dim, bits, codes.scales.shape[2], codes.biases is not None, tabled, tabled and rows == TILE)


def call(
    plan: Plan,
    vectors: jax.Array,
    columns: jax.Array,
    start: jax.Array,
    stop: jax.Array,
    pages: jax.Array | None,
    key_table: jax.Array,
    value_table: jax.Array,
    operands: Operands,
    turned: Turned | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The kernel. Its sums (n, splits, d, rows), largest scores and totals (n, splits, rows) are in base 2.

    Args:
      plan: static facts; `rows` is a multiple of 4.
      vectors: int8 (n, 2 rows, d), see `packed.limbs`; of keys that turn float32, see `turning.turned_queries`.
      columns: float32 (n, 2 + groups, rows): unit of the vectors times that of levels (for each of `Plan.scored`), what
        is added to all scores, sums of the groups of dimensions of queries; if these see different tokens, how many of
        the last each does not see.
      start, stop: int32 (n,).
      pages: int32 (sequences, T / 128).
      key_table, value_table: as `Levels.table` returns them.
      operands: codes, scales and biases; `shift` is (n, rows, T).
      turned: of keys that turn.
    """
    limbs = vectors if turned is None else turned.matrix
    heads, (_, lines, dim) = len(columns), limbs.shape
    tiles, interpret = plan.rows // TILE, plan.interpret
    leaves, tree = jax.tree.flatten(operands)
    tables = [] if pages is None else [pages]
    turns = [] if turned is None else [turned.shared, vectors]
    tokens = operands.values.scales.shape[2] if pages is None else PAGE * pages.shape[1]
    columned = any(isinstance(side, Columns) for side in (plan.keys, plan.values))  # whose rows are of 128 tokens
    halves = 1 if pages is None and tokens % BLOCK == 0 and not columned else 2
    vectors = lines // (2 * TILE) * (dim // 16 // plan.keys.loaded)

    def kernel(limbs_ref, columns_ref, start_ref, stop_ref, key_table, value_table, minus_one, *refs):
        *blocks, sums_ref, largest_ref, total_ref, memory, looked_up, turn_memory, exchanged, barrier = refs
        turn_refs, blocks = blocks[: len(turns)], blocks[len(turns) :]
        pages_ref, blocks = blocks[: len(tables)], blocks[len(tables) :]
        n, split = lax.axis_index("n"), lax.axis_index("split")
        place = Place.of(halves, interpret)
        queries = _queries(plan, limbs_ref.at[lax.rem(n, len(limbs))], columns_ref.at[n], memory, place)
        for ref, own in zip(turn_refs, turn_memory, strict=True):
            _copy(n, ref, own, barrier)
        pairs = zip((key_table, value_table), looked_up, strict=False)
        levels = [_table(n, *pair, minus_one, barrier) for pair in pairs]
        levels = levels if len(levels) == 2 else 2 * levels
        exchange = [latents.Exchange(ref, place) for ref in exchanged]
        begin, end = start_ref[n], stop_ref[n]
        first, count = share(begin, end, split, plan.splits, BLOCK)

        def step(indices, *arguments):
            *refs, carry = arguments
            refs = [ref.at[0] for ref in refs]
            pieces = [tuple(refs[k : k + halves]) for k in range(0, len(refs), halves)]
            keys, values, shift, begins = tree.unflatten(pieces)
            token = (first + indices[0]) * BLOCK
            if turned is None:
                codes = [(values, levels[1])] * plan.latent + [(keys, levels[0])]
                scores = scores_of(plan, codes, queries, shift, place)
            else:
                turning = Memory(*turn_memory, begins)
                scores = turned_scores(plan, keys, levels[0], queries, turning, shift, place)
            mask = seen(place, begin - token, end - token)
            masks = [seen(place, begin - token, end - token - hidden) for hidden in queries.hidden] or [mask] * tiles
            if exchange:
                return latents.accumulated(plan, values, levels[1], scores, mask, masks, carry, *exchange)
            return accumulated(plan, values, levels[1], scores, mask, masks, carry, place)

        def index(i, half, *, token, paged, row):
            """The block of an array whose tokens are on an axis, in pages or in a row of the array."""
            block = halves * (first + i) + half
            if halves == 2:  # the first and the last block may have one page that is seen, and there need be no other
                block = jnp.clip(block, lax.div(begin, PAGE), lax.div(end - 1, PAGE))
            if paged:
                page = pages_ref[0][lax.div(n, heads // len(pages)), block]
                return page * plan.heads + lax.rem(n, plan.heads), 0, 0
            return row, *(block * (axis == token) for axis in (1, 2))

        def specs(x, token, *, coded=False, paged=bool(tables)):
            shape = [1, *x.shape[1:]]
            shape[token] = shape[token] * BLOCK // halves // (PAGE if paged else tokens)
            transforms = registers.tiling(shape[2]) if coded and shape[1] % 8 == 0 else ()
            of_keys = lax.div(n, plan.parts * plan.heads) * plan.heads + lax.rem(n, plan.heads)
            row = n if len(x) == heads else 0 if len(x) == 1 else of_keys
            of = functools.partial(index, token=token, paged=paged, row=row)
            return [
                plgpu.BlockSpec(tuple(shape), functools.partial(of, half=half), transforms=transforms)
                for half in range(halves)
            ]

        def of_side(arrays, token):
            sections = [spec for x in arrays.sections for spec in specs(x, token, coded=True)]
            return sections + [spec for x in arrays[1:] if x is not None for spec in specs(x, 2)]

        full = lambda x: registers.full(  # noqa: E731
            jnp.float32(x), (registers.THREADS,), registers.words_layout(), interpret=interpret
        )
        carry = Carry(
            (full(NEVER / 2),) * tiles,
            (full(0),) * tiles,
            ((full(0),) * (plan.values.groups * plan.values.biased),) * tiles,
            ((full(0),) * (plan.dim // 8 // (WARPS if plan.latent else 1)),) * tiles,
        )
        keys = of_side(operands.keys, 1 if type(plan.keys) is Levels else 2)
        shift = [] if operands.shift is None else specs(operands.shift, 2, paged=False)
        begins = [] if operands.begins is None else specs(operands.begins, 1, paged=False)
        pipeline = plgpu.emit_pipeline(
            step,
            grid=(count,),
            in_specs=[*keys, *of_side(operands.values, 2), *shift, *begins],
            max_concurrent_steps=1 if plan.latent else STAGES,
            init_carry=carry,
        )
        carry = pipeline(*(ref for ref in blocks for _ in range(halves)))
        out = [ref.at[n, split] for ref in (sums_ref, largest_ref, total_ref)]
        if exchange:
            latents.write(plan, carry, out, *exchange)
            return
        scratch = plgpu.SMEM((2 * tiles + plan.dim // 8 + 1, registers.THREADS), jnp.float32)
        pl.run_scoped(lambda scratch: _merge(plan, carry, out, scratch, place), scratch)

    shapes = [(plan.dim + isinstance(plan.values, Columns), plan.rows), (plan.rows,), (plan.rows,)]
    return plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct((heads, plan.splits, *shape), jnp.float32) for shape in shapes],
        grid=(heads, plan.splits),
        grid_names=("n", "split"),
        scratch_types=[
            plgpu.SMEM((vectors, 128), jnp.uint32),
            [[plgpu.SMEM((side.memory, 128), jnp.int8)] * (side.memory > 0) for side in _tabled(plan)],
            [plgpu.SMEM(x.shape[1:], x.dtype) for x in turns],
            [plgpu.SMEM((latents.Exchange.rows(tiles), 128), jnp.uint32)] * plan.latent,
            plgpu.Barrier(),
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, approx_math=True),
        kernel_name="decode_attention",
        interpret=interpret,
    )(limbs, columns, start, stop, key_table, value_table, jnp.full(1, 2**32 - 1, jnp.uint32), *turns, *tables, *leaves)


def _tabled(plan: Plan) -> list[Side]:
    """Sides that have a table; keys and values by one trellis share it."""
    shared = isinstance(plan.keys, Ring) and plan.keys == plan.values
    return [plan.keys] if shared else [plan.keys, plan.values]


def _table(n: Any, table: Any, memory: list[Any], minus_one: Any, barrier: Any) -> Any:
    """Levels as words, and -1 for `warps.complement`; or copied into shared memory if there is some for them."""
    if not memory:
        return [*(table[k] for k in range(table.shape[0])), minus_one[0]]
    return _copy(n, table, memory[0], barrier)


def _copy(n: Any, source: Any, memory: Any, barrier: Any) -> Any:
    """Copies what a head has into shared memory; heads of all sequences may have the same."""
    plgpu.copy_gmem_to_smem(source.at[lax.rem(n, source.shape[0])], memory, barrier)
    plgpu.barrier_wait(barrier)
    return memory


def _queries(plan: Plan, limbs: Any, columns: Any, memory: Any, place: Place) -> Queries:
    """Queries of a head; right sides of its limbs are put into shared memory, few by each warp, many by one each."""
    interpret, tiles = plan.interpret, range(plan.rows // TILE)
    half, width = limbs.shape[0] // 2, memory.shape[0] // (limbs.shape[0] // (2 * TILE))
    for k in range(half // TILE // (WARPS if plan.turned else 1)):
        tile = WARPS * k + place.warp if plan.turned else k
        row, vector = (place.g & 1) * half + TILE * tile + (place.g >> 1), tile * width
        for part in range(limbs.shape[1] // SLICE):
            words = plan.keys.query_words(limbs, row, part, place)
            for right in plan.keys.right(words, interpret=interpret):
                warps.store(memory, (place.lane << 4) + 512 * vector, right, interpret=interpret)
                vector += 1
    plgpu.commit_smem()

    def column(k, t):
        (word,) = warps.load(columns, 4 * (k * plan.rows + TILE * t + place.q), 1, interpret=interpret)
        return lax.bitcast_convert_type(word, jnp.float32)

    *units, shift = ([column(k, t) for t in tiles] for k in range(len(plan.scored) + 1))
    first, count = len(units) + 1, 0 if plan.turned or plan.latent else plan.keys.groups
    groups = [[column(first + g, t) for t in tiles] for g in range(count * plan.keys.biased)]
    hidden = [column(first + count, t).astype(jnp.int32) for t in tiles] if columns.shape[0] > first + count else []
    return Queries(memory, units, shift, groups, hidden)


def _merge(plan: Plan, carry: Carry, out: list[Any], scratch: Any, place: Place) -> None:
    """Puts the sums of the warps together, and writes them."""
    interpret, tiles = plan.interpret, range(plan.rows // TILE)
    sums_ref, largest_ref, total_ref = out

    def write(row, numbers):
        for k, x in enumerate(numbers):
            warps.store(scratch, 4 * ((place.warp << 5) + place.lane) + 512 * (row + k), [x], interpret=interpret)

    def read(row):
        """The numbers of the four warps at a lane."""
        found = []
        for warp in range(WARPS):
            (word,) = warps.load(scratch, 512 * row + 4 * (32 * warp + place.lane), 1, interpret=interpret)
            found.append(lax.bitcast_convert_type(word, jnp.float32))
        return found

    plgpu.commit_smem()  # all warps have read their last block, whose memory this is
    write(0, carry.largest)
    plgpu.commit_smem()
    largest = [functools.reduce(jnp.maximum, read(t)) for t in tiles]
    factors = [jnp.exp2(carry.largest[t] - largest[t]) for t in tiles]
    write(len(tiles), [over_tokens(jnp.add, carry.total[t], interpret) * factors[t] for t in tiles])
    unit, columned = plan.values.unit / LARGEST, isinstance(plan.values, Columns)
    first = 2 * len(tiles)
    for t in tiles:
        biases = [over_tokens(jnp.add, x, interpret) for x in carry.biases[t]]
        sums = [x * unit for x in carry.sums[t]]
        if columned:
            sums += biases
        elif biases:
            each = plan.dim // len(biases)
            sums = [x + biases[plan.values.dimension(k) // each] for k, x in enumerate(sums)]
        write(first, [x * factors[t] for x in sums])
        plgpu.commit_smem()
        offset = 4 * (TILE * t + place.q)
        for i in range(plan.dim // 32):  # each warp adds up one of four numbers
            total = sum(read(first + 4 * i + place.warp))
            dim = plan.values.dimension(4 * i + place.warp) + place.row
            warps.store(sums_ref, 4 * plan.rows * dim + offset, [total], interpret=interpret)
        if columned:
            total = sum(read(first + plan.dim // 8))
            warps.store(sums_ref, 4 * plan.rows * plan.dim + offset, [total], interpret=interpret)
        warps.store(largest_ref, offset, [largest[t]], interpret=interpret)
        warps.store(total_ref, offset, [sum(read(len(tiles) + t))], interpret=interpret)
        plgpu.commit_smem()
