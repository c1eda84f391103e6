"""Bounds and limits to draw beside measurements. D is the mean squared error relative to the squared norm."""

import math

from rqjax import codebooks


def shannon_bound(bits: float | int) -> float:
    """No quantizer of random directions has D below 4^-b (TurboQuant, Theorem 3; the Gaussian rate-distortion law)."""
    return 4.0**-bits


def mse_bound(bits: float | int) -> float:
    """TurboQuant stays below sqrt(3) pi / 2 4^-b (Theorem 1)."""
    return math.sqrt(3) * math.pi / 2 * 4.0**-bits


def inner_product_bound(dim: int, bits: float | int) -> float:
    """Variance of TurboQuant-prod's inner products for unit vectors: below sqrt(3) pi^2 / d 4^-b (Theorem 2)."""
    return math.sqrt(3) * math.pi**2 / dim * 4.0**-bits


def inner_product_lower_bound(dim: int, bits: float | int) -> float:
    """No unbiased quantizer has a variance below 4^-b / d (Theorem 3)."""
    return 4.0**-bits / dim


def lloyd_max(bits: int, *, dim: int | None = None) -> float:
    """D of the Lloyd-Max quantizer: TurboQuant-mse's exact distortion after a uniform rotation."""
    return codebooks.distortion(bits, dim=dim)
