"""Configuration of the tests: the compiler's effort, which files are collected, and what the tests cost.

The tests compile more than they compute, so LLVM does not optimize: what XLA fuses, stores and divides by is decided
before and stays the same, figures of memory included. The core is of the kernels that users run; in the full suite
fusions become LLVM's code without MLIR, which takes half of the time. This is set before jax has a client; processes
that tests start inherit it. Files on kernels are collected only where jax can express them; jax-mps has those of MLX
from 0.10 on.
"""

import collections
import importlib.metadata
import importlib.util
import os
import resource
from pathlib import Path

import pytest

from tests.tools import hopper

# Workers of pytest-xdist have a core each: two of them on two cores, each with threads for both, would wait for each
# other half of the time. Their clients of XLA have four threads, as NPROC says, not one for the one core: a callback in
# the only thread would wait for ever for copies of its arguments.
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")
if WORKER and hasattr(os, "sched_setaffinity"):
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(WORKER.removeprefix("gw")) % len(cores)]})
    os.environ["NPROC"] = "4"


def add_flag(flag: str) -> None:
    """Sets an option of XLA, unless it is set."""
    flags = os.environ.get("XLA_FLAGS", "")
    if flag.partition("=")[0] not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {flag}".strip()


add_flag("--xla_backend_optimization_level=0")


def pytest_configure(config):
    known = importlib.metadata.version("jaxlib").startswith("0.10.")  # others end where they do not know it
    if known and config.getoption("markexpr") != "not full":
        add_flag("--xla_cpu_use_fusion_emitters=false")
    import jax  # after the flags

    # The tests' own products are exact on any device. The library's say their precision: `backends/test_precision.py`.
    jax.config.update("jax_default_matmul_precision", "highest")


collect_ignore: list[str] = []
if not hopper.has_kernels():
    collect_ignore += ["backends/test_tpu.py", "backends/test_tpu_compile.py", "experiments/test_tpu_suite.py"]
    collect_ignore += [
        f"backends/test_{name}.py"
        for name in ("lowering", "kernels", "decode_attention", "hopper_columns", "latent_kernel", "mps")
    ]
if importlib.util.find_spec("mlx") is None:  # with faiss, gguf and lm_eval in the environment of the full suite only
    collect_ignore += ["quantizers/test_affine.py", "backends/test_mps.py"]
    collect_ignore += ["search/test_faiss.py", "experiments/test_vector_files.py"]
    collect_ignore += ["quantizers/test_formats.py", "nn/test_gguf.py", "experiments/test_lm_eval.py"]
if importlib.util.find_spec("flatbuffers") is None:  # which `jax.export` writes with
    collect_ignore.append("core/test_export.py")
if importlib.util.find_spec("tunix") is None:  # with gemma in an environment of their own
    collect_ignore.append("nn/test_compress.py")
if not hopper.wheels():
    collect_ignore += ["backends/test_compile.py", "backends/test_tpu_compile.py"]
elif hopper.folder().exists():
    collect_ignore.append("backends/test_lowering.py")  # compiling begins with it


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown():
    from experiments.harness import programs  # which imports jax: after the flags

    programs.drop_if_many()


SLOWEST = 25
COSTS: dict[tuple[bool, str], float] = collections.defaultdict(float)
"""Processor seconds of each test: (whether it belongs to the core, its name)."""


def pytest_addoption(parser):
    parser.addoption("--core-share", type=float, help="fail if the core takes more of all seconds of a processor")
    parser.addoption(
        "--core-seconds", type=Path, help="file for the core's seconds, which a run without the core reads"
    )


def spent() -> float:
    """Processor seconds of this process and of those that it started, whatever else the machine does."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    item.config.spent = spent()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = yield
    before, item.config.spent = item.config.spent, spent()
    report.cost = item.config.spent - before
    return report


def pytest_runtest_logreport(report):
    COSTS["full" not in report.keywords, report.nodeid] += getattr(report, "cost", 0)  # a dead worker reports none


def core_and_rest(config) -> list[float]:
    core, rest = (sum(cost for (of_core, _), cost in COSTS.items() if of_core == wanted) for wanted in (True, False))
    kept = config.getoption("--core-seconds")
    return [core or (float(kept.read_text()) if kept else 0), rest]


def pytest_terminal_summary(terminalreporter, config):
    core, rest = core_and_rest(config)
    if kept := config.getoption("--core-seconds"):
        kept.write_text(str(core))
    terminalreporter.section(f"seconds of a processor: core {core:.0f}, the rest {rest:.0f}; the slowest")
    for (of_core, name), cost in sorted(COSTS.items(), key=lambda item: -item[1])[:SLOWEST]:
        terminalreporter.line(f"{cost:6.1f} {'core' if of_core else 'full'} {name}")
    files: dict[str, float] = collections.defaultdict(float)
    for (_, name), cost in COSTS.items():
        files[name.partition("::")[0]] += cost
    terminalreporter.line("by file: " + ", ".join(f"{name} {files[name]:.0f}" for name in sorted(files, key=files.get)))
    if over_its_share(config):
        terminalreporter.line(f"the core takes more than its share, {config.getoption('--core-share')} of the whole")


def pytest_sessionfinish(session):
    if over_its_share(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def over_its_share(config) -> bool:
    limit = config.getoption("--core-share")
    if limit is None:
        return False
    core, rest = core_and_rest(config)
    return core > limit * (core + rest)
