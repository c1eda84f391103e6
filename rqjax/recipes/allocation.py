"""Allocation of bits to coordinates, and of choices under a budget."""

import numpy as np
from jaxtyping import Array, Float, Int

from rqjax import codebooks
from rqjax.codebooks import MAX_BITS


def allocate(variances: Float[Array | np.ndarray, "*heads d"], total: int) -> tuple[int, ...]:
    """Bits of each coordinate, `total` in all, that minimize the error of Lloyd-Max on Gaussian coordinates.

    Reverse water-filling (Cover & Thomas, section 10.3.3) with the true errors of whole bits: each bit goes where it
    takes off most.

    Args:
      variances: variances of the coordinates, descending; of heads that share bits the geometric mean counts.
      total: bits to give away; those beyond 8 a coordinate are not.

    Returns:
      Bits from 0 to 8 of each coordinate, descending.
    """
    logs = np.log(np.asarray(variances, np.float64) + 1e-30)
    variances = np.exp(logs.reshape(-1, logs.shape[-1]).mean(axis=0))
    if total < 0:
        raise ValueError(f"expected bits to give away, got {total}")
    errors = np.array([1.0, *map(codebooks.distortion, range(1, MAX_BITS + 1))])
    gains = variances[:, None] * -np.diff(errors)  # falls with each bit of a coordinate
    chosen = np.zeros(gains.size, int)
    chosen[np.argsort(-gains, axis=None, kind="stable")[:total]] = 1
    return tuple(sorted(chosen.reshape(gains.shape).sum(axis=1).tolist(), reverse=True))


def least_loss(
    costs: Float[np.ndarray, "items choices"], losses: Float[np.ndarray, "items choices"], budget: float | int
) -> Int[np.ndarray, "items"]:
    """Picks a choice for each item, so that losses add up to little and costs to at most `budget`.

    Each step goes where it takes off most of the loss for its cost, along the convex hull of an item's choices. The
    result is exact but for what is left of the budget when the next step does not fit (Everett, 1963; Shoham & Gersho,
    1988).

    Args:
      costs: ascending.
      losses: losses of the choices.
      budget: at least the sum of the first costs.
    """
    steps = []
    for item, (cost, loss) in enumerate(zip(costs, losses, strict=True)):
        at = 0
        while at + 1 < len(cost):
            gains = (loss[at] - loss[at + 1 :]) / (cost[at + 1 :] - cost[at])
            to = at + 1 + int(np.argmax(gains))
            if gains.max() <= 0:
                break
            steps.append((-gains.max(), item, at, to))
            at = to
    chosen, left = np.zeros(len(costs), int), budget - costs[:, 0].sum()
    for _, item, at, to in sorted(steps):
        extra = costs[item, to] - costs[item, at]
        if chosen[item] == at and extra <= left + 1e-9:
            chosen[item], left = to, left - extra
    return chosen
