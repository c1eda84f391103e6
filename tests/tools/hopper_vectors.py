"""Predicts what encoding and decoding take on an H200, from the instructions of the compiled kernels.

    python -m tests.tools.hopper --times rotor_encode_128_3_float32    # 65,536 and 2^20 vectors

A processor is a closed network of queues: its tiles wait for memory, then queue for memory, instructions and shared
memory in turn (mean value analysis; Reiser and Lavenberg, 1980). Four constants are fitted to kernels that ran.
"""

import collections
import math
import re
from typing import NamedTuple

from pallas_kernels.gpu import launch, packing
from tests.tools import hopper_times
from tests.tools.hopper_shapes import OF_VECTORS

COUNTS = 65_536, 2**20
CLOCK, PROCESSORS, SCHEDULERS = (1e-6 * hopper_times.CLOCK, hopper_times.PROCESSORS, hopper_times.SCHEDULERS)
"""Cycles of a microsecond, processors, and instructions that one begins in a cycle."""
BANDWIDTH = 1e-6 * hopper_times.BANDWIDTH
"""Bytes of a microsecond that a copy reads and writes."""
BEGIN_US, LATENCY_US, STALL = 0.4, 1.25, 0.6
"""Microseconds of a launch and of a copy, cycles that a warp waits after an instruction."""


class Count(NamedTuple):
    """Instructions of a warp."""

    instructions: float
    logic: float
    waves: float
    """Cycles of shared memory, 128 bytes each, but for conflicts of banks."""


class Kernel(NamedTuple):
    """Compiled kernel of a number of vectors, all of them in tiles."""

    once: Count
    """Counts before and after the tiles of a block of threads."""
    each: Count
    """Counts of a tile."""
    tokens: int
    """Vectors of a tile."""
    bytes: float
    """Read and written for a vector."""
    resident: int
    """Blocks of threads of a processor."""
    stages: int = launch.STAGES
    """Tiles of a block of threads that are under way."""
    waits: int = 1
    """Copies of a tile that wait for each other."""


def counted(sass: str) -> tuple[Count, Count]:
    """Counts the instructions of a warp outside of the loop over tiles, and within it for one tile.

    Branches forward over a loop that stores nothing are taken: they guard norms at the ends of float32, and large
    angles. Other loops have the trips of their counters, or one.
    """
    lines: list[str] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(lines)
        elif instruction := re.match(r"\s+/\*[0-9a-f]+\*/\s+(.*?);", line):
            lines.append(instruction[1])
    end = max(i for i, line in enumerate(lines) if line.split()[-1] == "EXIT")
    branches = [(i, labels[found[1]]) for i, line in enumerate(lines[: end + 1])
                if (found := re.search(r"@.*BRA.*?(\.L_x_\d+)", line))]  # fmt: skip
    loops = [(to, i) for i, to in branches if to <= i - 8]  # shorter ones wait
    times = [int(i <= end) for i in range(len(lines))]
    outer = next(((a, b) for a, b in loops[::-1] if any("BAR." in line for line in lines[a:b])), None)
    for a, b in loops:
        for i in range(a, b + 1):
            times[i] *= _trips(lines[a : b + 1]) if (a, b) != outer else 1
    for i, to in branches:
        inner = [(a, b) for a, b in loops if i < a and b < to <= end]
        if inner and not any("STS" in line for a, b in inner for line in lines[a:b]):
            times[i + 1 : to] = [0] * (to - i - 1)
    inside = range(outer[0], outer[1] + 1) if outer else range(len(lines))
    parts: list[collections.Counter[str]] = [collections.Counter(), collections.Counter()]
    for i, line in enumerate(lines):
        name, *flags = re.sub(r"^@!?U?P\w+\s+", "", line).split()[0].split(".")
        parts[i in inside][name] += times[i]
        if name in ("LDS", "STS"):
            wide = 4 if "128" in flags else 2 if "64" in flags else 1
            parts[i in inside]["waves"] += wide * times[i]
    once, each = (Count(c.total() - c["waves"], sum(c[k] for k in hopper_times.LOGIC), c["waves"]) for c in parts)
    return once, each


def _trips(loop: list[str]) -> int:
    """Reads the number of trips from the counter of a loop; two have a predicate in its place."""
    for line in loop:
        if bound := re.search(r"ISETP\.NE\S* \w+, PT, (U?R\d+)\S*, (0x[0-9a-f]+)", line):
            step = rf"U?(?:VIADD|IADD3) {bound[1]}, {bound[1]}\S*, (0x[0-9a-f]+)"
            for other in loop:
                if found := re.search(step, other):
                    return int(bound[2], 16) // int(found[1], 16)
    return 2 if any("PLOP3" in line for line in loop) else 1


