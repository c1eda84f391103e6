"""The decode attention kernel for values that are parts of their keys, interpreted, against decoded vectors in float64
and against attention in XLA."""

import jax
import numpy as np
import pytest

import rqjax
from pallas_kernels.gpu import warp_attention
from rqjax.core.dispatch import only_xla
from tests.backends.test_decode_attention import TOLERANCE, both, check, empty, error, interpreted, run
from tests.tools.computed import FAST

__all__ = ["interpreted"]
pytestmark = pytest.mark.full

LATENT = {
    "3 bits before 2 bits, two parts of queries": ((128, 6, "3", "2", (300,), 2), False),
    "2 bits before 4 bits, in pages": ((128, 3, "2", "4", (130, 9, 7, 1), 1), True),
    "4 bits before 1 bit, latents of 256": ((256, 5, "4", "1", (256,), 1), False),
}
"""Cases of keys that are 64 dimensions and, behind them, their values, and whether they are in pages."""


@pytest.mark.parametrize("case", LATENT)
def test_values_that_are_a_part_of_their_keys(case, monkeypatch):
    arguments, paged = LATENT[case]
    if "parts" in case:
        monkeypatch.setattr(warp_attention, "most_rows", lambda *_, **options: 4)
    check(*run(*arguments, paged=paged, latent=True))


@pytest.mark.usefixtures("interpreted")
def test_latents_less_a_mean_that_turns():
    rng = np.random.default_rng(3)
    k, q = (rng.normal(size=(1, *shape, 192)).astype(np.float32) for shape in ((150, 1), (1, 4)))
    append = jax.jit(only_xla(rqjax.append), compiler_options=FAST)
    cache = append(empty("eden_2/eden_3+turned", batch=1, dim=192, latent=128), k + 3, None)
    assert np.abs(cache.key_form.mean).min() > 1
    found, expected = both(cache, q)
    assert error(found, expected) < TOLERANCE
