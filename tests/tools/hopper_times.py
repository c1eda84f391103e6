"""Predicts what attention to codes takes on an H200, from the instructions of the compiled kernel.

    python -m tests.tools.hopper --times             # every shape of `SHAPES`, and `hopper_vectors`
    python -m tests.tools.hopper --times '4 bits'    # some of them

The longest of five counts decides: bytes at the speed of memory, instructions, logic, products and loads from shared
memory. What a kernel takes to begin and to end, and how far it stays behind the longest, are fitted to the prototypes
that ran.
"""

import collections
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from pallas_kernels.gpu.levels import BLOCK, SLICE
from pallas_kernels.gpu.warp_attention import WARPS, most_rows
from tests.tools import hopper
from tests.tools.hopper_attention_shapes import SHAPES, Shape

TOKENS = 16_384
CLOCK, PROCESSORS, SCHEDULERS = 1.8e9, 132, 4
BANDWIDTH = 4.3e12
BEGIN_US, BEHIND = 6.0, 1.1
LOGIC = (
    *("LOP3", "SHF", "PRMT", "SEL", "FSEL", "ISETP", "FSETP", "IADD3", "FMNMX", "IMNMX", "VIMNMX", "LEA", "POPC"),
    *("PLOP3", "IABS", "BMSK", "VIADD", "MOV", "SGXT", "VABSDIFF", "IADD"),
)
"""Instructions of the pipe that takes two cycles for each."""
PRODUCT_CYCLES = 6.2
"""Cycles of an m16n8k32 product in int8."""
MEASURED = {
    ("4 bits", 8, 16_384): 41.7,
    ("4 bits", 32, 16_384): 145.0,
    ("4 bits", 1, 65_536): 23.8,
    ("4 bits", 8, 4096): 14.8,
    ("2 bits", 8, 16_384): 29.1,
}
"""Microseconds of prototypes on an H200 (2026-11-26) by shape, sequences and tokens."""
BFLOAT16_US = 121.0
"""cuDNN's time for as many tokens of 128 dimensions in bfloat16, there."""
BFLOAT16_FLOPS = 660e12
"""Operations a second of attention to latents in bfloat16 (FlashMLA, H800), two thirds of what tensor cores can."""


class Loop(NamedTuple):
    """Instructions of a warp for a block of tokens."""

    instructions: int
    logic: int
    products: float
    """Products of int8, or as many as take as long."""
    loads: int
    """Loads from shared memory."""


def loop_of(sass: str, trips: Sequence[int] = ()) -> Loop:
    """Counts the shortest loop with products in a kernel's assembly; `trips` are those of loops within it, if any."""
    lines, labels, loops = [], {}, []
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(lines)
        elif instruction := re.match(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?(.*?);", line):
            lines.append(instruction[1])
            target = re.search(r"^BRA.*?(\.L_x_\d+)", instruction[1])
            if target and target[1] in labels:
                loops.append(range(labels[target[1]], len(lines)))
    loops = [loop for loop in loops if any("MMA" in lines[k] for k in loop)]
    inner = [loop for loop in loops if trips and not any(_within(other, loop) for other in loops)]
    times = {k: count for loop, count in zip(inner, trips, strict=True) for k in loop}
    body = min((loop for loop in loops if not inner or any(_within(some, loop) for some in inner)), key=len)
    names = collections.Counter()
    for k in body:
        names[lines[k].split()[0].split(".")[0]] += times.get(k, 1)
    products = names["IMMA"] + names["HMMA"] / 2  # m16n8k8 in float16: a quarter as much, at half the rate
    return Loop(names.total(), sum(names[name] for name in LOGIC), products, names["LDS"])


def _within(loop: range, other: range) -> bool:
    return loop != other and other.start <= loop.start and loop.stop <= other.stop


def assembled(names: list[str]) -> dict[str, tuple[dict[str, int], str]]:
    """Compiles configurations of one kernel each for sm_90a: its resources, and its assembly."""
    with tempfile.TemporaryDirectory() as folder:
        return disassembled(hopper.compiled(names, ptx=folder), Path(folder))


def disassembled(compiled: dict[str, hopper.Kernels], folder: Path) -> dict[str, tuple[dict[str, int], str]]:
    """Assembles what `hopper.compiled` left in a folder, of configurations of one kernel each."""
    tools, found = hopper.folder() / "nvidia" / "cu13" / "bin", {}
    for name, kernels in compiled.items():
        (path,) = folder.glob(f"{name}.*.ptx")
        path.write_text(path.read_text().split("\nptxas")[0])
        cubin = path.with_suffix(".cubin")
        subprocess.run([tools / "ptxas", "-arch=sm_90a", "-O3", path, "-o", cubin], check=True, capture_output=True)
        run = subprocess.run([tools / "nvdisasm", "-c", cubin], check=True, capture_output=True, text=True)
        found[name] = *kernels.values(), run.stdout
    return found


def trips_of(shape: Shape) -> list[int]:
    """Returns how often loops within that over blocks of tokens run."""
    if shape.latent:
        return [shape.dim // SLICE] * 2 + [WARPS] * (shape.dim // 32 // WARPS)
    return [shape.dim // 8] if shape.turned else []


def predicted_us(shape: Shape, loop: Loop) -> float:
    """Predicts the microseconds of a call."""
    sizes = (x.size * x.dtype.itemsize for x in jax.tree.leaves(shape.arguments()[1:3]))
    _, keys, values, *_ = shape.arguments()
    most = most_rows(keys, values, shape.dim, turned=shape.turned, latent=shape.latent > 0)
    steps = -(-shape.rows // most) * shape.batch * shape.heads * shape.tokens / BLOCK * WARPS
    each = steps / (PROCESSORS * SCHEDULERS * CLOCK)
    counts = loop.instructions, 2 * loop.logic, PRODUCT_CYCLES * loop.products, SCHEDULERS * loop.loads
    return BEGIN_US + BEHIND * 1e6 * max(sum(sizes) / BANDWIDTH, each * max(counts))


def bfloat16_us(shape: Shape) -> float:
    """Returns what attention in bfloat16 takes: measured, or predicted of latents."""
    tokens = shape.batch * shape.heads * shape.tokens
    if not shape.latent:
        return BFLOAT16_US * tokens * shape.dim / (8 * 8 * TOKENS * 128)
    numbers = shape.latent + shape.dim
    seconds = 2 * numbers / BANDWIDTH, 2 * shape.rows * (numbers + shape.dim) / BFLOAT16_FLOPS
    return BEGIN_US + BEHIND * 1e6 * tokens * max(seconds)


def table(names: list[str]) -> list[str]:
    """Returns the lines of the table for some of `SHAPES`."""
    lines = [
        f"{'attention to 8 x 16,384 tokens':36} instructions  logic  products  loads   us  measured  bfloat16 / us"
    ]
    found = assembled([f"decode_attention {name}" for name in names])
    for name, (_, sass) in zip(names, found.values(), strict=True):
        shape = SHAPES[name]._replace(tokens=TOKENS)
        loop = loop_of(sass, trips_of(shape))
        us, elements = predicted_us(shape, loop), BLOCK * (shape.dim * 2 + shape.latent) / 128
        counts = (
            f"{loop.instructions / elements:12.2f} {loop.logic / elements:6.2f} {loop.products:9.0f} {loop.loads:6}"
        )
        measured = MEASURED.get((name, shape.batch, TOKENS), "")
        lines.append(f"{name:36} {counts} {us:4.0f} {measured:>9} {bfloat16_us(shape) / us:14.2f}")
    return lines
