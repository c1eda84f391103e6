"""Key forms: how keys are transformed before they are encoded, and how products with codes become scores."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from rqjax.core import as_array, pytree, static
from rqjax.rotations import Rope

DOMINANT = 0.75
"""Share of the energy of a head's first keys that their mean must have to be subtracted from all keys.

Below it the mean of keys with rotary positions is local: it turns away, and subtracting it would add energy."""


class KeyForm:
    """Transform of keys before they are encoded (a mean, a rope), and how scores undo it.

    A strategy's form has no rope, and its mean is (heads, d). `begun` makes a cache's form from it, with a mean (batch,
    heads, d). Subclasses define `encode_form` and override what else their transform changes.
    """

    mean: Any = None
    rope: Rope | None = None
    """Rope by which a cache rotates keys and queries to their positions; None if they come rotated, or have no such
    positions."""
    learned: bool = False
    """True if the mean is that of a sequence's first keys after the sinks, False if it is known from the beginning."""
    of_mean: ClassVar[bool] = False
    """True if the form needs a mean."""
    of_rope: ClassVar[bool] = False
    """True if the form needs a rope."""
    turns_late: ClassVar[bool] = False
    """True if codes are of keys before they turn, so that attention decodes and turns them."""

    def __post_init__(self):
        if self.of_mean and self.mean is None and not self.learned:
            raise ValueError(f"expected {type(self).__name__} with a mean, or learned=True")

    def __repr__(self) -> str:
        means = "learned" if self.learned else "" if self.mean is None else f"mean{list(self.mean.shape)}"
        return f"{type(self).__name__}({', '.join(filter(None, [means, repr(self.rope) if self.rope else '']))})"

    @property
    def dim(self) -> int | None:
        return None if self.mean is None else self.mean.shape[-1]

    def at(self, rope: Rope | None) -> "KeyForm":
        """Returns the form with the rope of a layer if it needs one, else as it is."""
        return self.changed(rope=rope) if self.of_rope and rope else self

    def changed(self, **fields: Any) -> "KeyForm":
        """Returns the form with other fields."""
        return dataclasses.replace(self, **fields)  # pyright: ignore[reportArgumentType]

    def begun(self, batch: int, heads: int, dim: int) -> "KeyForm":
        """Returns the form of an empty cache.

        Raises:
          TypeError: the mean is not of floating-point numbers, or the rope is none.
          ValueError: the mean has another shape or is to be learned as well, or the rope does not fit or is missing.
        """
        if self.of_rope and self.rope is None:
            raise ValueError(f"expected a rope for keys in the form {self}, got none")
        if self.rope is not None:
            if not isinstance(self.rope, Rope):
                raise TypeError(f"expected rope to be a rqjax.Rope, got {self.rope!r}")
            self.rope.turning(dim)
        if self.learned and self.mean is not None:
            raise ValueError(f"expected a mean or learned=True, not both, got {self}")
        if self.mean is None and not self.learned:
            return self
        mean = jnp.zeros((heads, dim)) if self.learned else jnp.asarray(as_array(self.mean))
        if mean.shape != (heads, dim):
            raise ValueError(f"expected a mean ({heads}, {dim}) of the keys, got {mean.shape}")
        if not jnp.issubdtype(mean.dtype, jnp.floating):
            raise TypeError(f"expected a mean of floating-point numbers, got {mean.dtype}")
        return self.changed(mean=jnp.tile(mean.astype(jnp.float32), (batch, 1, 1)))

    def turned(self, x: Float[Array, "*n d"], positions: Int[Array, "*#n"]) -> Float[Array, "*n d"]:
        """Rotates keys or queries to their positions, as attention multiplies them."""
        return x if self.rope is None else self.rope(x, positions)

    def average(self, keys: Float[Array, "*b t d"], positions: Int[Array, "*#b t"]) -> Float[Array, "*b d"]:
        """Mean of rotated keys in the form in which it is subtracted. Keys with NaN or infinity do not count, since it
        outlives them."""
        return _average(keys, keys)

    def learn(self, keys: Float[Array, "*b t d"], positions: Int[Array, "*#b t"]) -> Float[Array, "*b d"]:
        """Learns the mean that a sequence subtracts from all its keys, from its first ones."""
        return self.average(keys, positions)

    def encode_form(self, keys: Float[Array, "*b t d"], positions: Int[Array, "*#b t"]) -> Float[Array, "*b t d"]:
        """Transforms rotated keys to the vectors that are encoded."""
        raise NotImplementedError

    def change(self, x: Float[Array, "*n d"], positions: Int[Array, "*#n"]) -> Float[Array, "*n d"]:
        """Converts a change x of encoded vectors to the change of the rotated keys."""
        return x

    def probes(self, y: Float[Array, "b h r d"]) -> Float[Array, "b h _ d"]:
        """Vectors whose products with codes `scores` needs."""
        return y

    def scores(
        self, y: Float[Array, "b h r d"], products: Float[Array, "b h _ t"], first: Int[Array, ""]
    ) -> Float[Array, "b h r t"]:
        """Scores of rotated queries with keys from position `first` on, from products of `probes` with codes."""
        bias = self.bias(y, first, products.shape[-1])
        return products if bias is None else products + bias

    def bias(self, y: Float[Array, "b h r d"], first: Int[Array, ""], count: int) -> Float[Array, "b h r _"] | None:
        """Products of rotated queries with the mean: one, or `count` from position `first` on if the mean rotates."""
        return None if self.mean is None or self.rope is None else self.rope.inner(y, self.mean, first, count)


