"""Strategies by name."""

import jax
import pytest

import rqjax

KEY = jax.random.key(0)
BITS = {"v2_lean": 4.5, "v2_rotated": 4.5, "v2_rotated_qjl": 4.625, "v3_2": 2.125, "v3_2.5": 2.625, "v3_2.75": 2.875}
BITS |= {"v3_3": 3.125, "v3_3.25": 3.375, "v3_3.5": 3.625, "v3_4": 4.125, "rotorquant": 4.125, "rotor_chain_3": 3.125}
BITS |= {"eden_2": 2.125, "turboquant_mixed_2.5": 2.625, "float32": 32, "bfloat16": 16, "turboquant_prod_3": 3.25}


@pytest.mark.parametrize("name", BITS)
def test_bits_of_keys(name):
    strategy = rqjax.strategy(name, KEY, 128)
    assert strategy.keys.bits_per_vector == 128 * BITS[name]
    assert not strategy.key_form.learned
    assert rqjax.strategy(f"{name}+centered", KEY, 128).key_form.learned


def test_keys_and_values_apart():
    strategy = rqjax.strategy("v3_4/rotorquant_2+centered", KEY, 64)
    assert (strategy.keys.bits_per_vector, strategy.values.bits_per_vector) == (4 * 64 + 16, 2 * 64 + 16)
    assert strategy.key_form.learned
    assert strategy.cache(1, 2, 64).key_form.mean.shape == (1, 2, 64)


def test_the_window_has_the_wider_of_two_full_precisions():
    dtypes = {"float8/bfloat16": "bfloat16", "bfloat16/float32": "float32", "bfloat16/eden_2": "bfloat16"}
    found = {name: rqjax.strategy(name, KEY, 32).cache(1, 1, 64).exact_keys.dtype.name for name in dtypes}
    assert found == dtypes


def test_qjl_is_for_keys_only():
    strategy = rqjax.strategy("v2_rotated_qjl", KEY, 128)
    assert strategy.values.bits_per_vector == 3.5 * 128


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("v3_5", rqjax.UnknownName, "unknown strategy 'v3_5'; did you mean"),
        ("rotorqant_3", rqjax.UnknownName, "did you mean 'rotorquant'"),
        (
            "rotorquant+centred",
            rqjax.UnknownName,
            "option of the strategy 'rotorquant' 'centred'; did you mean 'centered'",
        ),
        ("v3_3+centered_2", rqjax.UnknownName, "unknown option of the strategy"),
        ("v3_3/v3_2/v3_2", ValueError, "one for keys and one for values"),
        ("rotorquant_9", ValueError, "expected bits to be a whole number from 1 to 8, got 9"),
    ],
)
def test_wrong_names(name, error, message):
    with pytest.raises(error, match=message):
        rqjax.strategy(name, KEY, 128)
