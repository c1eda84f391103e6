"""A machine that runs PTX instruction by instruction, for kernels of one warpgroup on computers without a GPU.

Numbers of the 128 threads of a block lie side by side in arrays. Threads that wait at the first instruction of all go
on together, so that what has parted meets again. Warps may also go on one by one in any order between barriers: a
missing one shows. Copies by tensor maps are done when they are issued. Source: NVIDIA, PTX ISA 9.0.
"""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

THREADS, LANES = 128, np.arange(128) % 32
SPACE = 32
"""Bits of an address within an array; those above are the number of the array, 0 that of shared memory."""
LOCAL, OWN = 2**20, 4096
"""Number of the array of memory that is each thread's own, and bytes of a thread there."""
TYPES: dict[str, Any] = {
    **{f"{kind}{8 * size}": np.dtype(f"{letter}{size}") for kind, letter in (("s", "i"), ("u", "u"), ("b", "u"))
       for size in (1, 2, 4, 8)},
    **{"f16": np.dtype("f2"), "f32": np.dtype("f4"), "f64": np.dtype("f8"), "bf16": np.dtype(ml_dtypes.bfloat16)},
    "pred": np.dtype(bool),
}  # fmt: skip
FREE = ("bar", "fence", "wgmma", "cp.async.bulk.commit_group", "cp.async.bulk.wait_group", "cvta", "membar")
"""Instructions with nothing to do where threads run in step and copies are done at once; `cvta` moves an address."""


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """Description of an array in global memory for copies by the hardware."""

    array: int
    """Its number."""
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    """Elements from one number to the next of each dimension: 1 of the last."""
    box: tuple[int, ...]
    itemsize: int
    swizzle: int
    """Bytes of the rows in shared memory whose chunks of 16 bytes are permuted; 16 if none are."""


@dataclasses.dataclass
class Barrier:
    """State of a barrier in memory: arrivals and bytes that are missing, and how many phases are over."""

    count: int
    missing: int
    bytes: int = 0
    phase: int = 0

    def come(self, arrivals: int, expected: int) -> None:
        """Takes arrivals, and bytes that are expected, or below 0 that have come."""
        self.missing, self.bytes = self.missing - arrivals, self.bytes + expected
        if self.missing == self.bytes == 0:
            self.missing, self.phase = self.count, self.phase + 1


@dataclasses.dataclass
class Instruction:
    guard: tuple[str, bool] | None
    name: str
    operands: list[str]
    run: Callable[..., None] | None = None


def _statements(text: str) -> tuple[list[Instruction], dict[str, int]]:
    """Takes a kernel's body apart. Labels within braces are those of the innermost."""
    body = text[text.index("\n{") + 2 :]
    body = body[: body.index("$L__func_end")]
    body = re.sub(r"//.*|^\s*\.(loc|pragma)\b.*$", "", body, flags=re.MULTILINE)
    found: list[Instruction] = []
    labels: dict[str, int] = {}
    scopes, count = [0], 0
    jumps: list[tuple[Instruction, list[int]]] = []
    for part in re.split(r"(?:;|(?<=:)(?=\s))", body):
        word = part.strip()
        while word[:1] in ("{", "}"):  # at the beginning of a statement they are no vector's
            count += word[0] == "{"
            scopes = [*scopes, count] if word[0] == "{" else scopes[:-1]
            word = word[1:].strip()
        if re.fullmatch(r"[$\w]+:", word):
            labels[f"{word[:-1]} {0 if word.startswith('$') else scopes[-1]}"] = len(found)
        elif match := re.fullmatch(r"(?:@(!?)([%\w]+)\s+)?([a-z][\w.:]*)\s*(.*)", word, re.DOTALL):
            guard = (match[2], match[1] == "!") if match[2] else None
            operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s|]+", match[4])
            found.append(Instruction(guard, match[3], operands))
            if match[3].startswith("bra"):
                jumps.append((found[-1], list(scopes)))
        elif word and not word.startswith("."):
            raise ValueError(f"not a statement: {word}")
    for jump, around in jumps:
        target = jump.operands[0]
        place = next(f"{target} {scope}" for scope in reversed(around) if f"{target} {scope}" in labels)
        jump.operands[0] = place
    return found, labels


