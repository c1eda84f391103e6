"""Kernels compile for Hopper, spill nothing, and take no more registers and shared memory than they did.

Needs no GPU, but its compiler: `make gpu-compile-env`. `python -m tests.tools.hopper` shows the numbers.
"""

import fcntl
import json
import os
from pathlib import Path

import jax
import pytest

from pallas_kernels.gpu import launch, warp_attention
from tests.tools import example_kernel, hopper, hopper_times, hopper_vectors
from tests.tools.hopper_shapes import CONFIGURATIONS, OF_VECTORS
from tests.tools.programs import PROGRAMS

pytestmark = pytest.mark.full

RAGGED = [name for name in CONFIGURATIONS if name.endswith(" vectors")]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A file of what is compiled; with ".ptx" behind its name, the folder of the kernels' PTX."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", "alone")
    return (tmp_path_factory.getbasetemp().parent if run != "alone" else tmp_path_factory.mktemp(run)) / f"hopper-{run}"


@pytest.fixture(scope="module")
def compiled(path):
    """All configurations at once: the start of the process costs as much as a kernel. Workers of a run share them."""
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        if not file.read(1):
            json.dump(hopper.compiled([*hopper.TESTED, *RAGGED, "example_spills"], ptx=f"{path}.ptx"), file)
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def golden():
    """Goldens of this jax, or of the newest before it, which another jax may exceed by a quarter."""
    of = hopper.goldens()
    version = hopper.jax_version()
    known = [v for v in of if hopper.release(v) <= hopper.release(version)]
    return (of[version], 1) if version in of else (of[max(known, key=hopper.release)], 1.25)


@pytest.mark.parametrize("name", hopper.TESTED)
def test_resources(name, compiled, golden):
    goldens, slack = golden
    worse = hopper.complaints(name, compiled[name], goldens.get(name), slack=slack)
    assert not worse, "; ".join(worse) + f": if it must be so, renew {hopper.GOLDENS.name} by `make goldens`"


