"""Strategies of caches by name: the quantizers of keys and values, and the form of keys."""

import re
from collections.abc import Callable, Sequence

import jax.numpy as jnp

from rqjax.cache.key_forms import AS_GIVEN, BeforeRope, KeyForm, SubtractedMean, TurnedMean
from rqjax.cache.kv import LastPart
from rqjax.cache.strategy import Strategy
from rqjax.core import ELSEWHERE, Key, Quantizer, check_int, random, unknown_name
from rqjax.quantizers.affine import Affine, MinMax
from rqjax.quantizers.balanced import Balanced
from rqjax.quantizers.combinators import Residual, Rotated, Split
from rqjax.quantizers.exact import Exact
from rqjax.quantizers.formats import FORMATS, Formats
from rqjax.quantizers.per_channel import PerChannel
from rqjax.recipes import methods
from rqjax.recipes.fitted import FITTED
from rqjax.recipes.sketches import Sign
from rqjax.rotations import Hadamard

KIVI_GROUP = 32
"""Numbers that share a scale, as in KIVI's paper."""
KVARN_TILE = 128
"""Tokens that share scales of channels, as in KVarN's paper."""


def _v2_rotated_qjl(key: Key, dim: int, sketch: Callable[[Key, int], Quantizer]) -> Strategy:
    """V2 with QJL, which corrects scores; the values do without."""
    first, second = random.split(key)
    values = methods.affine_rotated(first, dim, 3)
    return Strategy(Residual(values, sketch(second, dim)), values)


def _kivi(dim: int, bits: int) -> Strategy:
    """KIVI: groups of 32 numbers, of a key's channel along time, of a value's channels."""
    keys = PerChannel(MinMax(KIVI_GROUP, bits, group_size=KIVI_GROUP, dtype="float16"), dim=dim)
    return Strategy(keys, MinMax(dim, bits, group_size=KIVI_GROUP, dtype="float16"))


def _kvarn(dim: int, bits: int) -> Strategy:
    """KVarN: after a Hadamard rotation without signs, a grid for each channel in a tile of keys, for each token of
    values."""
    rotation = Hadamard(jnp.ones(dim, jnp.int8))
    keys = PerChannel(MinMax(KVARN_TILE, bits, group_size=KVARN_TILE, dtype="float16"), dim=dim)
    values = MinMax(dim, bits, group_size=dim, dtype="float16")
    return Strategy(
        Rotated(rotation, Balanced(keys, tile=KVARN_TILE)),
        Rotated(rotation, Balanced(values, tile=KVARN_TILE)),
    )


def _same(quantizer: Quantizer) -> Strategy:
    return Strategy(quantizer, quantizer)


STRATEGIES: dict[str, Callable[[Key, int], Strategy]] = {
    "float32": lambda key, dim: _same(Exact(dim, "float32")),
    "bfloat16": lambda key, dim: _same(Exact(dim, "bfloat16")),
    "float8": lambda key, dim: _same(Exact(dim, "float8_e4m3fn")),
    **{name: (lambda key, dim, name=name: _same(Formats(dim, name))) for name in FORMATS},
    "hadamard_int4": lambda key, dim: _same(Rotated(Hadamard.random(key, dim), Affine(dim, 4, group_size=dim))),
    **{f"kivi_{b}": (lambda key, dim, b=b: _kivi(dim, b)) for b in (2, 4)},
    **{f"kvarn_{b}": (lambda key, dim, b=b: _kvarn(dim, b)) for b in (2, 3, 4)},
    "v2_lean": lambda key, dim: _same(methods.affine(key, dim, 4)),
    "v2_rotated": lambda key, dim: _same(methods.affine_rotated(key, dim, 4)),
    "v2_rotated_qjl": lambda key, dim: _v2_rotated_qjl(key, dim, Sign.gaussian),
    "v2_rotated_qjl_orthogonal": lambda key, dim: _v2_rotated_qjl(key, dim, Sign.orthogonal),
    **{
        f"v3_{b:g}": (lambda key, dim, b=b: _same(methods.turboquant_mixed(key, dim, b)))
        for b in (2, 2.5, 2.75, 3, 3.25, 3.5, 4)
    },
}
"""Strategies by name: no quantization; number formats (`Formats`); KIVI (Liu et al., 2024, arXiv:2402.02750); KVarN
(Muller et al., 2026, arXiv:2606.03458); whole numbers of 4 bits after a Hadamard rotation, one grid a token (SAW-INT4,
arXiv:2604.19157); TurboQuant MLX's strategies by their names there (V2: affine groups of 64; V3: Lloyd-Max), and QJL
with an orthogonal sketch in the place of the Gaussian one. KVarN's k4v2_g128 is `kvarn_4/kvarn_2`; its sinks and tail
are the cache's."""

ELSEWHERE["is a strategy of caches: rqjax.strategy"] = STRATEGIES


