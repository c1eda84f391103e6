"""Bits for coordinates."""

import numpy as np
from jaxtyping import Array, Float

from rqjax import codebooks
from rqjax.codebooks import MAX_BITS


def allocate(variances: Float[Array | np.ndarray, "*heads d"], total: int) -> tuple[int, ...]:
    """Bits of each coordinate, `total` in all, that minimize the error of Lloyd-Max on Gaussian coordinates.

    Reverse water-filling (Cover & Thomas, section 10.3.3) with the true errors of whole bits: each bit goes where it
    takes off most.

    Args:
      variances: of the coordinates, descending; for heads that share their bits the geometric mean of theirs counts.
      total: bits to give away, at most 8 a coordinate.

    Returns:
      Bits from 0 to 8 of each coordinate, descending.
    """
    logs = np.log(np.asarray(variances, np.float64) + 1e-30)
    variances = np.exp(logs.reshape(-1, logs.shape[-1]).mean(axis=0))
    if not 0 <= total <= MAX_BITS * len(variances):
        raise ValueError(
            f"expected from 0 to {MAX_BITS * len(variances)} bits for {len(variances)} coordinates, got {total}"
        )
    errors = np.array([1.0, *map(codebooks.distortion, range(1, MAX_BITS + 1))])
    gains = variances[:, None] * -np.diff(errors)  # falls with each bit of a coordinate
    chosen = np.zeros(gains.size, int)
    chosen[np.argsort(-gains, axis=None, kind="stable")[:total]] = 1
    return tuple(sorted(chosen.reshape(gains.shape).sum(axis=1).tolist(), reverse=True))
