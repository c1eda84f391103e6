"""Compiles kernels and programs for TPUs on a machine that has none: code, memory and instructions of each.

    make tpu-compile-env                    # once: the compiler, beside the environment and not in it
    python -m tests.tools.tpu               # every configuration of `tpu_shapes`, as a table
    python -m tests.tools.tpu NAME...       # some of them
    python -m tests.tools.tpu --programs    # every XLA program of the library
    python -m tests.tools.tpu --goldens     # renews tests/goldens/tpu.json, of `TESTED`, for this version of jax

The compiler is that of libtpu, which looks for a TPU where it is imported, so it is not installed into the environment.
Compilation is a process of its own (`tests/tools/tpu_compile.py`).
"""

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from tests.tools.hopper import has_kernels, jax_version, release  # noqa: F401

ROOT = Path(__file__).parents[2]
GOLDENS = ROOT / "tests" / "goldens" / "tpu.json"
TESTED = (
    "attention, 3 bits",
    "attention, 4 bits, affine, groups of 64",
    "attention, 1 bit, 4 bits, 16 query heads",
    "attention, 4 bits, affine, one group, pages",
    "attention, 3 bits, 2 bits, heads of 64, pages",
    "attention, 3 bits, heads of 256, 32 of them",
    "encode, 3 bits, bfloat16",
    "encode, EDEN, 4 bits",
    "encode, 4 bits, d = 512",
    "decode, 1 bit, d = 192",
    "roundtrip, 4 bits",
)
"""Configurations with goldens: each kernel and kind of codes once."""
SLACK = 1.1
"""Factor by which code, memory and instructions may grow."""


class Chip(NamedTuple):
    topology: str
    bandwidth: float
    """Memory bandwidth in bytes a second (Google Cloud, "TPU v5e" and "TPU v6e")."""
    clock: float
    """Cycles a second, from the peak of bfloat16 products and four units of 128 x 128, or of 256 x 256 (the same)."""


CHIPS = {"v5e": Chip("v5e:2x2", 819e9, 1.5e9), "v6e": Chip("v6e:2x2", 1640e9, 1.75e9)}
Records = dict[str, dict[str, dict[str, Any]]]
"""Records {configuration: {chip: {code, temporary, blocks, step, head}}} of numbers, or {error} of failures."""


def wheels() -> list[str]:
    """Returns the wheels that compiling takes; none where the kernels do not exist, or where no wheels are made."""
    if not has_kernels() or (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return []
    required = importlib.metadata.requires("jax") or []
    return [name.partition(";")[0].strip() for name in required if name.startswith("libtpu")]


def folder() -> Path:
    """Returns the folder where `make tpu-compile-env` puts the wheel; RQJAX_TPU_COMPILE names another one."""
    return Path(os.environ.get("RQJAX_TPU_COMPILE") or Path(sys.prefix) / "tpu-compile")


def compiled(module: str, names: list[str]) -> Records:
    """Compiles the named configurations for all chips in one process: `tpu_compile` kernels, `tpu_programs` programs.

    `code`, `temporary` and `blocks` are bytes, the last of VMEM. `step` counts the instructions (bundles) of a step of
    a kernel's grid outside the loop over heads; `head` counts those of one head.

    Raises:
      FileNotFoundError: the compiler is not there.
      RuntimeError: the process dies; the message ends like the compiler's.
    """
    if not (folder() / "libtpu").exists():
        raise FileNotFoundError(f"there is no compiler for TPUs in {folder()}: run `make tpu-compile-env`")
    with tempfile.TemporaryDirectory() as dumps:
        dumped = f"--xla_jf_dump_to={dumps} --xla_jf_dump_llo_text=true" if module == "tpu_compile" else ""
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder()), os.environ.get("PYTHONPATH", "")]),
            "JAX_PLATFORMS": "cpu",
            "TPU_SKIP_MDS_QUERY": "1",
            "LIBTPU_INIT_ARGS": dumped,
        }
        line = [sys.executable, "-m", f"tests.tools.{module}", dumps, *names]
        done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"compiling for TPUs failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def complaints(name: str, record: dict[str, dict[str, Any]], golden: dict[str, dict[str, Any]] | None) -> list[str]:
    """Returns complaints about what does not compile, or is worse than it was."""
    worse = []
    for chip, now in record.items():
        then = (golden or {}).get(chip)
        if "error" in now:
            worse.append(f"{name}, {chip}: {now['error']}")
        elif then is None:
            worse.append(f"{name}, {chip}: has no golden")
        else:
            grown = [field for field in then if now[field] > SLACK * then[field]]
            worse += [f"{name}, {chip}: {field} grew from {then[field]} to {now[field]}" for field in grown]
    return worse


def goldens() -> dict[str, Records]:
    """{jax version: records}."""
    return json.loads(GOLDENS.read_text()) if GOLDENS.exists() else {}


def seconds(name: str, chip: str, record: dict[str, Any]) -> tuple[float, float, float]:
    """Returns seconds that attention takes: by its instructions, by the bytes of codes, and by those of bfloat16."""
    from tests.tools.tpu_shapes import ATTENTION

    shape, of = ATTENTION[name.removeprefix("attention, ")], CHIPS[chip]
    cycles = shape.batch * shape.steps * (record["step"] + shape.heads * record["head"])
    numbers = 2 * shape.batch * shape.heads * shape.tokens * shape.dim
    return cycles / of.clock, shape.code_bytes / of.bandwidth, 2 * numbers / of.bandwidth


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="configurations; all, if none is given")
    parser.add_argument("--programs", action="store_true", help="XLA programs in the place of kernels")
    parser.add_argument("--goldens", action="store_true", help=f"renew {GOLDENS.relative_to(ROOT)}")
    parser.add_argument("--wheels", action="store_true", help="print what make tpu-compile-env installs, and stop")
    options = parser.parse_args()
    if options.wheels:
        print(*wheels())
        return
    if not wheels():
        sys.exit(f"no kernels for jax {jax_version()} on {sys.platform} {platform.machine()}")
    names = options.names or (list(TESTED) if options.goldens else [])
    try:
        records = compiled("tpu_programs" if options.programs else "tpu_compile", names)
    except (FileNotFoundError, RuntimeError) as error:
        sys.exit(f"error: {error}")
    if options.programs:
        for name, record in records.items():
            print(f"{name:<48} {', '.join(f'{chip}: {now}' for chip, now in record.items())}")
        return
    print(
        f"{'configuration':<46} {'chip':<5} {'code':>8} {'temporary':>9} {'blocks':>9} {'step':>5} {'head':>5}", end=" "
    )
    print(f"{'us':>6} {'bytes us':>8} {'bfloat16 us':>11}")
    for name, record in records.items():
        for chip, now in record.items():
            if "error" in now:
                print(f"{name:<46} {chip:<5} {now['error']}")
                continue
            print(f"{name:<46} {chip:<5} {now['code']:>8} {now['temporary']:>9} {now['blocks']:>9}", end=" ")
            print(f"{now['step']:>5} {now['head']:>5}", end=" ")
            if name.startswith("attention"):
                own, memory, bfloat16 = (1e6 * x for x in seconds(name, chip, now))
                print(f"{own:>6.0f} {memory:>8.0f} {bfloat16:>11.0f}", end="")
            print()
    if options.goldens:
        before = {} if not options.names else goldens().get(jax_version(), {})
        GOLDENS.write_text(
            json.dumps({**goldens(), jax_version(): {**before, **records}}, indent=1, sort_keys=True) + "\n"
        )


if __name__ == "__main__":
    main()