class Machine:
    """A kernel and its memory; `run` is one block of threads."""

    def __init__(self, text: str, arrays: list[np.ndarray], parameters: list[int], maps: list[TensorMap], shared: int):
        """`arrays` are the bytes that the kernel reads and writes, `parameters` which of them its parameters are."""
        entry = re.search(r"\.entry (\w+)\(([^)]*)\)", text)
        assert entry is not None
        self.params: dict[str, int] = {}
        self.memory = {number + 1: array for number, array in enumerate(arrays)}
        for kind, name, numbers in re.findall(r"\.(?:global|const).*?\.(\w+) (\w+)\[\d+\] = \{([^}]*)\}", text):
            self.params[name] = len(self.memory) + 1 << SPACE
            listed = [int(x, 0) for x in numbers.split(",")]
            self.memory[len(self.memory) + 1] = np.array(listed, TYPES[kind]).view(np.uint8)
        rest = list(parameters)
        for declared in filter(str.strip, entry[2].split("\n")):
            name = re.findall(r"\w+", declared.split("[")[0])[-1]
            if "[" in declared:
                self.params[name] = 2**19 << SPACE
            else:
                self.params[name] = rest.pop(0) + 1 << SPACE
        assert not rest
        self.maps, self.shared = maps, shared
        self.program, self.labels = _statements(text)
        for instruction in self.program:
            instruction.run = self._compiled(instruction)

    def run(self, x: int, y: int, apart: np.random.Generator | None = None) -> None:
        """Runs the block (x, y); warp by warp in any order between barriers, if `apart` draws it."""
        rng = np.random.default_rng(0)
        self.memory[0] = rng.integers(0, 256, self.shared, np.uint8)  # nobody has written it
        self.memory[LOCAL] = rng.integers(0, 256, THREADS * OWN, np.uint8)
        same = lambda value: np.full(THREADS, value, np.uint32)  # noqa: E731
        self.registers: dict[str, np.ndarray] = {
            "%tid.x": np.arange(THREADS, dtype=np.uint32),
            "%ctaid.x": same(x),
            "%ctaid.y": same(y),
            "%ctaid.z": same(0),
        }
        self.barriers: dict[int, Barrier] = {}
        units = [np.ones(THREADS, bool)] if apart is None else [np.arange(THREADS) // 32 == k for k in range(4)]
        ready, waiting = [{0: unit} for unit in units], {}
        with np.errstate(all="ignore"):
            while any(ready) or waiting:
                if not any(ready):
                    assert sum(mask.sum() for mask in waiting.values()) == THREADS, "some never come to a barrier"
                    ready = [
                        {at + 1: mask & unit for at, mask in waiting.items() if mask[unit].any()} for unit in units
                    ]
                    waiting = {}
                able = [one for one in ready if one]
                own = able[0] if apart is None else able[apart.integers(len(able))]
                place = min(own)
                mask = own.pop(place)
                for at, some, waits in self._through(place, mask, own):
                    there = waiting if waits else own
                    there[at] = there.get(at, False) | some

    def _through(
        self, place: int, mask: np.ndarray, ready: dict[int, np.ndarray]
    ) -> list[tuple[int, np.ndarray, bool]]:
        """Runs threads until they part, meet others, wait or end: where they are then, and whether they wait."""
        whole = bool(mask.all())
        while True:
            instruction, active = self.program[place], mask
            if instruction.guard is not None:
                name, negated = instruction.guard
                active = mask & (self.registers[name] ^ negated)
            if instruction.name.startswith("bra") and active.any():
                target = self.labels[instruction.operands[0]]
                if (active != mask).any():
                    return [(target, active, False), (place + 1, mask & ~active, False)]
                place = target
            elif instruction.name == "ret":
                return []
            elif instruction.name == "bar.sync" and not whole:
                return [(place, mask, True)]
            else:
                if active.any():
                    instruction.run(active, whole and active is mask)
                place += 1
                if "try_wait" in instruction.name:  # others may have to go on first
                    return [(place, mask, False)]
            if ready and place >= min(ready):
                return [(place, mask, False)]

    def _read(self, operand: str, kind: str) -> Callable[[], Any]:
        """Returns what reads an operand as numbers of a type."""
        dtype = TYPES[kind]
        if operand.startswith("__local_depot"):
            place = np.uint64(LOCAL << SPACE) + np.arange(THREADS, dtype=np.uint64) * np.uint64(OWN)
            return lambda: place
        if re.match(r"%|[a-zA-Z]", operand) and operand not in self.params:
            if kind == "pred":
                return lambda: self.registers[operand]

            def register() -> np.ndarray:
                x = self.registers[operand]
                if x.dtype.itemsize > dtype.itemsize:  # the lower part
                    x = x.astype(f"u{dtype.itemsize}")
                return x.view(dtype)

            return register
        value = self._number(operand)
        bits = np.uint32 if operand.startswith("0f") else np.uint64 if operand.startswith("0d") else None
        constant = bits(value).view(dtype) if bits else np.array(value).astype(dtype)
        return lambda: np.full(THREADS, constant)

    def _number(self, operand: str) -> int:
        if operand[:2] in ("0f", "0d"):
            return int(operand[2:], 16)
        if operand in self.params:
            return self.params[operand]
        if operand.startswith("__dynamic_shmem__0"):
            return int(operand.partition("+")[2] or 0)
        return int(operand, 0)

    def _write(self, operand: str, value: Any, active: np.ndarray, whole: bool) -> None:
        value = np.asarray(value)
        value = value if value.dtype == bool else value.view(f"u{value.dtype.itemsize}")
        before = self.registers.get(operand)
        if not whole:
            value = np.where(active, value, np.zeros_like(value) if before is None else before)
        self.registers[operand] = value

    def _address(self, operand: str) -> Callable[[], np.ndarray]:
        """Returns what reads the address [register + offset] or [symbol + offset]."""
        base, _, offset = operand.strip("[] ").partition("+")
        if re.match(r"%|[a-zA-Z]", base) and base not in self.params:
            return lambda: self.registers[base].astype(np.uint64) + np.uint64(int(offset or 0) % 2**64)
        place = np.full(THREADS, self._number(base) + int(offset or 0), np.uint64)
        return lambda: place

    def _bytes(self, address: np.ndarray, size: int, active: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The array in which active threads' addresses lie, and the places of their bytes there."""
        arrays = np.unique(address[active] >> np.uint64(SPACE))
        assert len(arrays) == 1, "threads read several arrays at once"
        memory = self.memory[int(arrays[0])]
        places = (address & np.uint64(2**SPACE - 1)).astype(np.int64)[active][:, None] + np.arange(size)
        assert not (places[:, 0] % size).any(), "an address is not aligned"
        assert places.max() < memory.size, f"an address is beyond its array: {arrays} {places.max()} {memory.size}"
        return memory, places

    def _compiled(self, instruction: Instruction) -> Callable[..., None] | None:
        name, operands = instruction.name, instruction.operands
        first, *kinds = name.split(".")
        for start, method in (
            ("ld", self._load),
            ("st", self._store),
            ("mma", self._multiply),
            ("wgmma.mma_async", self._multiply_together),
            ("shfl", self._shuffle),
            ("elect", self._elect),
            ("cp.async.bulk.tensor", self._copy),
        ):
            if name.startswith(f"{start}.") or (start == name):
                return method(kinds, operands)
        assert not {"sat", "rmi", "rpi"} & {*kinds}
        assert first not in ("bar", "ret") or instruction.guard is None
        if first == "cvta":
            return self._plain(lambda x: x, ["b64", "b64"], operands)
        if first == "mbarrier":
            return self._barrier(kinds, operands)
        if name.startswith(FREE) or first in ("bra", "ret"):
            return lambda active, whole: None
        if first == "mov" and (operands[0].startswith("{") or operands[-1].startswith("{")):
            return self._parted(kinds[-1], operands)
        return self._arithmetic(first, kinds, operands)

    def _plain(self, function: Callable[..., Any], kinds: list[str], operands: list[str]) -> Callable[..., None]:
        reads = [self._read(operand, kind) for operand, kind in zip(operands[1:], kinds[1:], strict=True)]
        dtype, to = TYPES[kinds[0]], operands[0]

        def run(active: np.ndarray, whole: bool) -> None:
            value = function(*(read() for read in reads))
            self._write(to, np.asarray(value).astype(dtype, copy=False), active, whole)

        return run

    def _arithmetic(self, first: str, kinds: list[str], operands: list[str]) -> Callable[..., None]:
        kind, count = kinds[-1], len(operands) - 1
        if first == "cvt":
            return self._converted(kinds, operands)
        if first == "setp":
            return self._plain(COMPARE[kinds[0]], ["pred", kind, kind], operands)
        if first == "selp":
            return self._plain(lambda a, b, p: np.where(p, a, b), [kind, kind, kind, "pred"], operands)
        assert first != "madc" or "cc" not in kinds
        if first in ("mad", "madc") and ("cc" in kinds or first == "madc"):
            return self._carried(kinds, operands)
        if first in ("mul", "mad") and kinds[0] in ("wide", "hi", "lo"):
            return self._plain(*_product(kinds[0], kind, first == "mad"), operands)
        if first in ("shl", "shr"):
            bits = 8 * TYPES[kind].itemsize

            def shift(a: np.ndarray, n: np.ndarray) -> np.ndarray:
                n = np.minimum(n, bits - 1).astype(a.dtype), n >= bits
                shifted = a << n[0] if first == "shl" else a >> n[0]
                gone = 0 if first == "shl" or a.dtype.kind == "u" else a >> (bits - 1)
                return np.where(n[1], gone, shifted)

            return self._plain(shift, [kind, kind, "u32"], operands)
        assert first != "bfe" or kind[0] in "bu"
        if first == "bfe":
            return self._plain(
                lambda a, at, n: a >> at.astype(a.dtype) & ((1 << n.astype(np.uint64)) - 1).astype(a.dtype),
                [kind, kind, "u32", "u32"],
                operands,
            )
        if first == "shf":
            both = lambda a, b, n: (b.astype(np.uint64) << 32 | a) << (n & 31).astype(np.uint64) >> 32  # noqa: E731
            assert kinds[:2] == ["l", "wrap"]
            return self._plain(both, ["b32", "b32", "b32", "u32"], operands)
        if first == "prmt":
            return self._plain(_permuted, ["b32"] * 4, operands)
        if first == "fma":
            return self._plain(
                lambda a, b, c: a.astype("f8") * b.astype("f8") + c.astype("f8"), [kind] * 4, operands
            )  # fmt: skip
        if first in ("max", "min") and kind.startswith("f") and "NaN" not in kinds:
            return self._plain({"max": np.fmax, "min": np.fmin}[first], [kind] * 3, operands)
        return self._plain(FUNCTIONS[first], [kind] * (count + 1), operands)

    def _carried(self, kinds: list[str], operands: list[str]) -> Callable[..., None]:
        """Returns a product of 32 bits with an addend, and with what was carried before; it carries, too."""
        reads = [self._read(x, "u32") for x in operands[1:]]

        def run(active: np.ndarray, whole: bool) -> None:
            a, b, c = (read().astype(np.uint64) for read in reads)
            found = (a * b >> 32 if "hi" in kinds else a * b & 2**32 - 1) + c
            found = found + self.registers["carry"].astype(np.uint64) if "cc" not in kinds else found
            self._write(operands[0], found.astype(np.uint32), active, whole)
            self._write("carry", (found >> 32).astype(np.uint32), active, whole)

        return run

    def _converted(self, kinds: list[str], operands: list[str]) -> Callable[..., None]:
        to, source = kinds[-2:]
        if to.endswith("x2"):
            half = TYPES[to[:-2]]

            def pair(high: np.ndarray, low: np.ndarray) -> np.ndarray:
                high, low = (x.astype(half).view(np.uint16).astype(np.uint32) for x in (high, low))
                return high << 16 | low

            return self._plain(pair, ["b32", source, source], operands)
        if kinds[0] in ("rni", "rzi"):
            nearest = np.rint if kinds[0] == "rni" else np.trunc
            return self._plain(nearest, [to, source], operands)
        return self._plain(lambda x: x, [to, source], operands)

    def _parted(self, kind: str, operands: list[str]) -> Callable[..., None]:
        """Returns a move between a register and its parts."""
        size, parts = TYPES[kind].itemsize, [re.findall(r"[^{},\s]+", x) for x in operands]
        part = f"u{size // max(len(parts[0]), len(parts[1]))}"
        reads = [self._read(x, f"b{8 * np.dtype(part).itemsize}" if len(parts[1]) > 1 else kind) for x in parts[1]]

        def run(active: np.ndarray, whole: bool) -> None:
            found = np.stack([read() for read in reads], axis=1)
            found = np.ascontiguousarray(found).view(part if len(parts[0]) > 1 else f"u{size}")
            for k, to in enumerate(parts[0]):
                if to != "_":
                    self._write(to, found[:, k].copy(), active, whole)

        return run

    def _load(self, kinds: list[str], operands: list[str]) -> Callable[..., None]:
        if kinds[0] == "param":
            name, _, offset = operands[1].strip("[]").partition("+")
            value = np.full(THREADS, self.params[name] + int(offset or 0), np.uint64)
            return lambda active, whole: self._write(operands[0], value, active, whole)
        to, address, dtype = re.findall(r"[^{},\s]+", operands[0]), self._address(operands[1]), TYPES[kinds[-1]]

        def run(active: np.ndarray, whole: bool) -> None:
            memory, places = self._bytes(address(), dtype.itemsize * len(to), active)
            found = np.ascontiguousarray(memory[places]).view(dtype)
            if dtype.itemsize < 2:
                found = found.astype(f"{dtype.kind}4")
            for k, name in enumerate(to):
                x = np.zeros(THREADS, found.dtype)
                x[active] = found[:, k]
                self._write(name, x, active, whole)

        return run

    def _store(self, kinds: list[str], operands: list[str]) -> Callable[..., None]:
        address, dtype = self._address(operands[0]), TYPES[kinds[-1]]
        reads = [self._read(name, kinds[-1]) for name in re.findall(r"[^{},\s]+", operands[1])]

        def run(active: np.ndarray, whole: bool) -> None:
            memory, places = self._bytes(address(), dtype.itemsize * len(reads), active)
            numbers = np.stack([read()[active] for read in reads], axis=1)
            memory[places] = np.ascontiguousarray(numbers).view(np.uint8)

        return run

    def _shuffle(self, kinds: list[str], operands: list[str]) -> Callable[..., None]:
        to, source, lane = operands[0], *(self._read(x, "b32") for x in operands[1:3])

        assert "idx" in kinds or "bfly" in kinds

        def run(active: np.ndarray, whole: bool) -> None:
            assert _of_whole_warps(active), "threads of a warp have parted"
            other = lane() & 31 if "idx" in kinds else LANES ^ lane()
            found = source()[np.arange(THREADS) // 32 * 32 + other.astype(np.int64)]
            self._write(to, found, active, whole)

        return run

    def _elect(self, kinds: list[str], operands: list[str]) -> Callable[..., None]:
        def run(active: np.ndarray, whole: bool) -> None:
            self._write(operands[1], LANES == 0, active, whole)

        return run

    def _barrier(self, kinds: list[str], operands: list[str]) -> Callable[..., None]:
        """Returns the beginning of a barrier, an arrival that expects bytes, or a question whether a phase is over."""
        address = self._address(operands[kinds[0] != "init"])
        number = self._read(operands[1 + (kinds[0] != "init")], "u32")

        def run(active: np.ndarray, whole: bool) -> None:
            place = int(address()[active][0]) & (2**SPACE - 1)
            if kinds[0] == "init":
                count = int(number()[active][0])
                self.barriers[place] = Barrier(count, count)
            elif kinds[0] == "arrive":
                self.barriers[place].come(int(active.sum()), int(number()[active].sum()))
            else:
                over = (self.barriers[place].phase & 1) != number()
                self._write(operands[0], over, active, whole)

        return run

    def _copy(self, kinds: list[str], operands: list[str]) -> Callable[..., None]:
        """Returns a copy between the box of a tensor map and shared memory."""
        stores = kinds[4] == "global"
        at, described = (operands[1], operands[0]) if stores else (operands[0], operands[1])
        shared = self._address(at)
        base, places = re.match(r"\[(\S+?)\s*,\s*(\{[^}]*\})\s*\]", described).groups()
        barrier = None if stores else self._address(operands[2])
        base, places = self._address(base), [self._read(x, "s32") for x in re.findall(r"[^{},\s]+", places)]

        def run(active: np.ndarray, whole: bool) -> None:
            for thread in np.flatnonzero(active):
                described = self.maps[int(base()[thread] & np.uint64(2**SPACE - 1)) // 128]
                corner = [int(place()[thread]) for place in reversed(places)]
                self._move(described, corner, int(shared()[thread]) & (2**SPACE - 1), stores)
                if barrier is not None:
                    size = int(np.prod(described.box)) * described.itemsize
                    self.barriers[int(barrier()[thread]) & (2**SPACE - 1)].come(0, -size)

        return run

    def _move(self, of: TensorMap, corner: list[int], shared: int, stores: bool) -> None:
        axes = [np.arange(start, start + size) for start, size in zip(corner, of.box, strict=True)]
        grid = np.meshgrid(*axes, indexing="ij")
        inside = functools.reduce(np.logical_and, [(x >= 0) & (x < n) for x, n in zip(grid, of.sizes, strict=True)])
        element = sum(x * stride for x, stride in zip(grid, of.strides, strict=True))
        source = (np.asarray(element)[..., None] * of.itemsize + np.arange(of.itemsize)).reshape(-1)
        inside = np.repeat(inside.reshape(-1), of.itemsize)
        place = shared + np.arange(source.size)
        if of.swizzle > 16:
            place ^= (place >> 7 & (of.swizzle // 16 - 1)) << 4
        there, here = self.memory[of.array + 1], self.memory[0]
        if stores:
            there[source[inside]] = here[place[inside]]
        else:
            here[place] = np.where(inside, there[np.where(inside, source, 0)], 0)

    def _multiply(self, kinds: list[str], operands: list[str]) -> Callable[..., None]:
        """Returns a product of tensor cores: m16n8k32 of int8, or m16n8k8 of float16."""
        names = [re.findall(r"[^{},\s]+", x) for x in operands]
        whole_numbers = "m16n8k32" in kinds
        kind, part = ("s32", np.int8) if whole_numbers else ("f32", np.float16)
        left, right = ([self._read(x, "b32") for x in some] for some in names[1:3])
        before = [self._read(x, kind) for x in names[3]]

        def run(active: np.ndarray, whole: bool) -> None:
            assert _of_whole_warps(active), "threads of a warp have parted"

            def parts(reads: Any) -> np.ndarray:
                """(registers, warps, groups, quads, parts)."""
                words = np.ascontiguousarray(np.stack([read() for read in reads]))
                return words.view(part).reshape(len(reads), 4, 8, 4, -1).astype("f8")

            a, b = parts(left), parts(right)
            if whole_numbers:  # registers: rows g and g + 8, then columns from 16 on
                a = a.reshape(2, 2, 4, 8, 4, 4).transpose(2, 1, 3, 0, 4, 5).reshape(4, 16, 32)
                b = b.transpose(1, 2, 0, 3, 4).reshape(4, 8, 32)
            else:
                a, b = a.transpose(1, 0, 2, 3, 4).reshape(4, 16, 8), b[0].reshape(4, 8, 8)
            product = np.einsum("wrk,wck->wrc", a, b).reshape(4, 2, 8, 4, 2).transpose(1, 4, 0, 2, 3)
            product = product.reshape(4, THREADS)
            added = [x() + p.astype(TYPES[kind]) for x, p in zip(before, product, strict=True)]
            for name, x in zip(names[0], added, strict=True):
                self._write(name, x, active, whole)

        return run

    def _multiply_together(self, kinds: list[str], operands: list[str]) -> Callable[..., None]:
        """Returns a product of a warpgroup, m64nNk16 in bfloat16: the left side in registers, the right in memory."""
        out, left = (re.findall(r"[^{},\s]+", x) for x in operands[:2])
        columns, by_row = int(kinds[3].split("n")[1].split("k")[0]), operands[-1] == "0"
        reads, before = [self._read(x, "b32") for x in left], [self._read(x, "f32") for x in out]
        described, adds = self._read(operands[2], "b64"), self._read(operands[3], "pred")
        n, k = np.meshgrid(np.arange(columns), np.arange(16), indexing="ij")

        def run(active: np.ndarray, whole: bool) -> None:
            assert whole, "threads of a warpgroup have parted"
            words = np.ascontiguousarray(np.stack([read() for read in reads])).view(TYPES["bf16"])
            a = words.reshape(2, 2, 4, 8, 4, 2).transpose(2, 1, 3, 0, 4, 5).reshape(64, 16).astype("f8")
            bits = int(described()[0])
            start, lead, stride = ((bits >> at & 2**14 - 1) << 4 for at in (0, 16, 32))
            width = {1: 128, 2: 64, 3: 32}[bits >> 62]
            if by_row:
                place = start + n // 8 * stride + n % 8 * width + 2 * k
            else:
                place = start + n // (width // 2) * lead + k // 8 * stride + k % 8 * width + 2 * (n % (width // 2))
            place ^= (place >> 7 & (width // 16 - 1)) << 4
            b = self.memory[0][place[..., None] + np.arange(2)].view(TYPES["bf16"])[..., 0].astype("f8")
            product = (a @ b.T).reshape(4, 2, 8, columns // 8, 4, 2).transpose(3, 1, 5, 0, 2, 4).reshape(-1, THREADS)
            for name, x, p in zip(out, before, product, strict=True):
                self._write(name, ((x() if adds().all() else 0) + p).astype("f4"), active, whole)

        return run


def _of_whole_warps(active: np.ndarray) -> bool:
    by_warp = active.reshape(-1, 32)
    return bool((by_warp.all(1) == by_warp.any(1)).all())


def _product(part: str, kind: str, adds: bool) -> tuple[Callable[..., Any], list[str]]:
    """Returns a product of whole numbers: all bits, the higher or the lower half; and the types."""
    size = TYPES[kind].itemsize
    wide = f"{kind[0]}{16 * size}" if part == "wide" else kind

    def multiply(a: np.ndarray, b: np.ndarray, *c: np.ndarray) -> np.ndarray:
        if part == "wide":
            found = a.astype(TYPES[wide]) * b.astype(TYPES[wide])
        elif part == "hi":
            found = (
                a.astype("i8" if kind[0] == "s" else "u8") * b.astype("i8" if kind[0] == "s" else "u8")
            ) >> 8 * size
            found = found.astype(TYPES[kind])
        else:
            found = a * b
        return found + c[0] if adds else found

    return multiply, [wide, kind, kind, *[wide] * adds]


def _permuted(a: np.ndarray, b: np.ndarray, selector: np.ndarray) -> np.ndarray:
    """The bytes of (a, b) that the nibbles of `selector` name; 8 in a nibble repeats a byte's sign."""
    both = np.stack([a, b], axis=1).copy().view(np.uint8)
    found = np.zeros((THREADS, 4), np.uint8)
    for k in range(4):
        nibble = (selector >> np.uint32(4 * k)) & 15
        byte = both[np.arange(THREADS), nibble & 7]
        found[:, k] = np.where(nibble & 8, np.where(byte & 128, 255, 0), byte)
    return found.view(np.uint32)[:, 0]


COMPARE: dict[str, Callable[..., Any]] = {
    "eq": np.equal,
    "ne": lambda a, b: (a != b) & (a == a) & (b == b),
    "neu": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "geu": lambda a, b: ~(a < b),
    "gtu": lambda a, b: ~(a <= b),
    "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b),
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "mov": lambda a: a,
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.bitwise_not,
    "neg": np.negative,
    "abs": np.abs,
    "max": np.maximum,
    "min": np.minimum,
    "ex2": np.exp2,
    "lg2": np.log2,
    "rcp": lambda a: 1 / a,
    "rsqrt": lambda a: 1 / np.sqrt(a),
    "sqrt": np.sqrt,
    "copysign": lambda a, b: np.copysign(b, a),
    "tanh": np.tanh,
    "popc": np.bitwise_count if hasattr(np, "bitwise_count") else None,
}
