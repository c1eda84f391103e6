"""A kernel over tiles of tokens: its memory, its rotation, its launch.

A rotation is a chain of stages, each a pair of a name and arrays, the first acting first:

- "rotor" and its inverse "rotor_inverse": bivectors (d // 3, 3) and the angle of a planar rotor, (1,) or (0,), float32.
- "hadamard": signs (d,), which act first; "hadamard_inverse": signs, which act last.
- "dense": a matrix (d, d) in float32, as the only stage.

Each block of threads makes tables (levels, a rotor's coefficients) in shared memory while it waits for its vectors.
Outside of the kernel they would take launches of their own.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu import packing, quantize, registers, stages
from pallas_kernels.gpu.mosaic import LANE
from pallas_kernels.gpu.rows import Rows
from pallas_kernels.gpu.stages import Fields, Tile

DIMS = (64, 80, 96, 128, 192, 256, 512)
DENSE_DIMS = (64, 128, 256)
DTYPES = ("float32", "bfloat16", "float16")
PROCESSORS = 132
SHARED, OWN = 228 * 1024, 1024 + 32
"""Bytes of shared memory of a processor, and those that each block of threads has besides its own arrays."""
STAGES = 2
"""Tiles of a block of threads that are being copied or used."""
ROTORS = {"rotor", "rotor_inverse"}

Rotation: TypeAlias = tuple[tuple[str, tuple[jax.Array, ...]], ...]
Memory: TypeAlias = dict[str, Any]
"""Inputs, outputs and shared memory of a kernel by their names."""


def launch(
    body: Callable[..., Any],
    inputs: dict[str, jax.Array],
    out: dict[str, Any],
    memory: Memory,
    tile: Tile,
    n: int,
    interpret: Any,
    name: str,
    *,
    copied: tuple[str, ...] = (),
    stages: int = STAGES,
    prepare: Callable[[Memory, jax.Array], Any] = lambda m, start: None,
) -> list[jax.Array]:
    """Runs `body(m, start, count, following, carry)` on each tile of n tokens: those from `start` on, `count` or more.

    A block of threads has every so many tiles. It has `prepare(m, start)` make tables and the first carry. Of inputs in
    `copied`, `m["x of tile"]` is shared memory with this tile's vectors. `following()` begins the copies of the next
    tile, into memory of the tile before or of this one if there is one stage. It returns the start of the next tile, or
    of the last. A GPU's copies stop at the last row; the interpreter needs more rows.
    """
    count = -(-n // tile.rows.tokens)
    spaces = {f"{key} of tile": tile.rows.swizzled(tile.dim, inputs[key].dtype, stages) for key in copied}
    each, blocks = shares(count, name, {**memory, **spaces}) if name in RESIDENT else (1, count)
    stages = min(stages, each)
    spaces = {f"{key} of tile": tile.rows.swizzled(tile.dim, inputs[key].dtype, stages) for key in copied}
    rows = count * tile.rows.tokens if interpret else n
    arrays = [jnp.pad(a, [(0, rows - n)] + [(0, 0)] * (a.ndim - 1)) if k in BY_TOKEN else a for k, a in inputs.items()]
    keys = [*inputs, *out, *memory, *spaces, "barrier"]

    def kernel(*refs):
        m = dict(zip(keys, refs, strict=True))
        first = lax.axis_index("block")

        def start_of(i):
            return jnp.minimum(first + i * blocks, count - 1) * tile.rows.tokens

        def copy(i):
            slot = lax.rem(i, stages)
            for key in copied:
                target = tile.rows.by_token(m[f"{key} of tile"].at[slot])
                plgpu.copy_gmem_to_smem(of_tile(m[key], start_of(i), tile), target, m["barrier"].at[slot])

        def step(i, carry):
            slot = lax.rem(i, stages)

            def following():
                if copied and each > 1:
                    pl.when(first + (i + 1) * blocks < count)(lambda: copy(i + 1))
                return start_of(i + 1)

            if copied:
                plgpu.barrier_wait(m["barrier"].at[slot])
            of_this = {key: m[key].at[slot] for key in spaces}
            return body({**m, **of_this}, start_of(i), n - start_of(i), following, carry)

        if copied:
            copy(0)
        lax.fori_loop(0, lax.div(count - 1 - first, blocks) + 1, step, prepare(m, start_of(0)))
        plgpu.wait_smem_to_gmem(0)

    run = plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct((rows, *s.shape[1:]), s.dtype) for s in out.values()],
        scratch_types=[
            *memory.values(),
            *spaces.values(),
            plgpu.Barrier(num_arrivals=len(copied) or 1, num_barriers=stages),
        ],
        grid=(blocks,),
        grid_names=("block",),
        compiler_params=LANE,
        interpret=interpret,
        kernel_name=name,
    )
    return [a[:n] for a in run(*arrays)]


FEW = 3
"""Blocks of threads of a processor that suffice, if each copies its next tile while it works on one."""
RESIDENT = {
    "encode_rotor": 5,
    "encode_hadamard": 4,
    "encode_rotor_hadamard": 4,
    "encode_hadamard_rotor": 4,
    "encode_dense": 2,
    "decode_rotor_inverse": 4,
    "decode_hadamard_inverse": 5,
    "decode_hadamard_inverse_rotor_inverse": 4,
    "decode_rotor_inverse_hadamard_inverse": 4,
    "rotor_roundtrip": 4,
}
"""Blocks of threads of a kernel whose registers a processor has."""


def shares(tiles: int, name: str, memory: Memory) -> tuple[int, int]:
    """Returns the most tiles of a block of threads, and the blocks that take so many, all at once.

    Where memory of two tiles leaves room for few blocks, each has one tile: instructions would wait, not copies.
    """
    fit = resident(name, memory)
    each = -(-tiles // (PROCESSORS * fit)) if fit >= min(FEW, RESIDENT[name]) else 1
    return each, -(-tiles // each)


def resident(name: str, memory: Memory) -> int:
    """Returns the blocks of threads that a processor has room for; a test holds it to what the compiler reports."""
    sizes = [math.prod(space.shape) * jnp.dtype(space.dtype).itemsize for space in memory.values()]
    size = sum(-(-x // 1024) * 1024 for x in sizes)  # as Pallas places them
    searched = memory["table of levels"].shape[1] > 16  # more than 4 bits, which take more registers
    return max(1, min(SHARED // (size + OWN), RESIDENT[name], 4 if searched else RESIDENT[name]))


BY_TOKEN = ("x", "minus", "norm", "words")
"""Inputs with a row a token."""


def tile_of(kernel: str, tokens: int | None, n: int, dim: int, interpret: Any) -> Tile:
    """Returns a tile of `tokens` tokens, or of as many as suit a kernel for n vectors."""
    return Tile(Rows(tokens or tile_tokens(kernel, dim, n), bool(interpret)), dim)


def tile_tokens(kernel: str, dim: int, n: int) -> int:
    """Returns the tokens of a tile: the tuned number, else 16 KiB of float32, or fewer to keep all processors busy."""
    if (kernel, dim, n) in TUNED:
        return TUNED[kernel, dim, n]
    fits = tile_sizes(dim)
    large = next((t for t in fits if t * dim <= 2**12), fits[-1])
    return next((t for t in fits if t <= large and n >= t * PROCESSORS), fits[-1])


def tile_sizes(dim: int) -> list[int]:
    """Returns the tokens that a tile may have so that each thread has an even number of lanes."""
    return [t for t in (128, 64, 32) if dim // 8 % (256 // t) == 0]


TUNED: dict[tuple[str, int, int], int] = {}
"""Tokens of a tile by kernel ("encode", "decode", "roundtrip"), dimension and number of vectors, as
`rqjax.kernels.hopper.autotune` found them."""


def of_tile(ref: Any, start: jax.Array, tile: Tile) -> Any:
    """The rows of an input or output that belong to this tile."""
    return ref.at[pl.ds(start, tile.rows.tokens)]


def copy_out(source: Any, target: Any) -> None:
    """Begins to copy what all threads wrote to shared memory."""
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(source, target)


def level_arrays(levels: jax.Array, step: jax.Array) -> dict[str, jax.Array]:
    """The levels in units of a step, and the step, as inputs."""
    return {"levels": levels[None], "step": step.reshape(1, 1)}


def lane_memory(tile: Tile, bits: int) -> Memory:
    """Shared memory for codes."""
    return {"lanes": padded(tile, len(packing.sections(bits)) * tile.lanes)}


def padded(tile: Tile, words: int) -> Any:
    """Shared memory for words of each token, in whose rows 8 threads find 16 bytes without a bank conflict."""
    return plgpu.SMEM((tile.rows.tokens, words + 4 * (words % 8 == 0)), jnp.uint32)


def norm_memory(tile: Tile) -> Memory:
    """Shared memory for norms across the threads of a token."""
    return {
        "partial": plgpu.SMEM((tile.rows.parts, tile.rows.tokens), jnp.float32),
        "unusual": plgpu.SMEM((1, 1), jnp.int32),
    }


def table_memory(tile: Tile, names: list[str], count: int, *, boundaries: bool = True) -> Memory:
    """Shared memory for tables of stages, of `count` levels and of the boundaries between them."""
    shapes = {f"table{i}": TABLES[name](tile.dim) for i, name in enumerate(names) if name in TABLES}
    shapes |= {"table of levels": (1, count)} | ({"table of boundaries": (1, count)} if boundaries else {})
    tables = {name: plgpu.SMEM(shape, jnp.float32) for name, shape in shapes.items()}
    return {**tables, "one": plgpu.SMEM((1, 1), jnp.int32)}


TABLES = {
    **dict.fromkeys(ROTORS, lambda dim: (28, dim // 8)),
    **dict.fromkeys(("hadamard", "hadamard_inverse"), lambda dim: (1, dim)),
}
"""Shapes of the tables of stages."""


def fill_tables(tile: Tile, names: list[str], m: Memory, *_: Any) -> None:
    """Makes all tables in shared memory."""
    quantize.fill_levels(tile.rows, m)
    for i, name in enumerate(names):
        arrays = [m[key] for key in m if key.startswith(f"stage{i}.")]
        match name:
            case "rotor" | "rotor_inverse":
                stages.fill_coefficients(tile, arrays, m[f"table{i}"], inverse=name == "rotor_inverse")
            case "dense":
                stages.fill_halves(tile, arrays[0], (m["high halves"], m["low halves"]))
            case "hadamard" | "hadamard_inverse":
                stages.fill_signs(tile, arrays[0], m[f"table{i}"])
    zero = tile.rows.part * 0
    tile.rows.poke(m["one"], zero, zero, [zero + 1])
    tile.rows.synchronize()


def stage_arrays(rotation: Rotation) -> tuple[list[str], dict[str, jax.Array]]:
    """The names of the stages, and their arrays as inputs with two axes."""
    arrays = {f"stage{i}.{k}": a for i, (_, parts) in enumerate(rotation) for k, a in enumerate(parts) if a.size}
    return [name for name, _ in rotation], {key: a.reshape(-1, a.shape[-1]) for key, a in arrays.items()}


def stage_memory(tile: Tile, names: list[str], dtype: Any, tiles: int = 1) -> Memory:
    """Shared memory for stages that cannot work in place in a tile of a dtype, and for a matrix beside some tiles."""
    in_place = dtype == jnp.float32 or names[0] in {"dense", *ROTORS}
    memory = {} if in_place and not {*names[:-1]} & ROTORS else {"work": tile.rows.swizzled(tile.dim, jnp.float32)}
    if "dense" in names:
        columns = stages.half_columns(tile.dim, tiles)
        half = plgpu.SMEM((tile.dim, columns), jnp.bfloat16, transforms=registers.tiling(columns, jnp.bfloat16))
        memory |= {"high halves": half, "low halves": half}
    return memory


def rotate(tile: Tile, names: list[str], m: Memory, source: Any) -> Callable[[jax.Array], Fields]:
    """Takes all stages but the last in shared memory, and returns the last as a function of the lane."""

    def in_float32(ref):
        return ref if ref.dtype == jnp.float32 else m["work"]

    produce: Any = None
    for i, name in enumerate(names):
        if produce is not None:  # a rotor needs the neighbors of a lane, so not in place
            target = m["work"] if names[i - 1] in ROTORS else source
            tile.for_lanes(produce, functools.partial(tile.write, target))
            tile.rows.synchronize()
            source = target
        match name:
            case "rotor" | "rotor_inverse":
                produce = functools.partial(stages.rotor, tile, source, m[f"table{i}"])
            case "hadamard" | "hadamard_inverse":
                signs = m[f"table{i}"]
                first, last = (signs, None) if name == "hadamard" else (None, signs)
                stages.planes(tile, source, first, target := in_float32(source))
                tile.rows.synchronize()
                source, produce = target, functools.partial(stages.butterflies, tile, target, last)
            case _:
                raise ValueError(f"unknown stage {name!r}")
    return produce
