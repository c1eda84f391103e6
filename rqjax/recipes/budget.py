"""Matrices under a memory budget: everything that is stored counts (QET, section 2)."""

import functools
import math
import re
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from rqjax.arrays.planes import as_float32
from rqjax.core import Codes, Key, Quantizer, Registry, as_array, nbytes, operation, random
from rqjax.core.products import rounded_to
from rqjax.quantizers.combinators import Residual
from rqjax.quantizers.exchange import Exchange, exchange
from rqjax.quantizers.product import Product, Rounded
from rqjax.quantizers.uniform import MAX_BITS, Uniform
from rqjax.recipes.opq import fit_lopq, fit_opq

Make: TypeAlias = tuple[Any, ...]
"""A function and its first arguments, hashable. The others are a key, x and a size, centroids or bits, with which the
memory of the quantizer grows."""


class Stage(NamedTuple):
    """A product quantizer after some levels of exchange."""

    levels: int = 0
    share: float = 1.0
    """Share of the budget that the maps of all stages leave."""
    codebook_bits: int | None = None
    """Bits of the numbers of a rounded codebook; None keeps words."""
    width: int = 8
    """Coordinates in a group."""


class Setting(NamedTuple):
    """Stages, each for the residuals of those before it."""

    stages: tuple[Stage, ...]
    most_maps: float = 0.75
    """Share of the budget above which levels of exchange are left out, the last stage's first; 1 keeps all that fit."""

    @classmethod
    def parse(cls, text: str) -> "Setting":
        """Parses a text like "l3w8c10p0.7+w8c10p0.3". Stages give their levels, width, bits of codebooks and share
        where they are not those of `Stage`. "@1" at the end sets `most_maps` to 1.

        Raises:
          ValueError: the text is none of a setting, or its shares are more than 1 together.
        """
        stages, _, most_maps = text.partition("@")
        found = [re.fullmatch(STAGE, stage) for stage in stages.split("+")]
        if not stages or not all(found) or (most_maps and not re.fullmatch(SHARE, most_maps)):
            raise ValueError(f"expected a setting like 'l3w8c10p0.7+w8c10p0.3', got {text!r}")
        kinds: dict[str, Any] = {"levels": int, "width": int, "codebook_bits": int, "share": float}

        def stage(match: Any) -> Stage:
            given = zip(kinds.items(), match.groups(), strict=True)
            return Stage(**{name: kind(value) for (name, kind), value in given if value is not None})

        setting = cls(tuple(map(stage, found)), float(most_maps or cls._field_defaults["most_maps"]))
        if (shares := sum(stage.share for stage in setting.stages)) > 1 + 1e-9:
            raise ValueError(f"expected shares of at most 1 together, got {shares:g} in {text!r}")
        return setting


SHARE = r"[01]?\.\d+|1"
STAGE = rf"(?:l(\d))?(?:w([1-9]\d*))?(?:c([1-9]\d?))?(?:p({SHARE}))?"


def fit_under_budget(
    name: str, key: Key, x: Any, ratio: int | float, *, word_bits: int = 32
) -> tuple[Quantizer, Codes]:
    """Fits the largest quantizer of a method that, with its codes, takes at most n d w / (8 r) bytes.

    Args:
      name: one of `BUDGETED`, or the text of a setting (`Setting.parse`).
      key: random key of k-means and rotations.
      x: a matrix.
      ratio: r, by which the quantizer and its codes are smaller than the matrix in words.
      word_bits: w of a word, 32 or 16. Codebooks, ranges and rotations are stored in floating-point words.

    Returns:
      The quantizer and the codes of x; `nbytes` of both is at most n d w / (8 r).

    Raises:
      UnknownName: there is no such method.
      ValueError: the text is none of a setting, x is no matrix of finite numbers that words hold, d cannot be divided
        as the method needs, or the budget does not hold the least that the method stores.

    Example:
      >>> import jax, jax.numpy as jnp, rqjax
      >>> x = jax.random.normal(jax.random.key(0), (256, 32))
      >>> made = rqjax.fit_under_budget("pq", jax.random.key(1), x, ratio=4)
      >>> rqjax.nbytes(made) <= x.nbytes / 4
      True
    """
    dtype = {32: jnp.float32, 16: jnp.float16}.get(word_bits)
    if dtype is None:
        raise ValueError(f"expected words of 32 or 16 bits, got {word_bits!r}")
    if not ratio > 0:
        raise ValueError(f"expected a ratio above 0, got {ratio!r}")
    x = _check(x, dtype)
    budget = int(x.size * word_bits / (8 * ratio))
    chosen = method(name, word_bits / ratio)
    if isinstance(chosen, Setting):
        return _fit_stages(chosen, key, x, budget, dtype)
    function, most = chosen
    return _fill((_in_words, function, dtype), key, x, budget, most or len(x))


def method(name: str, bits: float) -> Any:
    """Returns an entry of `BUDGETED`, or the setting of a text; `qet_best` by bits for each element."""
    if name == "qet_best":
        return Setting.parse(min(BEST, key=lambda entry: abs(math.log(entry[0] / bits)))[1])
    return Setting.parse(name) if re.match(r"[lwcp]\d", name) else BUDGETED[name]


