"""Bounds and limits to draw beside measurements. D is the mean squared error relative to the squared norm."""

import math

from rqjax import codebooks


def shannon_bound(bits: float | int) -> float:
    """Lower bound 4^-b of D for quantizers of random directions (TurboQuant, Theorem 3; the Gaussian rate-distortion
    law)."""
    return 4.0**-bits


def mse_bound(bits: float | int) -> float:
    """Upper bound sqrt(3) pi / 2 4^-b of D for TurboQuant (Theorem 1)."""
    return math.sqrt(3) * math.pi / 2 * 4.0**-bits


def inner_product_bound(dim: int, bits: float | int) -> float:
    """Upper bound sqrt(3) pi^2 / d 4^-b of the variance of TurboQuant-prod's inner products for unit vectors (Theorem
    2)."""
    return math.sqrt(3) * math.pi**2 / dim * 4.0**-bits


def inner_product_lower_bound(dim: int, bits: float | int) -> float:
    """Lower bound 4^-b / d of the variance of an unbiased quantizer (Theorem 3)."""
    return 4.0**-bits / dim


def lloyd_max(bits: int, *, dim: int | None = None) -> float:
    """D of the Lloyd-Max quantizer: TurboQuant-mse's exact distortion after a uniform rotation."""
    return codebooks.distortion(bits, dim=dim)
