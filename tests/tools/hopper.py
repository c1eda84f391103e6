"""Compiles kernels for a Hopper GPU on a machine that has none: registers, spills and shared memory of each.

    make gpu-compile-env                       # once: the compiler, beside the environment and not in it
    python -m tests.tools.hopper                     # every configuration of `hopper_shapes`, as a table
    python -m tests.tools.hopper NAME... --ptx=DIR   # some of them; DIR receives the PTX of each kernel
    python -m tests.tools.hopper --launches          # what whole programs launch
    python -m tests.tools.hopper --times             # what attention and codes of vectors take on an H200, predicted
    python -m tests.tools.hopper --goldens           # renews tests/goldens/hopper.json, of `TESTED`, for this jax

jax prints an error where its CUDA plugin finds no driver, so the plugin is not installed into the environment.
Compilation is a process of its own (`tests/tools/hopper_compile.py`), one for all configurations.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
GOLDENS = ROOT / "tests" / "goldens" / "hopper.json"
CUDA = "13.5.37"
"""Registers are the assembler's choice, so goldens hold for one version of it."""
MAX_SHARED = 227 * 1024
"""Bytes that a block may have on Hopper."""

TESTED = (
    "rotor_encode_80_3_float32",
    "rotor_encode_128_8_float32",
    "rotor_decode_256_3_float16",
    "rotor_roundtrip_128_3_bfloat16",
    "hadamard_encode_192_4_bfloat16",
    "chain_decode_128_3_float32",
    "dense_encode_256_3_float32",
    "eden_encode_128_3_float32",
    "sign_sketch_256_bfloat16",
    "trellis_encode_128_3_float32",
    "decode_attention 4 bits",
    "decode_attention 2 bits",
    "decode_attention 3 and 2 bits",
    "decode_attention affine groups, 4 query heads",
    "decode_attention 16 query heads",
    "decode_attention heads of 256",
    "decode_attention 4 bits, pages, a mean that turns",
    "decode_attention heads of 256, 16 queries of several tokens",
    "decode_attention trellis, 3 bits, pages",
    "decode_attention trellis, 4 bits, heads of 256",
    "decode_attention columns, heads of 256, 16 query heads",
    "decode_attention columns, odd rows",
    "decode_attention columns, 2 bits, turned",
    "decode_attention 4 bits, turned",
    "decode_attention latents, 3 and 2 bits, pages",
    "attention_prologue heads of 256, 16 queries, float32",
    "attention_prologue a mean that turns",
    "append_token heads of 128",
    "attention_epilogue heads of 256, 16 queries, float32",
    "example",
)
"""Configurations with goldens: each kernel and kind of codes once, where it needs most."""

Configuration = Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
Kernels = dict[str, dict[str, int]]
"""{kernel: {registers, spills, shared, instructions}} of one configuration."""


def jax_version() -> str:
    """Returns the version of the installed jax without importing it."""
    return importlib.metadata.version("jax")


def release(version: str) -> tuple[int, ...]:
    """Parses a version as (0, 10, 2)."""
    return tuple(map(int, re.findall(r"\d+", version)))


def has_kernels() -> bool:
    """Returns whether this jax can express the kernels."""
    return release(jax_version()) >= (0, 10, 2)


