"""Bits for each layer's keys and values, where they take off most of what the decoder loses."""

import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from rqjax.cache.strategy import Strategy
from rqjax.core import Quantizer, Registry, operation
from rqjax.nn.calibration import calibrated, check_tokens, through
from rqjax.recipes.allocation import least_loss
from rqjax.recipes.fitted import FITTED
from rqjax.recipes.methods import METHODS
from rqjax.recipes.strategies import parsed

SIDES = ("keys", "values")
WHOLE, HALVES = (1, 2, 3, 4, 5, 6), (1, 1.5, 2, 2.5, 3, 3.5, 4, 5)
"""Bits that are measured, of recipes that take whole numbers of them, and of those that take fractions."""
TOKENS_AT_A_TIME = 256
"""Whose logits are in memory."""


class Advice(NamedTuple):
    """What each layer is to take."""

    names: list[str]
    """The strategy of each layer, as `Decoder.calibrate` takes them."""
    rates: Float[np.ndarray, "layers 2"]
    """The recipe's bits, of keys and of values."""
    bits: float
    """Stored bits a number, scales included, the mean over keys and values of all layers."""
    kl: Float[np.ndarray, "layers 2"]
    """What they are expected to cost, nats a token; the sum is that of all together."""


class Sensitivities(NamedTuple):
    """What a decoder loses if the keys, or the values, of one layer alone go through codes."""

    family: str
    bits: Float[np.ndarray, "layers 2 rates"]
    """Stored bits a number, scales included, at each of `rates(family)`."""
    kl: Float[np.ndarray, "layers 2 rates"]
    """Divergence of the next token's distribution from the exact one, nats."""

    def under(self, bits: float | int) -> Advice:
        """The least loss at so many stored bits a number: each step goes where it takes off most for a bit.

        Raises:
          ValueError: the least that the family stores is more.
        """
        count, least = self.bits[..., 0].size, self.bits[..., 0].mean()
        if least > bits:
            wanted = f"{least:.4g} bits a number, scales included, the least of {self.family}"
            raise ValueError(f"expected a budget of at least {wanted}, got {bits:.4g}")
        flat = (part.reshape(count, -1) for part in (self.bits, self.kl))
        chosen = least_loss(*flat, bits * count).reshape(*self.bits.shape[:2])  # pyright: ignore[reportCallIssue]
        cost, kl = (np.take_along_axis(part, chosen[..., None], -1)[..., 0] for part in (self.bits, self.kl))
        picked = np.array(rates(self.family))[chosen]
        return Advice([named_at(self.family, *pair) for pair in picked], picked, float(cost.mean()), kl)


def advise(
    decoder: Any,
    tokens: Int[Array | np.ndarray, "n time"],
    key: Array,
    *,
    bits: float | int,
    family: str = "klt_trellis+pre_rope",
) -> list[Strategy]:
    """The strategy of each layer, keys and values apart, that loses least at so many bits.

    What each layer's keys, and values, cost is measured on text, one at a time; these losses add up nearly. Layers
    differ by 5 to 30 times, and four times less is a bit.

    Args:
      decoder: a `Decoder`.
      tokens: text like that which is to come, (n, time); two windows of 1,024 tokens are enough.
      key: random key of the quantizers.
      bits: stored bits a number, scales included, on average over the layers.
      family: a recipe of `METHODS` or `FITTED` without its bits, or "a/b" for keys and values, with options as in
        `rqjax.strategy`.

    Returns:
      What `Decoder.caches` takes, one for each layer.

    Raises:
      UnknownName: there is no such family.
      ValueError: there are fewer tokens than dimensions of a head, the family stores more bits than these, or the
        decoder has latent attention.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from rqjax.nn import advise, load_decoder
      >>> decoder, text = load_decoder("results/models/qwen2-d64"), jnp.arange(64)[None]
      >>> strategies = advise(decoder, text, jax.random.key(0), bits=3.25, family="eden")
      >>> len(decoder.caches(strategies, jax.random.key(0), batch=1, max_len=256))
      4
    """
    advice = sensitivities(decoder, tokens, key, family=family).under(bits)
    return calibrated(decoder, jnp.asarray(tokens), advice.names, key)


