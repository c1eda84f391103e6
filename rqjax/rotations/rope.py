"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) with the frequency scalings of published models."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from rqjax.arrays.planes import materialized
from rqjax.core.checks import check_positive
from rqjax.core.pytree import CLASSES, exportable
from rqjax.core.registry import unknown_name

YARN = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor")
KINDS = {
    "default": (),
    "none": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": YARN,
    "yarn_untruncated": YARN,
    "longrope": ("short_factor", "long_factor", "factor", "original_max_position_embeddings", "attention_factor"),
}
"""The scalings, and the fields of `config.json` that each has."""
UNNAMED = {"none", "yarn_untruncated"}
"""Kinds that no `rope_type` names."""
BY_LENGTH = ["dynamic"]
"""Scalings that rotate keys anew as a text grows, which is impossible for keys in a cache."""
DEFAULTS: dict[str, float | None] = {"beta_fast": 32.0, "beta_slow": 1.0, "attention_factor": None}
"""Defaults of fields that may be missing."""


Vectors: TypeAlias = Shaped[Array | np.ndarray, "*n d"]
Positions: TypeAlias = Int[Array | np.ndarray, "*#n"]
SPAN = 128
"""Positions of one table of cosines, which is rotated by where a span of them begins."""
TERMS = 9
"""Polynomials for planes that turn slowly: the error is below 1e-8."""


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary positions: of the first r coordinates, i and i + r/2 turn by position * theta^(-2i/r) times a scaling.

    Example:
      >>> import jax.numpy as jnp, rqjax
      >>> rope = rqjax.Rope(theta=10_000.0)
      >>> x = jnp.ones((5, 64))
      >>> turned = rope(x, jnp.arange(5))
      >>> bool(jnp.allclose(rope.inverse(turned, jnp.arange(5)), x, atol=1e-6))
      True
    """

    theta: float | int
    kind: str = "default"
    factors: tuple[float, ...] = ()
    """Values of the fields in `KINDS`; of "longrope" a divisor for each plane and a factor of the coordinates that
    turn."""
    share: float = 1.0
    """Share of the coordinates that turn, r / d (`partial_rotary_factor`)."""

    def __post_init__(self):
        if not self.theta > 0:
            raise ValueError(f"expected theta to be positive, got {self.theta}")
        if self.kind not in KINDS:
            raise unknown_name("kind of rope", self.kind, KINDS)
        if self.kind != "longrope" and len(self.factors) != len(KINDS[self.kind]):
            raise ValueError(f"expected factors {KINDS[self.kind]} of a rope of kind {self.kind!r}, got {self.factors}")

    @classmethod
    def parse(
        cls, theta: float | int, scaling: Mapping[str, Any] | None, share: float | int = 1.0, *, long: bool = True
    ) -> "Rope":
        """Makes a rope from `rope_theta`, `rope_scaling` and `partial_rotary_factor` of a Hugging Face config.

        LongRoPE (Ding et al., 2024, arXiv:2402.13753) has other frequencies for texts that are `long`, beyond the
        original length, than for short ones. Keys in a cache do not turn again, so one of the two has to be chosen
        beforehand.

        Raises:
          ValueError: an unknown scaling, or one of its fields is missing.
        """
        scaling = scaling or {}
        theta, share = float(theta), float(share)
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        named = [name for name in KINDS if name not in UNNAMED]
        if kind not in named:
            reason = " (its frequencies depend on how long the text is)" if kind in BY_LENGTH else ""
            raise ValueError(f"unsupported rope_type {kind!r} in config.json{reason}; supported: {', '.join(named)}")
        fields = {**DEFAULTS, **{name: value for name, value in scaling.items() if value or name not in DEFAULTS}}
        missing = [name for name in KINDS[kind] if fields.get(name) is None and name not in DEFAULTS]
        if missing:
            raise ValueError(f"config.json has no {missing[0]!r} for its rope_type {kind!r}")
        given = {*KINDS[kind], "mscale", "mscale_all_dim"} - {"short_factor", "long_factor"}
        fields |= {name: check_positive(name, fields[name]) for name in given if fields.get(name)}
        if kind == "longrope":
            factor, length, longer = (fields[name] for name in KINDS[kind][2:])
            if longer is None:
                longer = math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 else 1.0
            name = "long_factor" if long else "short_factor"
            if not isinstance(fields[name], Sequence):
                raise ValueError(f"expected {name} to be a list of numbers, got {fields[name]!r}")
            return cls(theta, kind, (*(check_positive(name, divisor) for divisor in fields[name]), longer), share)
        if kind == "yarn" and not fields.get("truncate", True):
            kind = "yarn_untruncated"
        if KINDS[kind] == YARN and fields["attention_factor"] is None:
            scale, of_all = fields.get("mscale"), fields.get("mscale_all_dim")
            scale, of_all = (scale, of_all) if scale and of_all else (1, 0)
            fields["attention_factor"] = yarn_length(fields["factor"], scale) / yarn_length(fields["factor"], of_all)
        return cls(theta, kind, tuple(check_positive(name, fields[name]) for name in KINDS[kind]), share)

    def turning(self, dim: int) -> int:
        """Counts how many of `dim` coordinates turn.

        Raises:
          ValueError: no even number of them, or none.
        """
        count = int(dim * self.share + 1e-6)  # 6 of 49 coordinates are less in floating point
        if count < 2 or count % 2 or count > dim:
            raise ValueError(f"expected a rope that turns an even number of {dim} coordinates, got {count}: {self}")
        return count

    def frequencies(self, dim: int) -> Float[np.ndarray, "half"]:
        """Radians a token, for each of the planes that turn."""
        turning = self.turning(dim)
        frequencies = self.theta ** -(np.arange(0, turning, 2) / turning)
        if self.kind == "none":
            frequencies *= 0
        if self.kind == "linear":
            frequencies /= self.factors[0]
        if self.kind == "longrope":
            if len(self.factors) != len(frequencies) + 1:
                raise ValueError(f"expected {len(frequencies)} factors of a longrope, got {len(self.factors) - 1}")
            frequencies /= np.array(self.factors[:-1])
        if self.kind == "llama3":  # long waves are slowed down, short ones are kept, those between are mixed
            factor, low, high, length = self.factors
            waves = length * frequencies / (2 * math.pi)  # in a context of the original length
            kept = np.clip((waves - low) / (high - low), 0, 1) if high > low else waves >= low
            frequencies *= kept + (1 - kept) / factor
        if KINDS[self.kind] == YARN:  # the same by the number of the plane (Peng et al. 2023, arXiv:2309.00071)
            factor, length, fast, slow, _ = self.factors
            by_turns = [math.log(length / (2 * math.pi * turns)) / math.log(self.theta) for turns in (fast, slow)]
            low, high = (turning / 2 * place for place in by_turns)
            if self.kind == "yarn":
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, turning - 1)
            slowed = np.clip((np.arange(turning // 2) - low) / (high - low or 0.001), 0, 1)
            frequencies *= 1 - slowed + slowed / factor
        return frequencies.astype(np.float32)

    @property
    def length(self) -> float:
        """Factor of the coordinates that turn."""
        return self.factors[-1] if "attention_factor" in KINDS[self.kind] else 1.0

    def __call__(self, x: Vectors, positions: Positions) -> Shaped[Array, "*n d"]:
        """Rotates vectors to their positions; computed in float32, in the dtype of x."""
        return self._turned(x, positions, 1, self.length)

    def inverse(self, x: Vectors, positions: Positions) -> Shaped[Array, "*n d"]:
        """Rotates vectors back from their positions."""
        return self._turned(x, positions, -1, 1 / self.length)

    def _turned(self, x: Vectors, positions: Positions, sign: int, length: float) -> Array:
        x, positions = jnp.asarray(x), jnp.asarray(positions)
        angles = positions[..., None].astype(jnp.float32) * (sign * self.frequencies(x.shape[-1]))
        cos, sin = length * jnp.cos(angles), length * jnp.sin(angles)
        (left, right), rest = self._planes(x)
        turned = [left * cos - right * sin, right * cos + left * sin]
        return jnp.concatenate([*(part.astype(x.dtype) for part in turned), *rest], axis=-1)

    def _planes(self, x: Shaped[Array, "*n d"]) -> tuple[list[Array], list[Array]]:
        """Both coordinates of each plane that turns, in float32, and the coordinates that do not turn, if there are."""
        count = self.turning(x.shape[-1])
        rest = [x[..., count:]] if count < x.shape[-1] else []
        return jnp.split(x[..., :count].astype(jnp.float32), 2, axis=-1), rest

    def inner(
        self, y: Float[Array, "*n r d"], x: Float[Array, "*n d"], first: Int[Array, ""] | int, count: int
    ) -> Float[Array, "*n r t"]:
        """Inner products of vectors y with one x that turns by each of `count` positions from `first` on.

        No cosine is computed for each position. y and x make one vector of 2 numbers a plane, which turns by where a
        span of positions begins. Its product with a table of `SPAN` positions, the same for all spans, is the result.
        Planes that turn by no more than 2 radians in a span are `TERMS` polynomials together.

        Args:
          count: a multiple of `SPAN`.
        """
        (y_left, y_right), y_rest = self._planes(y)
        (left, right), rest = self._planes(x[..., None, :])
        a, b = (self.length * part for part in (y_left * left + y_right * right, y_right * left - y_left * right))
        cos, sin = map(materialized, self.begins(x.shape[-1], first, count))
        table, coefficients = self.spans(x.shape[-1])
        fast = cos.shape[-1] - len(coefficients) // 2

        def begun(part: slice) -> Float[Array, "*n r spans planes"]:
            own_a, own_b = (x[..., None, part] for x in (a, b))
            own_cos, own_sin = cos[:, part], sin[:, part]
            return jnp.concatenate([own_a * own_cos + own_b * own_sin, own_b * own_cos - own_a * own_sin], axis=-1)

        slow = jnp.matmul(materialized(begun(slice(fast, None))), coefficients, precision=lax.Precision.HIGHEST)
        both = jnp.concatenate([begun(slice(fast)), slow], axis=-1)
        found = jnp.matmul(both, table, precision=lax.Precision.HIGHEST).reshape(*y.shape[:-1], count)
        return found + sum((y * x).sum(-1, keepdims=True) for y, x in zip(y_rest, rest, strict=True))

    def turned_rows(self, x: Float[Array, "*n d t"], first: Int[Array, ""] | int) -> Float[Array, "*n d t"]:
        """Rotates vectors, with the positions as their last axis, by those from `first` on; t is a multiple of
        `SPAN`."""
        dim, count = x.shape[-2:]
        table = np.split(self._table(dim)[:, None], 2)
        begin = [materialized(x).T[:, :, None] for x in self.begins(dim, first, count)]
        cos = materialized(self.length * (begin[0] * table[0] - begin[1] * table[1]).reshape(-1, count))
        sin = materialized(self.length * (begin[1] * table[0] + begin[0] * table[1]).reshape(-1, count))
        left, right, *rest = jnp.split(materialized(x), [len(cos), 2 * len(cos)], axis=-2)
        return jnp.concatenate([left * cos - right * sin, right * cos + left * sin, *rest], axis=-2)

    def begins(
        self, dim: int, first: Int[Array, ""] | int, count: int
    ) -> tuple[Float[Array, "spans half"], Float[Array, "spans half"]]:
        """Cosines and sines of the positions where spans begin."""
        begins = (first + SPAN * jnp.arange(count // SPAN)).astype(jnp.float32)
        angles = begins[:, None] * self.frequencies(dim)
        return jnp.cos(angles), jnp.sin(angles)

    def _table(self, dim: int) -> Float[np.ndarray, "d span"]:
        """Cosines, then sines, of all planes."""
        angles = self.frequencies(dim).astype(np.float64)[:, None] * np.arange(SPAN)
        return np.concatenate([np.cos(angles), np.sin(angles)]).astype(np.float32)

    def spans(self, dim: int) -> tuple[Float[np.ndarray, "rows span"], Float[np.ndarray, "slow terms"]]:
        """Rows of the fast planes' cosines and sines, then of Chebyshev polynomials; and the coefficients of these for
        the slow planes."""
        table, frequencies = np.split(self._table(dim).astype(np.float64), 2), self.frequencies(dim)
        fast = int(np.sum(frequencies * SPAN > 2))  # they fall
        places = np.linspace(-1, 1, SPAN)
        polynomials = np.polynomial.chebyshev.chebvander(places, TERMS - 1)
        slow = np.concatenate([part[fast:] for part in table])
        coefficients = np.linalg.lstsq(polynomials, slow.T, rcond=None)[0].T
        rows = np.concatenate([*(part[:fast] for part in table), polynomials.T])
        return rows.astype(np.float32), coefficients.astype(np.float32)


exportable(Rope, dataclasses.astuple, lambda fields: Rope(*fields))


def yarn_length(factor: float | int, mscale: float | int) -> float | int:
    """Factor by which YaRN has queries and keys longer in a text that is longer by `factor`."""
    return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1


CLASSES[Rope.__name__] = Rope
