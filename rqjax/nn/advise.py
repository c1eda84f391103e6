"""Bits for each layer's keys and values, where they take off most of what the decoder loses."""

import dataclasses
import inspect
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from rqjax.cache.strategy import Strategy
from rqjax.core import Quantizer, Registry, check_int, operation
from rqjax.nn.calibration import calibrated, check_tokens, through
from rqjax.quantizers.across_heads import GivenKeys
from rqjax.recipes.allocation import least_loss
from rqjax.recipes.fitted import FITTED
from rqjax.recipes.methods import METHODS
from rqjax.recipes.strategies import parsed

SIDES = ("keys", "values")
WHOLE, HALVES = (1, 2, 3, 4, 5, 6), (1, 1.5, 2, 2.5, 3, 3.5, 4, 5)
"""Bits to measure: for recipes that take whole numbers, and for recipes that take fractions."""
TOKENS_AT_A_TIME = 256
"""Tokens whose logits are in memory at once."""


class Advice(NamedTuple):
    """Strategies and bits advised for each layer."""

    names: list[str]
    """The strategy of each layer, as `Decoder.calibrate` takes them."""
    rates: Float[np.ndarray, "layers 2"]
    """The recipe's bits, of keys and of values."""
    bits: float
    """Stored bits a number, scales included, the mean over keys and values of the layers that count."""
    kl: Float[np.ndarray, "layers 2"]
    """Expected loss from each, nats a token; the loss from all together is the sum."""


class Sensitivities(NamedTuple):
    """Losses of a decoder if the keys, or the values, of one layer alone go through codes."""

    family: str
    bits: Float[np.ndarray, "layers 2 rates"]
    """Stored bits a number, scales included, at each of `rates(family)`."""
    kl: Float[np.ndarray, "layers 2 rates"]
    """Divergence of the next token's distribution from the exact one, nats."""
    measured: Bool[np.ndarray, "layers"]
    """True for layers that count. Beside layers that see the whole text, those that see a window of tokens keep it in
    full precision, and lose nothing."""

    def under(self, bits: float | int) -> Advice:
        """Returns the advice with the least loss in a budget of stored bits a number.

        Each step of bits goes where it takes off most for a bit.

        Raises:
          ValueError: the family stores more than this at its fewest bits.
        """
        of_bits, of_kl = self.bits[self.measured], self.kl[self.measured]
        count, least = of_bits[..., 0].size, of_bits[..., 0].mean()
        if least > bits:
            wanted = f"{least:.4g} bits a number, scales included, the least of {self.family}"
            raise ValueError(f"expected a budget of at least {wanted}, got {bits:.4g}")
        flat = (part.reshape(count, -1) for part in (of_bits, of_kl))
        chosen = np.full(self.bits.shape[:2], self.bits.shape[2] - 1)
        chosen[self.measured] = least_loss(*flat, bits * count).reshape(-1, 2)  # pyright: ignore[reportCallIssue]
        cost, kl = (np.take_along_axis(part, chosen[..., None], -1)[..., 0] for part in (self.bits, self.kl))
        picked = np.array(rates(self.family))[chosen]
        return Advice([named_at(self.family, *pair) for pair in picked], picked, float(cost[self.measured].mean()), kl)


def advise(
    decoder: Any,
    tokens: Int[Array | np.ndarray, "n time"],
    key: Array,
    *,
    bits: float | int,
    family: str = "klt_trellis+pre_rope",
    window: int = 128,
    sinks: int = 4,
) -> list[Strategy]:
    """Returns the strategy of each layer, keys and values apart, that loses least in a budget of bits.

    The losses from each layer's keys, and from its values, are measured on text, one at a time. They nearly add up.
    They differ by 5 to 30 times between layers, and one more bit makes a loss four times smaller. What a cache keeps in
    full precision is exact here, too: with it in codes the advice would be worse than the same bits everywhere. Where
    some layers see all tokens, those that see a window keep it in full precision. They count in no budget, and have the
    most bits of the family.

    Args:
      decoder: a `Decoder`.
      tokens: text like that which is to come, (n, time); two windows of 1,024 tokens are enough.
      key: random key of the quantizers.
      bits: stored bits a number, scales included, on average over the layers.
      family: a recipe of `METHODS` or `FITTED` without its bits, or "a/b" for keys and values, with options as in
        `rqjax.strategy`.
      window, sinks: as in `Decoder.caches`; the rest of a window of tokens is in codes.

    Returns:
      Strategies for `Decoder.caches`, one for each layer.

    Raises:
      UnknownName: there is no such family.
      ValueError: there are fewer tokens than dimensions of a head, none of them would be in codes, the family stores
        more bits than these, or the decoder has latent attention.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from rqjax.nn import advise, load_decoder
      >>> decoder, text = load_decoder("results/models/qwen2-d64"), jnp.arange(64)[None]
      >>> strategies = advise(decoder, text, jax.random.key(0), bits=3.25, family="eden", window=16)
      >>> len(decoder.caches(strategies, jax.random.key(0), batch=1, max_len=256))
      4
    """
    advice = sensitivities(decoder, tokens, key, family=family, window=window, sinks=sinks).under(bits)
    return calibrated(decoder, jnp.asarray(tokens), advice.names, key)


