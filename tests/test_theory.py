"""Formulas against the papers' printed values and against integration."""

import numpy as np
from scipy import integrate, special

from rqjax import theory


def test_bounds_as_printed():
    np.testing.assert_allclose([theory.mse_bound(b) for b in (1, 2, 3, 4)], [0.680, 0.170, 0.043, 0.011], atol=6e-4)
    printed = [theory.inner_product_variance(b, 128) * 128 for b in (2, 3, 4)]
    np.testing.assert_allclose(printed, [0.56, 0.18, 0.053], atol=0.01)
    np.testing.assert_allclose(theory.inner_product_bound(1, 1), np.sqrt(3) * np.pi**2 / 4)
    assert theory.inner_product_lower_bound(2, 10) == 1 / 160
    np.testing.assert_allclose(theory.qjl_variance(128), np.pi / 256)


def test_index_entropy_as_printed():
    np.testing.assert_allclose([theory.index_entropy(b) for b in (1, 2, 3, 4)], [1, 1.911, 2.825, 3.765], atol=6e-4)


def test_panter_dite():
    """Against integration, and as the limit of Lloyd-Max: within 3 % at 8 bits."""
    for dim in (5, 128):
        scale = np.exp(special.gammaln(dim / 2) - special.gammaln((dim - 1) / 2)) / np.sqrt(np.pi)
        third = scale ** (1 / 3) * integrate.quad(lambda x, power: (1 - x**2) ** power, -1, 1, ((dim - 3) / 6,))[0]
        np.testing.assert_allclose(theory.panter_dite(3, dim), dim * third**3 / 12 / 64, rtol=1e-6)
        np.testing.assert_allclose(theory.lloyd_max(8, dim), theory.panter_dite(8, dim), rtol=0.03)
    np.testing.assert_allclose(theory.panter_dite(4, 10**6), theory.mse_bound(4), rtol=1e-4)


def test_bounds_enclose_lloyd_max():
    for bits in range(1, 9):
        assert theory.shannon_bound(bits) < theory.lloyd_max(bits, 128) < theory.mse_bound(bits)
