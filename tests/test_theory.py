"""Formulas against the papers' printed values."""

import numpy as np

from rqjax import codebooks, theory


def test_bounds_as_printed():
    np.testing.assert_allclose([theory.mse_bound(b) for b in (1, 2, 3, 4)], [0.680, 0.170, 0.043, 0.011], atol=6e-4)
    qjl_variance = np.pi / (2 * 128)  # of a Gaussian sign sketch of unit vectors (Lemma 4)
    printed = [128 * qjl_variance * codebooks.distortion(b - 1, dim=128) for b in (2, 3, 4)]
    np.testing.assert_allclose(printed, [0.56, 0.18, 0.053], atol=0.01)
    np.testing.assert_allclose(theory.inner_product_bound(1, 1), np.sqrt(3) * np.pi**2 / 4)
    assert theory.inner_product_lower_bound(10, 2) == 1 / 160


def test_index_entropy_as_printed():
    entropies = [-np.sum(p * np.log2(p)) for p in map(codebooks.probabilities, (1, 2, 3, 4))]
    np.testing.assert_allclose(entropies, [1, 1.911, 2.825, 3.765], atol=6e-4)


def test_bounds_enclose_lloyd_max():
    for bits in range(1, 9):
        assert theory.shannon_bound(bits) < theory.lloyd_max(bits, dim=128) < theory.mse_bound(bits)