def sensitivities(
    decoder: Any,
    tokens: Int[Array | np.ndarray, "n time"],
    key: Array,
    *,
    family: str,
    window: int = 128,
    sinks: int = 4,
) -> Sensitivities:
    """Measures the losses from each layer's keys and values at all `rates`, as in `advise`.

    One side of one layer is in codes at a time; the rest is exact. Only later layers are run again, and only a layer
    and the codes are compiled.
    """
    measured = rates(family)
    tokens = jnp.asarray(tokens)
    check_tokens(decoder, tokens)
    if decoder.config.kv_lora_rank:
        raise ValueError("expected a decoder with keys and values apart, got latent attention")
    window, sinks = check_int("window", window, 0, 2**20), check_int("sinks", sinks, 0, 2**20)
    if tokens.shape[1] <= window + sinks:
        raise ValueError(
            f"expected more than {window + sinks} tokens in a row, the window and the sinks, got {tokens.shape[1]}"
        )
    uniform = [calibrated(decoder, tokens, named_at(family, rate, rate), key) for rate in measured]
    inputs, samples = [decoder.embedded(tokens)], []
    for layer in range(len(decoder.layers)):
        x, found, _ = through(decoder, layer, inputs[-1], uniform[0][layer].key_form)
        inputs.append(x)
        samples.append(found)
    exact, shape = decoder.norm(inputs[-1]), (len(samples), len(SIDES), len(measured))
    bits, kl = np.zeros(shape), np.zeros(shape)
    counted = np.array([seen is None or None not in decoder.config.windows for seen in decoder.config.windows])
    for layer, side, rate in np.ndindex(shape):
        if not counted[layer]:
            continue
        strategy, own = uniform[rate][layer], samples[layer]
        part = getattr(strategy, SIDES[side])
        errors = {name: jnp.zeros_like(own[name]) for name in SIDES}
        if isinstance(part, GivenKeys):
            errors["values"] = _error_given_keys(part, strategy.keys, own["keys"], own["values"])
        else:
            errors[SIDES[side]] = _error(part, own[SIDES[side]])
        x, *_ = through(decoder, layer, inputs[layer], strategy.key_form, errors=errors, window=window, sinks=sinks)
        for later in range(layer + 1, len(samples)):
            x, *_ = through(decoder, later, x, uniform[rate][later].key_form)
        bits[layer, side, rate] = part.bits_per_vector / part.dim
        kl[layer, side, rate] = divergence(decoder, exact, decoder.norm(x)).mean()
    return Sensitivities(family, bits, kl, counted)


def rates(family: str) -> tuple[float | int, ...]:
    """Returns the bits that the recipes of a family take, for keys and for values alike.

    Raises:
      UnknownName: there is no such family.
    """
    families = Registry("family", FITTED | METHODS)
    made = [families[name] for name in parsed(family)[0]]
    return WHOLE if any(inspect.signature(one).parameters["bits"].annotation is int for one in made) else HALVES


def named_at(family: str, keys: float | int, values: float | int) -> str:
    """Returns the name of a family's strategy with these bits."""
    base, *options = family.split("+")
    recipes = base.split("/")
    return "+".join([f"{recipes[0]}_{keys:g}/{recipes[-1]}_{values:g}", *options])


@operation
def _error(quantizer: Quantizer, x: Float[Array, "heads n d"]) -> Float[Array, "heads n d"]:
    return quantizer.decode(quantizer.encode(x)) - x


@operation
def _error_given_keys(
    quantizer: GivenKeys, keys: Quantizer, key: Float[Array, "heads n d"], x: Float[Array, "heads n d"]
) -> Float[Array, "heads n d"]:
    quantizer, of_keys = dataclasses.replace(quantizer, keys=keys), keys.encode(key)
    return quantizer.decode((of_keys, quantizer.encode(quantizer.left(x, of_keys)))) - x


@jax.jit
def divergence(
    decoder: Any, exact: Float[Array, "n time size"], x: Float[Array, "n time size"]
) -> Float[Array, "n time"]:
    """Computes the KL divergence of each next token's distribution, in nats.

    Args:
      decoder: the decoder.
      exact: the last layer's output, normalized, (n, time, hidden_size).
      x: the same of other keys and values.
    """

    def one(inputs: tuple[Array, Array]) -> Float[Array, ""]:
        expected, got = (jax.nn.log_softmax(decoder.logits(part[None, None])[0, 0]) for part in inputs)
        more = expected - got
        return jnp.sum(jnp.exp(expected) * (more + jnp.expm1(-more)))  # no term is negative: rounding adds up less

    n, time, size = x.shape
    rows = exact.reshape(-1, size), x.reshape(-1, size)
    return jax.lax.map(one, rows, batch_size=TOKENS_AT_A_TIME).reshape(n, time)