def wheels() -> list[str]:
    """Returns the wheels that compiling takes; none where the kernels do not exist, or where no wheels are made."""
    if not has_kernels() or (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return []
    jax = [f"{name}=={jax_version()}" for name in ("jax-cuda13-plugin", "jax-cuda13-pjrt")]
    return [*jax, *(f"{name}=={CUDA}" for name in ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-nvdisasm"))]


def folder() -> Path:
    """Returns the folder where `make gpu-compile-env` puts the wheels; RQJAX_GPU_COMPILE names another one."""
    return Path(os.environ.get("RQJAX_GPU_COMPILE") or Path(sys.prefix) / "gpu-compile")


def configurations() -> dict[str, Configuration]:
    """Returns by name a function that makes a function to compile and the shapes of its arguments."""
    from tests.tools import example_kernel, hopper_shapes

    return {**hopper_shapes.CONFIGURATIONS, "example": example_kernel.fits}


def programs() -> dict[str, Configuration]:
    """Returns by name a function that makes a whole program, whose launches are counted, and the shapes it takes."""
    from tests.tools.launches import PROGRAMS

    return PROGRAMS


def timed() -> dict[str, Callable[[list[str]], list[str]]]:
    """Returns by name of what is predicted the function that makes a table of some names."""
    from tests.tools import hopper_times, hopper_vectors

    return {
        **dict.fromkeys(hopper_times.SHAPES, hopper_times.table),
        **dict.fromkeys(hopper_vectors.NAMES, hopper_vectors.table),
    }


def compiled(names: list[str], *, ptx: str | None = None, capability: str = "9.0") -> dict[str, Kernels]:
    """Each configuration's kernels, compiled by one process for GPUs of a compute capability.

    `spills` are bytes stored and loaded, `shared` the static and dynamic bytes of a block, `instructions` those of the
    PTX.

    Raises:
      FileNotFoundError: the compiler is not there.
      RuntimeError: a configuration does not compile; the message ends like the compiler's.
    """
    return _run("hopper_compile", [ptx or "", capability, *names])


def launched(names: list[str]) -> dict[str, dict[str, int]]:
    """Counts of programs of `tests.tools.launches`, compiled for the same GPU; errors are those of `compiled`."""
    return _run("launches", names)


def on_ptx(tests: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs tests of pytest with kernels as PTX, see `tests.tools.on_ptx`; errors are those of `compiled`."""
    options = ["-p", "tests.tools.on_ptx", "-p", "no:cacheprovider", "-q", "-m", "full or not full"]
    return _process(["pytest", *options, *tests], MOSAIC_GPU_DUMP_HOST_LLVM="1")


def _run(tool: str, arguments: list[str]) -> Any:
    """Runs a tool that compiles, in a process of its own, and returns what it prints as JSON."""
    done = _process([f"tests.tools.{tool}", *arguments])
    if done.returncode:
        raise RuntimeError(f"compiling for Hopper failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout)


def _process(arguments: list[str], **more: str) -> subprocess.CompletedProcess[str]:
    """Runs a module of Python with the compiler on its path."""
    cuda = folder() / "nvidia" / "cu13"
    if not ((cuda / "bin" / "ptxas").exists() and (folder() / "jax_cuda13_plugin").exists()):
        raise FileNotFoundError(f"there is no compiler for NVIDIA GPUs in {folder()}: run `make gpu-compile-env`")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder()), os.environ.get("PYTHONPATH", "")]),
        "PATH": os.pathsep.join([str(cuda / "bin"), os.environ["PATH"]]),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_gpu_cuda_data_dir={cuda} --xla_gpu_autotune_level=0",
        "MOSAIC_GPU_DUMP_PTX": "1",  # to standard output; to a folder every pass would go too, 25 MB a kernel
        "MOSAIC_GPU_DUMP_PTXAS": "1",
    }
    environment.pop("MOSAIC_GPU_DUMP_TO", None)
    line = [sys.executable, "-m", *arguments]
    return subprocess.run(line, cwd=ROOT, env=environment | more, capture_output=True, text=True, check=False)


def complaints(name: str, kernels: Kernels, golden: Kernels | None, *, slack: float = 1) -> list[str]:
    """Returns complaints about what is worse than it was, but for `slack` times the registers and shared memory."""
    worse = []
    for kernel, now in kernels.items():
        place = f"{name}, kernel {kernel}"
        if now["spills"]:
            worse.append(f"{place}: spills {now['spills']} bytes of registers to memory")
        if now["shared"] > MAX_SHARED:
            worse.append(f"{place}: {now['shared']} bytes of shared memory, a block has {MAX_SHARED}")
        if golden is None or kernel not in golden:
            worse.append(f"{place}: has no golden")
            continue
        for field in ("registers", "shared"):
            if now[field] > slack * golden[kernel][field]:
                worse.append(f"{place}: {field} grew from {golden[kernel][field]} to {now[field]}")
    worse += [f"{name}: kernel {kernel} of the goldens is gone" for kernel in set(golden or {}) - set(kernels)]
    return worse


def goldens() -> dict[str, dict[str, Kernels]]:
    """{jax version: {configuration: kernels}}."""
    return json.loads(GOLDENS.read_text()) if GOLDENS.exists() else {}


def renew(kernels: dict[str, Kernels], *, whole: bool) -> None:
    """Writes the goldens of this version of jax, of all configurations if `whole`, else of these."""
    kept = {
        name: {
            kernel: {field: now[field] for field in ("registers", "spills", "shared")} for kernel, now in one.items()
        }
        for name, one in kernels.items()
    }
    GOLDENS.parent.mkdir(exist_ok=True)
    before = {} if whole else goldens().get(jax_version(), {})
    renewed = {**goldens(), jax_version(): {**before, **kept}}
    GOLDENS.write_text(json.dumps(renewed, indent=1, sort_keys=True) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="configurations; all, if none is given")
    parser.add_argument("--ptx", metavar="DIR", help="write the PTX of each kernel there")
    parser.add_argument("--capability", default="9.0", help="of the GPU, 9.0, 10.0 or 10.3 (default: 9.0)")
    parser.add_argument("--goldens", action="store_true", help=f"renew {GOLDENS.relative_to(ROOT)}")
    parser.add_argument("--launches", action="store_true", help="count the launches of whole programs, and stop")
    parser.add_argument("--times", action="store_true", help="predict times on an H200, and stop")
    parser.add_argument("--wheels", action="store_true", help="print what make gpu-compile-env installs, and stop")
    options = parser.parse_args()
    if options.wheels:
        print(*wheels())
        return
    if not wheels():
        sys.exit(f"no kernels for jax {jax_version()} on {sys.platform} {platform.machine()}")
    available: dict[str, Any] = programs() if options.launches else timed() if options.times else configurations()
    names = options.names or list(TESTED if options.goldens else available)
    unknown = set(names) - set(available)
    if unknown:
        sys.exit(f"no configuration {', '.join(sorted(unknown))}; there are {', '.join(available)}")
    try:
        if options.launches:
            print(f"{'program':<52} {'launches':>8} {'waits':>6} {'within':>7}")
            for name, now in launched(names).items():
                print(f"{name:<52} {now['launches']:>8} {now['waits']:>6} {now['within']:>7}")
            return
        if options.times:
            for table in dict.fromkeys(available.values()):
                if some := [name for name in names if available[name] is table]:
                    print(*table(some), sep="\n")
            return
        kernels = compiled(names, ptx=options.ptx, capability=options.capability)
    except (FileNotFoundError, RuntimeError) as error:
        sys.exit(f"error: {error}")
    print(f"{'configuration':<32} {'kernel':<24} {'registers':>9} {'spills':>7} {'shared':>7} {'PTX':>7}")
    for name, one in kernels.items():
        for kernel, now in one.items():
            print(f"{name:<32} {kernel:<24} {now['registers']:>9} {now['spills']:>7} {now['shared']:>7}", end=" ")
            print(f"{now['instructions']:>7}")
    if options.goldens:
        renew(kernels, whole=not options.names)


if __name__ == "__main__":
    main()
