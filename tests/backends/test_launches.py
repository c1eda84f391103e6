"""Programs for GPUs launch no more than they did, and wait for the host nowhere but where it is said.

Needs no GPU, but its compiler: `make gpu-compile-env`.
"""

import pytest

from tests.tools import hopper
from tests.tools.launches import PROGRAMS, counted

MOST = {
    "append 1 token to 8 sequences, eden_4": 7,
    "append 4,096 tokens, eden_4": 13,
    "append 1 token to 8 sequences, v2_lean": 11,
    "append 1 token to 8 sequences, eden_3+centered": 15,
    "append 1 token to 8 sequences, turboquant_trellis_3": 19,
    "append 1 token to 8 sequences, turboquant_trellis_2.5": 4,
    "attend to 8 sequences, eden_4": 3,
    "attend to 8 sequences in pages, eden_3+centered": 3,
    "attend to 8 sequences, eden_4+turned": 3,
    "attend to 8 sequences, 4 tokens each, eden_4": 22,
    "attend to 8 sequences, eden_4+pre_rope": 3,
    "attend to 8 sequences of latents, eden_4": 26,
    "append and attend, 8 sequences, eden_4": 10,
    "step of a decoder of one layer, 8 sequences, eden_4": 27,
    "attend to 8 sequences in plain XLA, nested_e8_3": 27,
    "encode 65,536 vectors, rotorquant": 1,
    "encode 65,536 vectors, eden": 1,
    "encode 65,536 vectors, trellis of 3 bits": 13,
    "search 100,000 vectors for 1,000 queries": 22,
}
"""Launches of each program, compiled by jax 0.10.2; another one's compiler may take a quarter more."""
WAITING = {"append 1 token to 8 sequences, turboquant_trellis_2.5": 1}
"""Programs whose host reads how often a loop runs: the Viterbi algorithm in plain XLA launches over a thousand kernels,
so that it runs only where a unit is complete."""


@pytest.fixture(scope="module")
def launched():
    return hopper.launched(list(PROGRAMS))


@pytest.mark.full
@pytest.mark.parametrize("name", PROGRAMS)
def test_launches(name, launched):
    slack = 1 if hopper.jax_version() == "0.10.2" else 1.25
    assert launched[name]["launches"] <= slack * MOST[name]
    assert launched[name]["waits"] == WAITING.get(name, 0)


MODULE = """
HloModule jit_f

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]{0}) parameter(0)
  %fusion.1 = f32[8]{0} fusion(%p), kind=kLoop, calls=%c
  %copy.1 = f32[8]{0} copy(%fusion.1)
  ROOT %tuple = (s32[], f32[8]{0}) tuple(%copy.1)
}

%condition (p: (s32[], f32[8])) -> pred[] {
  %p.1 = (s32[], f32[8]{0}) parameter(0)
  ROOT %compare = pred[] compare(%p.1), direction=LT
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %first = (s32[], f32[8]{0}) fusion(%x), kind=kInput, calls=%c
  %known = (s32[], f32[8]{0}) while(%first), condition=%condition, body=%body, frontend={"known_trip_count":"5"}
  %unknown = (s32[], f32[8]{0}) while(%known), condition=%condition, body=%body
  ROOT %out = f32[8]{0} get-tuple-element(%unknown), index=1
}
"""


def test_counts():
    """One fusion and five passes of two launches; a loop that waits, with three launches a pass."""
    assert counted(MODULE) == (11, 1, 3)