@pytree
class AsGiven(KeyForm):
    """Encodes keys as attention multiplies them.

    Example:
      >>> import rqjax
      >>> rqjax.AsGiven(rope=rqjax.Rope(1e4)).turns_late
      False
    """

    rope: Rope | None = dataclasses.field(default=None, kw_only=True)

    def encode_form(self, keys: Float[Array, "*b t d"], positions: Int[Array, "*#b t"]) -> Float[Array, "*b t d"]:
        return keys


AS_GIVEN = AsGiven()


@pytree
class SubtractedMean(KeyForm):
    """Encodes keys minus their mean; a learned one is subtracted where it dominates (`DOMINANT`).

    Example:
      >>> import jax, rqjax
      >>> rqjax.strategy("eden_4+centered", jax.random.key(0), dim=64).key_form
      SubtractedMean(learned)
    """

    mean: Any = None
    learned: bool = static(default=False, kw_only=True)
    of_mean = True

    def learn(self, keys: Float[Array, "*b t d"], positions: Int[Array, "*#b t"]) -> Float[Array, "*b d"]:
        mean, energy = self.average(keys, positions), _average(keys**2, keys)
        share = jnp.sum(mean**2, axis=-1) / jnp.maximum(jnp.sum(energy, axis=-1), 1e-30)
        return jnp.where((share > DOMINANT)[..., None], mean, 0)

    def encode_form(self, keys: Float[Array, "*b t d"], positions: Int[Array, "*#b t"]) -> Float[Array, "*b t d"]:
        return keys - self.mean[..., None, :]

    def bias(self, y: Float[Array, "b h r d"], first: Int[Array, ""], count: int) -> Float[Array, "b h r _"] | None:
        return jnp.einsum("bhrd,bhd->bhr", y, self.mean, precision=lax.Precision.HIGHEST)[..., None]


@pytree
class TurnedMean(KeyForm):
    """Encodes rotated keys minus the mean of the keys before rotation, itself rotated to each position.

    Example:
      >>> import jax, rqjax
      >>> strategy = rqjax.strategy("eden_4+turned", jax.random.key(0), dim=64)
      >>> strategy.cache(1, 2, 512, rope=rqjax.Rope(1e4)).key_form.mean.shape
      (1, 2, 64)
    """

    mean: Any = None
    rope: Any = dataclasses.field(default=None, kw_only=True)
    learned: bool = static(default=False, kw_only=True)
    of_mean = of_rope = True

    def average(self, keys: Float[Array, "*b t d"], positions: Int[Array, "*#b t"]) -> Float[Array, "*b d"]:
        return super().average(self.rope.inverse(keys, positions), positions)

    def encode_form(self, keys: Float[Array, "*b t d"], positions: Int[Array, "*#b t"]) -> Float[Array, "*b t d"]:
        return keys - self.rope(jnp.broadcast_to(self.mean[..., None, :], keys.shape), positions)


@pytree
class BeforeRope(TurnedMean):
    """Encodes keys before their rotation, minus their mean if there is one. Attention decodes and rotates a block.

    Source: KVQuant (Hooper et al., 2024, arXiv:2401.18079).

    Example:
      >>> import rqjax
      >>> rqjax.BeforeRope(rope=rqjax.Rope(1e4)).turns_late
      True
    """

    of_mean, turns_late = False, True

    def encode_form(self, keys: Float[Array, "*b t d"], positions: Int[Array, "*#b t"]) -> Float[Array, "*b t d"]:
        keys = self.rope.inverse(keys, positions)
        return keys if self.mean is None else keys - self.mean[..., None, :]

    def change(self, x: Float[Array, "*n d"], positions: Int[Array, "*#n"]) -> Float[Array, "*n d"]:
        return self.rope(x, positions)

    def probes(self, y: Float[Array, "b h r d"]) -> Float[Array, "b h _ d"]:
        """Unit vectors: their products with codes are the keys, tokens last."""
        batch, heads, _, dim = y.shape
        return jnp.broadcast_to(jnp.eye(dim), (batch, heads, dim, dim))

    def scores(
        self, y: Float[Array, "b h r d"], products: Float[Array, "b h _ t"], first: Int[Array, ""]
    ) -> Float[Array, "b h r t"]:
        keys = self.rope.turned_rows(products, first)
        return super().scores(y, jnp.einsum("bhrd,bhdt->bhrt", y, keys, precision=lax.Precision.HIGHEST), first)


def _average(x: Float[Array, "*b t d"], keys: Float[Array, "*b t d"]) -> Float[Array, "*b d"]:
    """Mean of x over the tokens whose keys are finite."""
    finite = jnp.isfinite(keys).all(-1, keepdims=True)
    return jnp.where(finite, x, 0).sum(-2) / jnp.maximum(finite.sum(-2), 1)


def check_form(form: Any) -> None:
    """Raises a TypeError for what is no key form."""
    if not isinstance(form, KeyForm):
        raise TypeError(
            f"expected key_form to be a form such as rqjax.BeforeRope(rope=rope), got {type(form).__name__}"
        )
