"""A transform code of several heads together, without training."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from rqjax.arrays import norms
from rqjax.core import Key, Quantizer, operation
from rqjax.quantizers.across_heads import AcrossHeads, GivenKeys, beside
from rqjax.quantizers.per_head import PerHead, stack_heads
from rqjax.quantizers.trellis_per_coordinate import BestGain, TrellisPerCoordinate
from rqjax.recipes.fitted import fitted
from rqjax.recipes.klt import klt_trellis

WIDEST = 256
"""Most coordinates that are transformed together."""
SAMPLES = 8
"""Fewest samples a coordinate from which values are predicted. As many functions explain an eighth of any noise."""
FLOOR = 1e-5
"""Energy added to each coordinate of decoded keys, in parts of the mean: coordinates without bits have none."""


@fitted
def klt_joint(
    key: Key, x: Array, bits: float | int, keys: Array | None = None, key_quantizer: Quantizer | None = None
) -> Quantizer:
    """`klt_trellis` of the vectors that neighboring heads have of a token, side by side: one transform, one scale.

    Keys of different heads depend on one another, and so do values, so that principal axes of all hold more of the
    energy. As many heads are transformed together as divide their number and have at most 256 coordinates. Each vector
    is encoded at its `BestGain`. Keys lose less in codes relative to their mean ("klt_joint_2+centered+pre_rope").

    `Decoder.calibrate` also gives samples of `keys` and their quantizer. If this is of as many heads together, values
    are coded as what the best linear function of decoded keys leaves of them (`GivenKeys`). `keys` are in the form in
    which the cache encodes them, as for `key_quantizer`: with a mean, relative to it.
    """
    stacked, _ = stack_heads(x)
    heads, count, dim = stacked.shape
    group = max(n for n in range(1, heads + 1) if heads % n == 0 and (n == 1 or n * dim <= WIDEST))
    if group == 1:
        return klt_trellis(key, x, bits)
    together, prediction = beside(stacked, group), None
    if (
        keys is not None
        and isinstance(key_quantizer, AcrossHeads)
        and key_quantizer.group == group
        and count >= SAMPLES * group * dim
    ):
        decoded = beside(key_quantizer.decode(key_quantizer.encode(keys)), group)
        prediction, together = _predicted(decoded, together)
    code = _at_best_gain(klt_trellis(key, together[0] if group == heads else together, bits))
    code = AcrossHeads(code, group=group)
    return code if prediction is None else GivenKeys(code, prediction=prediction)


def _at_best_gain(code: Any) -> Quantizer:
    """Returns a transform code with the `BestGain` of each vector, another code as it is."""
    nest: Any = code.inner if isinstance(code, PerHead) else code
    columns = nest.inner.inner
    if not isinstance(columns, TrellisPerCoordinate):
        return code
    best = BestGain(columns.mean, columns.deviation, columns.tables, bits=columns.bits)
    nest = dataclasses.replace(nest, inner=dataclasses.replace(nest.inner, inner=best))
    return PerHead(nest) if isinstance(code, PerHead) else nest


@operation
def _predicted(
    keys: Float[Array, "groups count n"], values: Float[Array, "groups count n"]
) -> tuple[Float[Array, "groups n n"], Float[Array, "groups count n"]]:
    """Returns the matrices that take keys nearest to values, and what is left of these. Errors count relative to each
    value's norm: attention goes to tokens with short values."""
    size = norms.norm(values)
    product = functools.partial(jnp.einsum, "gtn,gtm->gnm", norms.over(keys, size), precision="highest")
    moment = product(norms.over(keys, size))
    floor = FLOOR * jnp.trace(moment, axis1=1, axis2=2)[:, None, None] / moment.shape[1]
    prediction = jnp.linalg.solve(moment + floor * jnp.eye(moment.shape[1]), product(norms.over(values, size)))
    return prediction, values - jnp.matmul(keys, prediction, precision="highest")
