"""Kernels as the compiler makes them for Hopper GPUs, run instruction by instruction: their own tests, each kernel and
kind of codes once.

The interpreter runs twins of what Pallas cannot express; here it is the operations themselves, with copies by tensor
maps and products of tensor cores. Needs no GPU, but its compiler: `make gpu-compile-env`.
"""

import pytest

from tests.tools import hopper

TESTS = {
    "test_attention_around_codes.py": (
        "test_queries_and_tokens_in_full_precision[heads of 128, six queries, float32]",
        "test_queries_of_keys_that_turn[3-64]",
        "test_queries_and_a_mean_turn_with_positions[all coordinates]",
        "test_queries_and_a_mean_turn_with_positions[none turns, a sequence without tokens]",
        "test_merges_and_rotates_back[5-128-129-17-2-False-True]",
        "test_a_new_token_enters_the_rings[a sink, and a unit that is complete]",
    ),
    "test_decode_attention.py": (
        "test_matches_attention_to_decoded_vectors[affine, one group, more blocks than stages]",
        "test_matches_attention_to_decoded_vectors[columns]",
        "test_pages_in_any_order_and_what_is_added_to_each_token[3 bits, 2 bits, an empty sequence, idle splits]",
        "test_keys_that_turn_after_they_are_decoded[trellis in pages]",
    ),
    "test_latent_kernel.py": ("test_values_that_are_a_part_of_their_keys[3 bits before 2 bits, two parts of queries]",),
    "test_kernels.py": (
        "test_codes_and_decoded_vectors_are_those_of_xla[rotor_chain-64-7-bfloat16-33]",
        "test_round_trip_is_decoding_what_was_encoded[64-6-bfloat16]",
        "test_best_scales[mse-turboquant-float32]",
        "test_sketch_of_the_residual[turboquant_prod-float32]",
        "test_trellis_codes_are_those_of_xla[3-64-bfloat16-3]",
    ),
}


NAMES = [f"tests/backends/{file}::{name}" for file, names in TESTS.items() for name in names]


@pytest.mark.full
def test_kernels_as_ptx():
    """All in one process, whose start takes as long as some kernels."""
    done = hopper.on_ptx(NAMES)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert f"{len(NAMES)} passed" in done.stdout