def predicted_us(kernel: Kernel, n: int) -> float:
    """Predicts the microseconds of a call for n vectors."""
    tiles = -(-n // kernel.tokens)
    each = -(-tiles // (PROCESSORS * kernel.resident)) if kernel.stages > 1 else 1
    begin = BEGIN_US + kernel.once.instructions * (1 + STALL) / CLOCK * (each > 1)
    if each > 1:  # copies of the first tile wait, those of others are under way
        blocks = tiles / each / PROCESSORS
        cycle = _cycle(kernel, round(blocks), kernel.stages)
        return begin + _cycle(kernel, round(blocks)) + (each - 1) * cycle / kernel.stages
    waves, rest = divmod(tiles / PROCESSORS, kernel.resident)
    last = _cycle(kernel, math.ceil(rest)) * (1 if waves < 8 else rest / math.ceil(rest)) if rest else 0
    return begin + waves * (_cycle(kernel, kernel.resident) if waves else 0) + last


def _cycle(kernel: Kernel, blocks: int, stages: int = 1) -> float:
    """Microseconds of a tile where a processor has so many blocks of threads."""
    one = kernel.each if kernel.stages > 1 else Count(*map(sum, zip(kernel.once, kernel.each, strict=True)))
    memory = kernel.tokens * kernel.bytes * PROCESSORS / BANDWIDTH
    services = max(one.instructions, 2 * one.logic) / CLOCK, SCHEDULERS * one.waves / CLOCK
    rates, queues = [], [0.0] * len(services)
    for count in range(1, blocks + 1):  # tiles that are worked on, each by a block of threads
        times = [service * (1 + queue) for service, queue in zip(services, queues, strict=True)]
        rates.append(count / (one.instructions * STALL / CLOCK + sum(times)))
        queues = [rates[-1] * time for time in times]
    queue, worked, cycle = 0.0, [1.0], 0.0
    for count in range(1, blocks * stages + 1):
        rate = [rates[min(k, blocks) - 1] for k in range(1, count + 1)]
        there = memory * (1 + queue)
        here = sum(k / rate[k - 1] * worked[k - 1] for k in range(1, count + 1))
        cycle = kernel.waits * LATENCY_US + there + here
        queue = count / cycle * there
        worked = [0.0, *(count / cycle / rate[k - 1] * worked[k - 1] for k in range(1, count + 1))]
        worked[0] = max(0.0, 1 - sum(worked))
    return cycle


def fit(report: dict[str, int]) -> int:
    """Returns the blocks of threads that a processor has registers and memory for."""
    registers = -(-report["registers"] // 8) * 8
    return min(2**16 // (128 * registers), launch.SHARED // (report["shared"] + 1024))


def moved(name: str) -> tuple[int, int]:
    """Returns the vectors of a tile of a configuration, and the bytes that it reads and writes for a vector."""
    found = re.fullmatch(r"(\w+?)_(\d+)_(?:(\d)_)?(float32|bfloat16)", name)
    assert found, name
    kind, dim, bits, size = found[1], int(found[2]), int(found[3] or 1), 4 if found[4] == "float32" else 2
    tokens = 64 if kind in ("eden_encode", "sign_sketch") else launch.tile_tokens("encode", dim, COUNTS[0])
    other = dim * size if "roundtrip" in kind else 4 * packing.words_per_vector(dim, bits) + 2
    return tokens, dim * size + other + 4 * dim * (kind == "sign_sketch")


def table(names: list[str]) -> list[str]:
    """Returns the lines of the table for some of `NAMES`, compiled for 65,536 vectors."""
    lines = [
        f"{'a vector of':30} instructions  logic  waves  registers  blocks  {'us of 65,536':>16} {'us of 2^20':>16}"
    ]
    for name, (report, sass) in hopper_times.assembled(names).items():
        tokens, size = moved(name)
        (kind,) = set(re.findall(r"(\w+)_mosaic_gpu_kernel", sass))
        kernel = Kernel(*counted(sass), tokens, size, min(fit(report), launch.RESIDENT[kind]))
        counts = " ".join(f"{SCHEDULERS * x / tokens:{w}.1f}" for x, w in zip(kernel.each, (12, 6, 6), strict=True))
        times = [(predicted_us(kernel, n), n * size / BANDWIDTH) for n in COUNTS]
        shares = " ".join(f"{us:10.1f} ({least / us:3.0%})" for us, least in times)
        lines.append(f"{name:30} {counts} {report['registers']:10} {kernel.resident:7}  {shares}")
    return lines


NAMES = [
    name
    for name in OF_VECTORS
    if re.fullmatch(
        r"((rotor|hadamard|chain|eden)_(en|de)code|rotor_roundtrip)_128_[234]_b?float\d+|sign_sketch_128_float32", name
    )
]
"""Configurations in the table."""


def _ran(instructions: float, logic: float, waves: float, tokens: int, resident: int, size: int, waits: int) -> Kernel:
    return Kernel(Count(0, 0, 0), Count(instructions, logic, waves), tokens, size, resident, 1, waits)


MEASURED = {
    "rotor": (_ran(1329, 585, 184, 64, 3, 562, 1), 65_536, 13.8),
    "rotor, 2^20": (_ran(1329, 585, 184, 64, 3, 562, 1), 2**20, 180.6),
    "rotor, 4,096": (_ran(664.5, 292.5, 92, 32, 3, 562, 1), 4096, 2.95),
    "rotor, bfloat16": (_ran(1567, 678, 112, 64, 3, 306, 1), 65_536, 12.5),
    "Hadamard": (_ran(1672, 662, 296, 64, 5, 562, 1), 65_536, 14.6),
    "Hadamard, 2^20": (_ran(1672, 662, 296, 64, 5, 562, 1), 2**20, 177.0),
    "dense": (_ran(1887, 655, 360, 64, 2, 562, 2), 65_536, 27.5),
    "EDEN": (_ran(2171, 735, 430, 64, 2, 562, 2), 65_536, 29.8),
    "rotor, decoding": (_ran(888, 286, 288, 64, 3, 562, 2), 65_536, 17.9),
    "rotor, decoding, 2^20": (_ran(888, 286, 288, 64, 3, 562, 2), 2**20, 264.4),
    "Hadamard, decoding": (_ran(1233, 336, 400, 64, 3, 562, 2), 65_536, 17.5),
    "rotor, round trip, 2^20": (_ran(1832, 655, 432, 64, 3, 1024, 2), 2**20, 324.4),
}
"""Kernels that ran on an H200 (2026-11-26, 3 bits, 128 dimensions): their counts, vectors and microseconds."""
