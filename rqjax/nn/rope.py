"""Rotary position embedding (Su et al., 2021) with the frequency scalings of Llama 3 and Gemma 3."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

KINDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""The scalings, and the fields of `config.json` that each needs."""


@dataclasses.dataclass(frozen=True)
class Rope:
    """Coordinates i and i + d/2 turn by position * theta^(-2i/d) times a scaling."""

    theta: float
    kind: str = "default"
    factors: tuple[float, ...] = ()
    """Values of the fields in `KINDS`."""

    @classmethod
    def parse(cls, theta: float, scaling: Mapping[str, Any] | None) -> "Rope":
        """From `rope_theta` and `rope_scaling` of a Hugging Face config.

        Raises:
          ValueError: an unknown scaling, or one of its fields is missing.
        """
        scaling = scaling or {}
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind not in KINDS:
            raise ValueError(f"unsupported rope_type {kind!r} in config.json; supported: {', '.join(KINDS)}")
        missing = [name for name in KINDS[kind] if name not in scaling]
        if missing:
            raise ValueError(f"config.json has no {missing[0]!r} for its rope_type {kind!r}")
        return cls(float(theta), kind, tuple(float(scaling[name]) for name in KINDS[kind]))

    def frequencies(self, dim: int) -> Float[np.ndarray, "half"]:
        """Radians a token, for each of the dim / 2 planes."""
        frequencies = self.theta ** -(np.arange(0, dim, 2) / dim)
        if self.kind == "linear":
            frequencies /= self.factors[0]
        if self.kind == "llama3":  # long waves are slowed down, short ones are kept, those between are mixed
            factor, low, high, length = self.factors
            waves = length * frequencies / (2 * math.pi)  # in a context of the original length
            kept = np.clip((waves - low) / (high - low), 0, 1)
            frequencies *= kept + (1 - kept) / factor
        return frequencies.astype(np.float32)

    def __call__(
        self, x: Float[Array, "batch time heads dim"], positions: Int[Array, "batch time"]
    ) -> Float[Array, "batch time heads dim"]:
        """Turns x by its positions; computed in float32, in the dtype of x."""
        angles = positions[:, :, None, None].astype(jnp.float32) * self.frequencies(x.shape[-1])
        cos, sin = jnp.cos(angles), jnp.sin(angles)
        left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1).astype(x.dtype)