def _check(x: Any, dtype: DTypeLike) -> Float[Array, "n d"]:
    x = jnp.asarray(as_array(x))
    if x.ndim != 2 or not x.size or not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"expected a matrix (n, d) of floating-point numbers, got {x.dtype} {x.shape}")
    bad = int((~(jnp.abs(as_float32(x)) <= jnp.finfo(dtype).max)).sum())
    if bad:
        raise ValueError(f"expected finite numbers that {jnp.dtype(dtype).name} holds, got {bad} others")
    return x.astype(jnp.float32)


def _fit_stages(
    setting: Setting, key: Key, x: Float[Array, "n d"], budget: int, dtype: DTypeLike
) -> tuple[Quantizer, Codes]:
    stages = list(setting.stages)

    def maps() -> list[int]:
        """Bytes of the maps of each stage."""
        return [len(x) * -(-stage.levels * x.shape[1] // 16) for stage in stages]

    while sum(maps()) > setting.most_maps * budget:
        last = max(i for i, stage in enumerate(stages) if stage.levels)
        stages[last] = stages[last]._replace(levels=stages[last].levels - 1)
    rest, fitted = budget - sum(maps()), []
    for stage, size, stage_key in zip(stages, maps(), random.split(key, len(stages)), strict=True):
        x = x - _decode(*fitted[-1]) if fitted else x
        fitted.append(_fill((_product, stage, dtype), stage_key, x, size + int(stage.share * rest), len(x)))
    return functools.reduce(lambda late, early: (Residual(early[0], late[0]), (early[1], late[1])), reversed(fitted))


def _fill(make: Make, key: Key, x: Float[Array, "n d"], budget: int, most: int) -> tuple[Quantizer, Codes]:
    """Makes the quantizer of the largest size whose arrays and codes fit, and the codes of x."""

    def taken(size: int) -> int:
        return nbytes(jax.eval_shape(functools.partial(_coded, make, size), key, x))

    if taken(1) > budget:
        raise ValueError(f"a budget of {budget} bytes does not hold the {taken(1)} bytes that are the least it takes")
    low, high = 1, most + 1  # low fits, high does not or is too many
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if taken(middle) <= budget else (low, middle)
    return _coded(make, low, key, x)


@operation
def _coded(make: Make, size: int, key: Key, x: Float[Array, "n d"]) -> tuple[Quantizer, Codes]:
    function, *options = make
    quantizer = function(*options, key, x, size)
    return quantizer, quantizer.encode(x)


@operation
def _decode(quantizer: Quantizer, codes: Codes) -> Float[Array, "n d"]:
    return quantizer.decode(codes)


def _product(stage: Stage, dtype: DTypeLike, key: Key, x: Float[Array, "n d"], k: int) -> Exchange | Product:
    if x.shape[1] % (stage.width * 2**stage.levels):
        raise ValueError(
            f"expected groups of {stage.width} coordinates to fill the leaves of {stage.levels} levels of exchange, "
            f"but {stage.width} * 2^{stage.levels} does not divide the dimension {x.shape[1]}"
        )
    y, _ = exchange(x, stage.levels)
    codebooks = rounded_to(Product.fit(key, y, stage.width, k).centroids, dtype)
    product = Product(Rounded.of(codebooks, stage.codebook_bits) if stage.codebook_bits else codebooks)
    return Exchange(product, levels=stage.levels) if stage.levels else product


def _in_words(function: Any, dtype: DTypeLike, key: Key, x: Float[Array, "n d"], size: int) -> Quantizer:
    return jax.tree.map(lambda array: rounded_to(array, dtype), function(key, x, size))


BUDGETED: Registry = Registry(
    "method under a budget",
    {
        "rtn": (lambda key, x, bits: Uniform.symmetric(x, bits), MAX_BITS),
        "pq": Setting.parse("w8"),
        "opq": (lambda key, x, k: fit_opq(key, x, Stage().width, k), None),
        "lopq": (lambda key, x, k: fit_lopq(key, x, Stage().width, k), None),
        "qet_vanilla": Setting.parse("l3"),
        "qet_cqo": Setting.parse("l3c10"),
        "qet_rqo": Setting.parse("l3p0.7+p0.3"),
        "qet": Setting.parse("l3c10p0.7+c10p0.3"),
        "qet_best": None,
    },
)
"""Methods for `fit_under_budget`: settings, or a function that makes a quantizer of some size, with the largest size
(None: n)."""

BEST = (
    (16, "l1w1c12p0.7+l1w1c12p0.3"),
    (32 / 3, "l3w1c14"),
    (8, "l2w1c14"),
    (16 / 3, "w1c10"),
    (4, "l1w1"),
    (3.2, "w1c14"),
    (8 / 3, "l1w1"),
    (16 / 7, "w2c14"),
    (2, "w4c10"),
)
"""Bits for each element of the matrix, and the setting of least error among 61 (two draws of a synthetic matrix)."""