FORMS: dict[frozenset[str], KeyForm] = {
    frozenset(): AS_GIVEN,
    frozenset({"centered"}): SubtractedMean(learned=True),
    frozenset({"turned"}): TurnedMean(learned=True),
    frozenset({"pre_rope"}): BeforeRope(),
    frozenset({"centered", "pre_rope"}): BeforeRope(learned=True),
}
"""Key forms by the options of a name, each behind a "+" there."""


def strategy(name: str, key: Key, dim: int, *, latent: int | None = None) -> Strategy:
    """Makes the strategy of a name, for heads of `dim` dimensions.

    A name is one of `STRATEGIES`, or an entry of `METHODS`, with `_<bits>` behind it for other than 4 bits
    ("rotorquant_3"). "a/b" takes the keys of a and the values of b. Options follow: "+centered" subtracts the mean key.
    For layers with rotary positions, whose caches then take keys before their rotation, there are more. "+turned"
    subtracts the mean of these keys, rotated to each position. "+pre_rope" encodes these keys, and "+centered+pre_rope"
    encodes them without their mean.

    Args:
      name: name of the strategy.
      key: random key.
      dim: dimensions of a key.
      latent: how many of them, the last, are a latent that is the value, too (multi-head latent attention). It is in
        codes as values are ("b"); what comes before it turns with the positions and is in codes as keys are ("a").

    Raises:
      UnknownName: there is no such strategy; the nearest names are given.
      ValueError: options contradict each other.

    Example:
      >>> import jax, jax.numpy as jnp, rqjax
      >>> rqjax.strategy("eden_4/v3_2+centered", jax.random.key(0), dim=64).key_form
      SubtractedMean(learned)
    """
    names, form = parsed(name)
    if latent is not None:
        latent = check_int("latent", latent, 1, dim - 1)
        values = named(names[-1], key, latent).values
        assert isinstance(values, Quantizer)
        return Strategy(Split((named(names[0], key, dim - latent).keys, values)), LastPart(), form, name)
    parts = [named(part, key, dim) for part in names]
    return Strategy(parts[0].keys, parts[-1].values, form, name)


def for_layers(
    names: str | Sequence[str | Strategy], key: Key, layers: int, dim: int, latent: int | None = None
) -> list[Strategy]:
    """Makes a strategy for each layer of a model: from a name, each with a random rotation of its own, or as they are
    given.

    Raises:
      ValueError: there are not as many as layers.
    """
    if not isinstance(names, str) and len(names) != layers:
        raise ValueError(f"expected {layers} strategies, one a layer, got {len(names)}")
    each = [names] * layers if isinstance(names, str) else names
    keys = [random.fold_in(key, i) for i in range(layers)]
    return [strategy(n, k, dim, latent=latent) if isinstance(n, str) else n for n, k in zip(each, keys, strict=True)]


def parsed(name: str) -> tuple[list[str], KeyForm]:
    """Parses a name into the names of keys and values, one if it is the same, and the form of keys."""
    base, *options = name.split("+")
    known = sorted(frozenset.union(*FORMS))
    for option in options:
        if option not in known:
            raise unknown_name(f"option of the strategy {base!r}", option, known)
    names, form = base.split("/"), FORMS.get(frozenset(options))
    if len(names) > 2:
        raise ValueError(f"expected a strategy, or one for keys and one for values with '/' between, got {name!r}")
    if form is None:
        forms = ", ".join("".join(f"+{option}" for option in sorted(one)) for one in FORMS if one)
        raise ValueError(f"expected one of {forms} behind {base!r}, got {name.removeprefix(base)}")
    return names, form


def checked(name: str) -> tuple[list[str], KeyForm]:
    """Parses a name as `parsed` does, of a strategy whose recipes may learn.

    Raises:
      UnknownName: there is no such strategy or recipe; the nearest names are given.
    """
    names, form = parsed(name)
    known = [*STRATEGIES, *methods.METHODS, *FITTED]
    for part in names:
        if part not in known and with_bits(part)[0] not in known:
            raise unknown_name("strategy", part, known)
    return names, form


def named(name: str, key: Key, dim: int) -> Strategy:
    """Makes the strategy of a name without options."""
    if name in STRATEGIES:
        return STRATEGIES[name](key, dim)
    method, bits = with_bits(name)
    if method not in methods.METHODS:
        raise unknown_name("strategy", name, [*STRATEGIES, *methods.METHODS])
    return _same(methods.METHODS[method](key, dim, bits))


def with_bits(name: str) -> tuple[str, float | int]:
    """Splits a name like "eden_3" into the recipe and its bits; "eden" has 4. The recipe is "" if the name is of
    another form."""
    match = re.fullmatch(r"(\w+?)(?:_(\d+(?:\.\d+)?))?", name)
    if match is None:
        return "", 4
    bits = float(match[2] or 4)
    return match[1], int(bits) if bits == int(bits) else bits
