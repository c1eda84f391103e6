"""Bounds and limits to draw beside measurements. D is the mean squared error relative to the squared norm."""

import math

import numpy as np
from scipy import special

from rqjax import codebooks


def shannon_bound(bits: float | int) -> float:
    """No quantizer of random directions has D below 4^-b (TurboQuant, Theorem 3; the Gaussian rate-distortion law)."""
    return 4.0**-bits


def mse_bound(bits: float | int) -> float:
    """TurboQuant stays below sqrt(3) pi / 2 4^-b (Theorem 1)."""
    return math.sqrt(3) * math.pi / 2 * 4.0**-bits


def inner_product_bound(bits: float | int, dim: int) -> float:
    """Variance of TurboQuant-prod's inner products for unit vectors: below sqrt(3) pi^2 / d 4^-b (Theorem 2)."""
    return math.sqrt(3) * math.pi**2 / dim * 4.0**-bits


def inner_product_lower_bound(bits: float | int, dim: int) -> float:
    """No unbiased quantizer has a variance below 4^-b / d (Theorem 3)."""
    return 4.0**-bits / dim


def inner_product_variance(bits: int, dim: int) -> float:
    """TurboQuant-prod at `bits` >= 2: pi / (2 d) D(b - 1) (the recursion in the proof of Theorem 2)."""
    return qjl_variance(dim) * codebooks.distortion(bits - 1, dim)


def qjl_variance(dim: int) -> float:
    """Variance of the Gaussian sign sketch for unit vectors: at most pi / (2 d) (Lemma 4)."""
    return math.pi / (2 * dim)


def panter_dite(bits: int, dim: int | None = None) -> float:
    """High-resolution D of the best scalar quantizer: 4^-b / 12 (integral of f^(1/3))^3, f of unit variance.

    For the Gaussian this is `mse_bound`; with `dim`, f is the coordinate of a random unit vector times sqrt(d).
    """
    if dim is None:
        return mse_bound(bits)
    half, third = (dim - 1) / 2, (dim - 3) / 6 + 1
    # f is the Beta(half, half) density over [-1, 1]; f^(1/3) integrates to B(third, third) 2^(2 third - 1) f(0)^(1/3)
    log_peak = special.gammaln(dim / 2) - special.gammaln(half) - math.log(math.pi) / 2
    log_integral = special.betaln(third, third) + (2 * third - 1) * math.log(2) + log_peak / 3
    return dim * math.exp(3 * log_integral) / 12 * 4.0**-bits


def lloyd_max(bits: int, dim: int | None = None) -> float:
    """D of the Lloyd-Max quantizer: TurboQuant-mse's exact distortion after a uniform rotation."""
    return codebooks.distortion(bits, dim)


def index_entropy(bits: int, dim: int | None = None) -> float:
    """Bits of entropy in one Lloyd-Max index: what an entropy coder would save is `bits` less this."""
    p = codebooks.probabilities(bits, dim)
    return float(-(p * np.log2(p)).sum())


def shrinkage(distortion: float | int) -> float:
    """The factor 1 - D by which an mse-optimal quantizer shrinks inner products with what it quantized."""
    return 1 - distortion