def sensitivities(decoder: Any, tokens: Int[Array | np.ndarray, "n time"], key: Array, *, family: str) -> Sensitivities:
    """Measures each layer's keys and values at all `rates`, as in `advise`; one at a time, the rest is exact.

    Only what comes after a layer is run again, and nothing is compiled but a layer, and codes.
    """
    measured = rates(family)
    tokens = jnp.asarray(tokens)
    check_tokens(decoder, tokens)
    if decoder.config.kv_lora_rank:
        raise ValueError("expected a decoder with keys and values apart, got latent attention")
    uniform = [calibrated(decoder, tokens, named_at(family, rate, rate), key) for rate in measured]
    inputs, samples = [decoder.embedded(tokens)], []
    for layer in range(len(decoder.layers)):
        x, found, _ = through(decoder, layer, inputs[-1], uniform[0][layer].key_form)
        inputs.append(x)
        samples.append(found)
    shape = len(samples), len(SIDES), len(measured)
    bits, kl = np.zeros(shape), np.zeros(shape)
    for layer, side, rate in np.ndindex(shape):
        strategy, own = uniform[rate][layer], samples[layer]
        part = getattr(strategy, SIDES[side])
        errors = {name: jnp.zeros_like(own[name]) for name in SIDES}
        errors[SIDES[side]] = _error(part, own[SIDES[side]])
        x, *_ = through(decoder, layer, inputs[layer], strategy.key_form, errors=errors)
        for later in range(layer + 1, len(samples)):
            x, *_ = through(decoder, later, x, uniform[rate][later].key_form)
        bits[layer, side, rate] = part.bits_per_vector / part.dim
        kl[layer, side, rate] = _divergence(decoder, inputs[-1], x).mean()
    return Sensitivities(family, bits, kl)


def divergence(
    decoder: Any, tokens: Int[Array | np.ndarray, "n time"], strategies: Sequence[Strategy]
) -> Float[Array, "n time"]:
    """KL of each next token's distribution, nats, if all keys and values go through codes, those of a prompt at once.

    As a cache without a window and sinks has it, whose newest tokens alone are exact; the mean of keys has to be known.
    """
    x = exact = decoder.embedded(jnp.asarray(tokens))
    for layer, strategy in enumerate(strategies):
        form = strategy.key_form
        _, samples, _ = through(decoder, layer, x, form)
        errors = {side: _error(getattr(strategy, side), samples[side]) for side in SIDES}
        x, *_ = through(decoder, layer, x, form, errors=errors)
        exact, *_ = through(decoder, layer, exact, form)
    return _divergence(decoder, exact, x)


def rates(family: str) -> tuple[float | int, ...]:
    """Bits that the recipes of a family take, for keys and for values alike.

    Raises:
      UnknownName: there is no such family.
    """
    families = Registry("family", FITTED | METHODS)
    made = [families[name] for name in parsed(family)[0]]
    return WHOLE if any(inspect.signature(one).parameters["bits"].annotation is int for one in made) else HALVES


def named_at(family: str, keys: float | int, values: float | int) -> str:
    """The strategy of a family with these bits."""
    base, *options = family.split("+")
    recipes = base.split("/")
    return "+".join([f"{recipes[0]}_{keys:g}/{recipes[-1]}_{values:g}", *options])


@operation
def _error(quantizer: Quantizer, x: Float[Array, "heads n d"]) -> Float[Array, "heads n d"]:
    return quantizer.decode(quantizer.encode(x)) - x


@jax.jit
def _divergence(
    decoder: Any, exact: Float[Array, "n time size"], x: Float[Array, "n time size"]
) -> Float[Array, "n time"]:
    """Of what the last layer makes."""

    def one(inputs: tuple[Array, Array]) -> Float[Array, ""]:
        expected, got = (jax.nn.log_softmax(decoder.logits(decoder.norm(part[None, None]))[0, 0]) for part in inputs)
        more = expected - got
        return jnp.sum(jnp.exp(expected) * (more + jnp.expm1(-more)))  # no term below 0, so that rounding adds up less

    n, time, size = x.shape
    rows = exact.reshape(-1, size), x.reshape(-1, size)
    return jax.lax.map(one, rows, batch_size=TOKENS_AT_A_TIME).reshape(n, time)