@pytest.mark.parametrize("name", [name for name in hopper.TESTED if name.startswith("decode_attention")])
def test_blocks_of_threads_that_fit(name, compiled, monkeypatch):
    """Attention is shared among as many blocks as processors have registers and memory for."""
    plans = []
    monkeypatch.setattr(warp_attention, "splits_of", lambda plan, *_: plans.append(plan) or 1)
    function, shapes = CONFIGURATIONS[name]()
    jax.eval_shape(function, *shapes)
    (kernel,) = compiled[name].values()
    fit = min(2**16 // (128 * (-(-kernel["registers"] // 8) * 8)), 228 * 1024 // (kernel["shared"] + 1024))
    assert {warp_attention.resident(plan) for plan in plans} == {fit}


@pytest.mark.parametrize("name", RAGGED)
def test_any_number_of_vectors_compiles(name, compiled):
    (kernel,) = compiled[name].values()
    assert kernel["spills"] == 0
    assert kernel["shared"] <= hopper.MAX_SHARED


@pytest.mark.parametrize("name", [name for name in hopper.TESTED if name in OF_VECTORS and "trellis" not in name])
def test_blocks_of_threads_of_vectors_fit(name, compiled, monkeypatch):
    """A block more than fits would begin when all others end. Those that wait for few copies may be fewer."""
    found = []
    monkeypatch.setattr(launch, "shares", lambda tiles, *of: found.append(launch.resident(*of)) or (2, -(-tiles // 2)))
    function, shapes = CONFIGURATIONS[name]()
    jax.eval_shape(function, *shapes)
    (kernel,) = compiled[name].values()
    assert found[0] <= hopper_vectors.fit(kernel)


def test_kernels_compile_for_blackwell():
    """All kinds but dense matrices, which need wgmma; `rqjax.backends.hopper` refuses these there."""
    names = [
        "rotor_encode_80_3_float32",
        "rotor_roundtrip_128_3_bfloat16",
        "chain_decode_128_3_float32",
        "trellis_encode_128_3_float32",
        "decode_attention 4 bits, pages, 4 query heads",
        "decode_attention affine groups, 4 query heads",
        "decode_attention trellis, 3 bits, pages",
        "decode_attention columns, odd rows",
        "attention_prologue heads of 128",
        "attention_epilogue heads of 128",
    ]
    for kernels in hopper.compiled(names, capability="10.0").values():
        assert [kernel["spills"] for kernel in kernels.values()] == [0]
    with pytest.raises(RuntimeError, match=r"wgmma.* not supported on sm_100a"):
        hopper.compiled(["dense_encode_128_3_float32"], capability="10.0")


def test_no_golden_is_left_over(golden):
    assert sorted(golden[0]) == sorted(hopper.TESTED), "renew them by `make goldens`"


def test_what_the_harness_reads(compiled):
    (kernel,) = compiled["example"].values()
    assert compiled["example"].keys() == {"doubled"}
    assert 16 < kernel["registers"] < 128
    assert kernel["spills"] == 0
    assert example_kernel.SHARED <= kernel["shared"] <= example_kernel.SHARED + 16
    assert 50 < kernel["instructions"] < 1000
    spilled = compiled["example_spills"]["hoarded"]
    assert spilled["registers"] == 255
    assert spilled["spills"] >= 2 * 4 * (example_kernel.HELD - 255)
    assert spilled["shared"] < 16


def test_programs():
    """Programs of plain JAX compile for a GPU, without kernels of ours; an eighth of them, since each takes
    four seconds; `test_launches.py` compiles caches, codes and a search."""
    names = [f"program {name}" for name in list(PROGRAMS)[::8]]
    assert hopper.compiled(names) == {name: {} for name in names}


def test_complaints():
    good = {"a": {"registers": 40, "spills": 0, "shared": 1024, "instructions": 9}}
    bad = {"a": {"registers": 41, "spills": 8, "shared": 300_000, "instructions": 9}}
    assert hopper.complaints("n", good, good) == []
    assert hopper.complaints("n", good, {}) == ["n, kernel a: has no golden"]
    assert hopper.complaints("n", {}, good) == ["n: kernel a of the goldens is gone"]
    assert hopper.complaints("n", bad, good) == [
        "n, kernel a: spills 8 bytes of registers to memory",
        "n, kernel a: 300000 bytes of shared memory, a block has 232448",
        "n, kernel a: registers grew from 40 to 41",
        "n, kernel a: shared grew from 1024 to 300000",
    ]
    assert hopper.complaints("n", {"a": {**good["a"], "registers": 50}}, good, slack=1.25) == []
    assert hopper.complaints("n", {"a": {**good["a"], "registers": 51}}, good, slack=1.25) != []


def test_a_missing_compiler_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setenv("RQJAX_GPU_COMPILE", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"there is no compiler .* run `make gpu-compile-env`"):
        hopper.compiled(["example"])


@pytest.mark.full
@pytest.mark.parametrize("name", sorted({name for name, *_ in hopper_times.MEASURED}))
def test_predicted_times_are_near_what_prototypes_took(name, compiled, path):
    of = f"decode_attention {name}"
    ((_, sass),) = hopper_times.disassembled({of: compiled[of]}, Path(f"{path}.ptx")).values()
    loop = hopper_times.loop_of(sass)
    for (of, batch, tokens), measured in hopper_times.MEASURED.items():
        if of == name:
            shape = hopper_times.SHAPES[name]._replace(batch=batch, tokens=tokens)
            assert hopper_times.predicted_us(shape, loop) == pytest.approx(measured, rel=0.2)


def test_predicted_times_are_near_what_kernels_took():
    for case, (kernel, n, measured) in hopper_vectors.MEASURED.items():
        assert hopper_vectors.predicted_us(kernel, n) == pytest.approx(measured, rel=0.17), case


def test_instructions_of_a_tile_are_counted():
    """A loop over tiles, in it one of four trips, one that only unusual numbers take, and a wait."""
    sass = """
        /*0000*/ MOV R0, RZ ;
    .L_x_0:
        /*0010*/ SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R2], R3 ;
        /*0020*/ @!P0 BRA `(.L_x_0) ;
    .L_x_1:
        /*0030*/ @!P1 BRA `(.L_x_3) ;
    .L_x_2:
    UNUSUAL
        /*0040*/ @P2 BRA `(.L_x_2) ;
    .L_x_3:
        /*0050*/ BAR.SYNC.DEFER_BLOCKING 0x1, 0x80 ;
    .L_x_4:
        /*0060*/ LDS.128 R4, [R8] ;
        /*0070*/ STS.64 [R8], R4 ;
        /*0080*/ VIADD R9, R9, 0x10 ;
        /*0090*/ ISETP.NE.AND P3, PT, R9, 0x40, PT ;
    USUAL
        /*00a0*/ @P3 BRA `(.L_x_4) ;
        /*00b0*/ @P4 BRA `(.L_x_1) ;
        /*00c0*/ EXIT ;
    .L_x_5:
        /*00d0*/ BRA `(.L_x_5) ;
    """
    sums = "        /*0000*/ FADD R1, R1, R2 ;\n" * 8
    once, each = hopper_vectors.counted(sass.replace("UNUSUAL", sums).replace("USUAL", sums))
    assert once == hopper_vectors.Count(4, 1, 0)
    assert each == hopper_vectors.Count(3 + 4 * 13, 8, 4 * 6)
