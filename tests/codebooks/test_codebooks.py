"""Lloyd-Max codebooks are fixed points to 1e-10, and have the known errors."""

import numpy as np
import pytest
from scipy import integrate, special

from rqjax import codebooks


def density(dim):
    if dim is None:
        return lambda x: np.exp(-(x**2) / 2) / np.sqrt(2 * np.pi), 9.0
    scale = np.exp(special.gammaln(dim / 2) - special.gammaln((dim - 1) / 2)) / np.sqrt(np.pi)
    return lambda x: scale * (1 - x**2) ** ((dim - 3) / 2), 1.0


@pytest.mark.parametrize("dim", [3, 4, 64, 128, 344, 4096, None])
@pytest.mark.parametrize("bits", [1, 2, 3, 5, 8])
def test_levels_are_means_of_their_cells(dim, bits):
    """Levels equal the means by numerical integration of the density as the paper prints it."""
    levels = codebooks.gaussian(bits) if dim is None else codebooks.beta(dim, bits)
    pdf, bound = density(dim)
    sigma = 1 if dim is None else dim**-0.5
    assert len(levels) == 2**bits
    assert (np.diff(levels) > 0).all()
    np.testing.assert_array_equal(levels, -levels[::-1])
    edges = np.concatenate([[-bound], (levels[1:] + levels[:-1]) / 2, [bound]])
    for i in {0, 1, len(levels) // 2, len(levels) - 1}:
        low, high = max(edges[i], -12 * sigma), min(edges[i + 1], 12 * sigma)
        options = {"epsabs": 0, "epsrel": 1e-12, "limit": 400}
        mass = integrate.quad(pdf, low, high, **options)[0]
        mean = integrate.quad(lambda x: x * pdf(x), low, high, **options)[0] / mass
        assert abs(mean - levels[i]) < 1e-10 * max(1, sigma / 1e-2)


def test_known_errors():
    gaussian = [codebooks.distortion(bits) for bits in (1, 2, 3, 4)]
    np.testing.assert_allclose(gaussian, [0.36338, 0.11748, 0.034548, 0.009501], rtol=1e-4)  # Max, 1960
    sphere = [codebooks.distortion(bits, dim=128) for bits in (1, 2, 3, 4)]
    np.testing.assert_allclose(sphere, [0.36089, 0.11600, 0.03397, 0.00931], rtol=1e-3)


def test_the_circle_and_the_limit():
    np.testing.assert_allclose(codebooks.beta(2, 1), [-2 / np.pi, 2 / np.pi], rtol=1e-10)
    for bits in (1, 3, 5):
        np.testing.assert_allclose(codebooks.beta(10**6, bits) * 1e3, codebooks.gaussian(bits), rtol=1e-4)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_integer_levels_cost_next_to_nothing(bits):
    step, n = codebooks.integer(128, bits)
    assert n.dtype == np.int8
    np.testing.assert_array_equal(n, -n[::-1])
    pdf, _ = density(128)
    x = np.linspace(-1, 1, 200_001)
    nearest = np.abs(x[:, None] - step * n).min(axis=1)
    error = 128 * integrate.simpson(nearest**2 * pdf(x), x=x)
    assert error < codebooks.distortion(bits, dim=128) * [1.0001, 1.0001, 1.001, 1.0015][bits - 1]


def test_codebooks_are_cached_and_read_only():
    assert codebooks.beta(128, 3) is codebooks.beta(128, 3)
    with pytest.raises(ValueError, match="read-only"):
        codebooks.beta(128, 3)[0] = 0
    with pytest.raises(ValueError, match="expected dim to be a whole number from 2"):
        codebooks.beta(1, 3)
