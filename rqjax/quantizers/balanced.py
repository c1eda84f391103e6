"""Scales along time and along channels, found in turn."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from rqjax.arrays.planes import as_float32
from rqjax.core import Codes, Quantizer, Vectors, check_vectors, pytree, static
from rqjax.core.products import rounded_to
from rqjax.quantizers.per_channel import PerChannel, tiles_of

ROUNDS = 16
DEVIATIONS = 1e-3, 1e3
"""Limits of the deviations of columns and rows in a round."""
LOGARITHMS = -0.3, 10
"""Limits of the logarithms of scales."""


@pytree
class Balanced(Quantizer):
    """Divides tiles of tokens by scales after which channels and tokens have like deviations (KVarN). Codes: (scales
    float16 (*n, tiles, tile or d), codes of `inner`, (*n, tiles) of tiles).

    If `inner` is `PerChannel`, its grids hold the scales of channels, and those of tokens are stored. Otherwise its
    grids hold the scales of tokens, and those of channels are stored. Each of `ROUNDS` rounds adds the logarithms of
    the deviations of columns, then of rows, to the logarithms of scales; the least uneven ones are kept. Source: KVarN
    (Muller et al., 2026, arXiv:2606.03458) as in its implementations (huawei-csl/KVarN; vllm-project/vllm#46812,
    `kvarn/sinkhorn.py`).

    Example:
      >>> import jax, jax.numpy as jnp, rqjax
      >>> q = rqjax.Balanced(rqjax.MinMax(dim=64, bits=2, group_size=64), tile=128)
      >>> (q.decode(q.encode(jnp.ones((256, 64)))).shape, q.bits_per_vector)
      ((256, 64), 168)
    """

    inner: Quantizer
    tile: int = static(kw_only=True)

    def __post_init__(self):
        if self.tile < 1 or self.tile % self.inner.tile:
            raise ValueError(f"expected tiles of a multiple of {self.inner.tile} tokens, got {self.tile}")

    @property
    def dim(self) -> int:
        return self.inner.dim

    @property
    def of_tokens(self) -> bool:
        """True if the stored scales are those of tokens."""
        return isinstance(self.inner, PerChannel)

    def encode(self, x: Vectors) -> Codes:
        tiles = as_float32(tiles_of(check_vectors(x, self.dim), self.tile))
        scales = column_scales(jnp.swapaxes(tiles, -2, -1) if self.of_tokens else tiles)
        return rounded_to(scales, "float16"), self.inner.encode(tiles / self._along(scales))

    def decode(self, codes: Codes) -> Float[Array, "*n t d"]:
        scales, inner = codes
        tiles = self.inner.decode(inner) * self._along(as_float32(scales))
        return tiles.reshape(*tiles.shape[:-3], -1, self.dim)

    def _along(self, scales: Float[Array, "*n k"]) -> Float[Array, "*n _ _"]:
        return scales[..., None] if self.of_tokens else scales[..., None, :]


def column_scales(x: Float[Array, "*n rows columns"]) -> Float[Array, "*n columns"]:
    """Scales of the columns that, with scales of the rows, even out the deviations of both."""

    def deviation(x: Array, axis: int) -> Array:
        return jnp.std(x, axis, ddof=1, keepdims=True)

    def divided(columns: Array, rows: Array) -> Array:
        return x / jnp.exp(columns) / jnp.exp(rows)

    def stepped(logarithms: Array, deviations: Array) -> Array:
        return jnp.clip(logarithms + jnp.log(jnp.clip(deviations, *DEVIATIONS)), *LOGARITHMS)

    def unevenness(y: Array) -> Float[Array, "*n 1 1"]:
        def spread(s: Array) -> Array:
            return s.max((-2, -1), keepdims=True) / jnp.maximum(s.min((-2, -1), keepdims=True), 1e-8)

        return spread(deviation(y, -2)) + spread(deviation(y, -1))

    def step(_: Array, state: tuple[Array, ...]) -> tuple[Array, ...]:
        columns, rows, best, least = state
        columns = stepped(columns, deviation(divided(columns, rows), -2))
        rows = stepped(rows, deviation(divided(columns, rows), -1))
        found = unevenness(divided(columns, rows))
        return columns, rows, jnp.where(found <= least, columns, best), jnp.minimum(found, least)

    columns, rows = jnp.zeros_like(x[..., :1, :]), jnp.zeros_like(x[..., :1])
    best = lax.fori_loop(0, ROUNDS, step, (columns, rows, columns, unevenness(x)))[2]
    return jnp.exp(best[..., 0, :])
