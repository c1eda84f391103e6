"""The compressed key-value cache: codes of the past, full precision for the newest and the first tokens."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Shaped

from rqjax.arrays.planes import pick, put
from rqjax.cache.key_forms import AS_GIVEN, KeyForm, check_form
from rqjax.core import PAGE, Codes, Quantizer, TokenArray, check_int, nbytes, operation, platforms, pytree, static
from rqjax.core.pytree import derived, with_derived
from rqjax.quantizers.across_heads import GivenKeys
from rqjax.quantizers.combinators import Split
from rqjax.quantizers.exact import Exact
from rqjax.scoring.tiles import UNIT

GROWTH = 256
"""Tokens by which `grow` rounds up (TurboQuant MLX, "Pre-allocation")."""
Tokens: TypeAlias = Shaped[Array | np.ndarray, "..."]
"""Keys, values or queries of every sequence, (batch, time, heads, head_dim) as in `jax.nn.dot_product_attention`."""


@pytree
class LastPart:
    """Stands for a quantizer of values where a value is the last coordinates of its key, those of the last part of the
    keys' `Split`. Source: multi-head latent attention (DeepSeek-AI, 2024, arXiv:2405.04434).

    Example:
      >>> import jax, rqjax
      >>> rqjax.strategy("eden_4", jax.random.key(0), dim=96, latent=64).values
      LastPart()
    """


@operation
def attention_constants(cache: "KVCache") -> Any:
    """Arrays that a device's attention kernel needs of quantizers and key form; None without such a kernel."""
    return None


def _constants(cache: "KVCache") -> Any:
    return attention_constants(lax.stop_gradient(cache)) if platforms.on_gpu() else None


@pytree
class KVCache:
    """Keys and values of a batch of sequences, each with its own length. `KVCache.init` makes an empty one.

    The first `sinks` and the newest `window` tokens or a few more are held in full precision, the others as codes.
    Tokens are encoded `unit` at a time. Codes depend on the tokens alone, not on how they were appended. With a
    `sliding_window` there are no codes: older tokens than that are forgotten.

    Example:
      >>> import jax, jax.numpy as jnp, rqjax
      >>> q = rqjax.eden(jax.random.key(0), dim=64, bits=4)
      >>> rqjax.KVCache.init(batch=1, kv_heads=2, max_len=1024, key_quantizer=q, value_quantizer=q, window=64)
      KVCache(Scaled(Rotated(Dense(64), Scalar(4 bits))), AsGiven(), max_len=1024, window=64, sinks=4)
    """

    keys: Codes
    """Codes of keys in the layout of `tiles`: a row for each sequence, or in a cache with `tables` for each page."""
    values: Codes
    """Codes of values; () if values are parts of the keys."""
    exact_keys: Float[Array, "batch heads slots dim"]
    """The sinks, then a ring of the newest tokens: token t is in slot sinks + (t - sinks) mod (slots - sinks)."""
    exact_values: Float[Array, "batch heads slots value_dim"]
    """Values of the same slots; without coordinates if they are parts of the keys."""
    lengths: Int[Array, "batch"]
    """Tokens of each sequence."""
    held: Int[Array, "batch"]
    """Tokens of each sequence that are in codes although the window has not passed them: of a shared prefix, or from
    before `truncate`."""
    overflow: Bool[Array, "batch"]
    """Sequences that an `append` under jit would have taken past `max_len`; it left them as they were."""
    tables: Int[Array, "batch pages"] | None
    """The pages in which the codes of each sequence (a slot) lie, `PAGE` tokens in each; -1 where there is none.
    None: each sequence has room of its own."""
    key_quantizer: Quantizer
    own_value_quantizer: Quantizer | LastPart | None
    """The values' quantizer, None if it is the keys'."""
    key_form: KeyForm
    """Transform of keys before they are encoded; its mean is (batch, heads, dim)."""
    max_len: int = static()
    window: int = static()
    sinks: int = static()
    sliding_window: int | None = static(default=None)
    """Tokens up to itself that a query sees at most, where those before them are forgotten."""
    constants: Any = derived(_constants)
    """`attention_constants`: whoever replaces the quantizers or makes room computes it anew, by `with_derived`."""

    @classmethod
    def init(
        cls,
        batch: int,
        kv_heads: int,
        max_len: int,
        key_quantizer: Quantizer,
        value_quantizer: Quantizer | LastPart,
        *,
        window: int = 128,
        sinks: int = 4,
        key_form: KeyForm = AS_GIVEN,
        pages: int | None = None,
        sliding_window: int | None = None,
        dtype: DTypeLike = jnp.bfloat16,
    ) -> "KVCache":
        """Makes an empty cache.

        Args:
          batch: sequences.
          kv_heads: heads of keys and values.
          max_len: tokens that each sequence has room for; `grow` makes more.
          key_quantizer: quantizer of the keys; its `dim` is the head dimension. `Exact` stores full precision.
          value_quantizer: quantizer of the values; the same object as `key_quantizer` is stored once. The cache has its
            own copy of both, which is donated with it. With `LastPart` a value is the last coordinates of its key.
          window: newest tokens in full precision, at least.
          sinks: first tokens in full precision.
          key_form: form in which keys are encoded, as `rqjax.BeforeRope(rope=rope)`. If it has a rope, the cache takes
            keys and queries before rotary positions: token t of a sequence turns by t.
          pages: how many pages of 128 tokens all sequences share; a `PagedCache` says who has which. If not given,
            each sequence has room for `max_len` tokens of its own.
          sliding_window: tokens up to itself that a query sees at most. Then these are held in full precision whatever
            `window` is, with 15 more, so that `truncate` may drop as many. Older ones are forgotten. Both quantizers
            are `Exact`, and keys as given.
          dtype: dtype of tokens in full precision.
        """
        batch, kv_heads = check_int("batch", batch, 1, 2**20), check_int("kv_heads", kv_heads, 1, 2**20)
        max_len, window = check_int("max_len", max_len, 1, 2**30), check_int("window", window, 0, 2**20)
        sinks, dim = check_int("sinks", sinks, 0, 2**20), key_quantizer.dim
        if not jnp.issubdtype(jnp.dtype(dtype), jnp.floating):
            raise TypeError(f"expected dtype to be a floating-point dtype, got {jnp.dtype(dtype)}")
        check_form(key_form)
        if not isinstance(value_quantizer, Quantizer | LastPart):
            raise TypeError(f"expected a value_quantizer, or LastPart() for values in keys, got {value_quantizer!r}")
        in_keys = isinstance(value_quantizer, LastPart)
        if in_keys and not isinstance(key_quantizer, Split):
            raise ValueError(f"expected a Split as key_quantizer for values that are its LastPart, got {key_quantizer}")
        if not in_keys and value_quantizer.dim != dim:
            raise ValueError(f"expected a value_quantizer of dimension {dim} like the keys', got {value_quantizer.dim}")
        given = isinstance(value_quantizer, GivenKeys)
        if given and getattr(key_quantizer, "group", 1) != value_quantizer.inner.group:
            group = value_quantizer.inner.group
            raise ValueError(f"expected AcrossHeads of {group} heads for values given keys, got {key_quantizer}")
        unit = together(key_quantizer, value_quantizer)
        if sliding_window is not None:
            window = check_int("sliding_window", sliding_window, 1, 2**20) + UNIT - 1
            if not (isinstance(key_quantizer, Exact) and isinstance(value_quantizer, Exact) and key_form is AS_GIVEN):
                raise ValueError(
                    f"expected Exact keys as given and Exact values with sliding_window=, got {key_form}, "
                    f"{key_quantizer} and {value_quantizer}"
                )
        tokens, tables = 0 if sliding_window else capacity(max_len, window, sinks, unit), None
        rooms = batch
        if pages is not None:
            tables = jnp.full((batch, tokens // PAGE), -1, jnp.int32)
            tokens, rooms = min(tokens, PAGE), check_int("pages", pages, 1, 2**30)

        def empty(quantizer, transposed):
            some = jax.ShapeDtypeStruct((rooms, kv_heads, unit, dim), jnp.float32)
            encode = lambda x: quantizer.laid_out(quantizer.encode(x), transposed)  # noqa: E731
            return over(lambda leaf: leaf.empty(tokens), jax.eval_shape(encode, some))

        ring = window + (1 if sliding_window else unit)
        exact = jnp.zeros((batch, kv_heads, sinks + ring, dim), dtype)
        cache = cls(
            keys=empty(key_quantizer, in_keys or given),
            values=() if in_keys else empty(value_quantizer, True),
            exact_keys=exact,
            exact_values=exact[..., :0] if in_keys else jnp.zeros_like(exact),
            key_form=key_form.begun(batch, kv_heads, dim),
            lengths=jnp.zeros(batch, jnp.int32),
            held=jnp.zeros(batch, jnp.int32),
            tables=tables,
            overflow=jnp.zeros(batch, bool),
            key_quantizer=jax.tree.map(jnp.array, key_quantizer),
            own_value_quantizer=None if value_quantizer is key_quantizer else jax.tree.map(jnp.array, value_quantizer),
            max_len=max_len,
            window=window,
            sinks=sinks,
            sliding_window=sliding_window,
        )
        return with_derived(cache)

    @property
    def values_in_keys(self) -> bool:
        """True if a value is the last coordinates of its key, so that both products are with the same codes."""
        return isinstance(self.own_value_quantizer, LastPart)

    @property
    def value_quantizer(self) -> Quantizer:
        if isinstance(self.own_value_quantizer, LastPart):
            return self.key_quantizer.parts[-1]  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(self.own_value_quantizer, GivenKeys):
            return dataclasses.replace(self.own_value_quantizer, keys=self.key_quantizer)
        return self.key_quantizer if self.own_value_quantizer is None else self.own_value_quantizer

    @property
    def weighs_keys(self) -> bool:
        """True if sums are of the keys' codes too, which are then laid out as values are."""
        return self.values_in_keys or isinstance(self.own_value_quantizer, GivenKeys)

    @property
    def value_codes(self) -> Codes:
        """Codes that the values' quantizer decodes."""
        if isinstance(self.own_value_quantizer, GivenKeys):
            return self.keys, self.values
        return self.keys[-1] if self.values_in_keys else self.values

    def newest_values(self) -> Float[Array, "batch heads slots value_dim"]:
        """Values of the tokens in full precision."""
        return self.exact_keys[..., -self.value_quantizer.dim :] if self.values_in_keys else self.exact_values

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays: codes, norms, tokens in full precision, lengths, quantizers."""
        return nbytes(self)

    def specs(self, axis: Any) -> "KVCache":
        """Partition specs of a cache whose sequences lie along an axis of a mesh, quantizers on all devices.

        `jax.shard_map` with them runs `append` and `attend` where each sequence is: devices exchange nothing. Under
        `jax.jit` alone, XLA gathers what a kernel takes.

        Raises:
          ValueError: the cache is in pages, which all sequences share.

        Example:
          >>> import jax, rqjax
          >>> cache = rqjax.strategy("eden_4", jax.random.key(0), dim=64).cache(4, 2, 512)
          >>> specs = cache.specs("data")
          >>> tuple(specs.lengths), tuple(specs.key_quantizer.inner.rotation.matrix)
          (('data',), ())
        """
        if self.tables is not None:
            raise ValueError("expected a cache without pages, which all sequences share")
        whole = {"key_quantizer", "own_value_quantizer", "constants"}
        by_sequence = lambda path, _: PartitionSpec(*[axis] * (path[0].name not in whole))  # noqa: E731
        return jax.tree_util.tree_map_with_path(by_sequence, self)

    @property
    def unit(self) -> int:
        """Tokens that are encoded, or forgotten, together."""
        return 1 if self.sliding_window else together(self.key_quantizer, self.value_quantizer)

    @property
    def capacity(self) -> int:
        """Tokens that there is room for in codes."""
        return 0 if self.sliding_window else capacity(self.max_len, self.window, self.sinks, self.unit)

    @property
    def coded(self) -> Int[Array, "batch"]:
        """Tokens of each sequence that are in codes, or forgotten: those from `sinks` on."""
        return jnp.maximum(self.coded_at(self.lengths), self.held)

    def coded_at(self, lengths: Int[Array, "batch"]) -> Int[Array, "batch"]:
        """Tokens of sequences of these lengths that the window has passed."""
        return jnp.maximum(lengths - self.sinks - self.window, 0) // self.unit * self.unit

    def remembers(self, lengths: Int[Array, "batch"]) -> Bool[Array, "batch"]:
        """Tells whether the cache holds all that the tokens before these lengths may see."""
        if not self.sliding_window:
            return jnp.ones(lengths.shape, bool)
        passed = lengths - self.sinks
        return (passed <= 0) | (self.coded <= jnp.maximum(passed - self.sliding_window, 0))

    @property
    def ring(self) -> int:
        """Slots of the newest tokens in full precision."""
        return self.exact_keys.shape[2] - self.sinks

    def slot(self, t: Int[Array, "*n"]) -> Int[Array, "*n"]:
        """The slot of token t in the exact arrays."""
        return jnp.where(t < self.sinks, t, self.sinks + (t - self.sinks) % self.ring)

    def picked(self, ring: Shaped[Array, "batch heads slots d"], t: Int[Array, "batch n"]) -> Shaped[Array, "..."]:
        """Returns the tokens t of exact keys or values, (batch, heads, n, d)."""
        return jax.vmap(lambda ring, t: pick(ring, (slice(None), self.slot(t))))(ring, t)

    def exact_tokens(self) -> Int[Array, "batch slots"]:
        """The token that each slot holds and no code does; -1 where there is none."""
        slots, lengths = jnp.arange(self.sinks + self.ring), self.lengths[:, None]
        newest = slots + (lengths - 1 - slots) // self.ring * self.ring
        ring = jnp.where((newest >= self.sinks + self.coded[:, None]) & (newest >= slots), newest, -1)
        return jnp.where(slots < self.sinks, jnp.where(slots < lengths, slots, -1), ring)

    def of(self, slots: Int[Array, "some"] | None) -> "KVCache":
        """Returns the cache of the sequences in `slots`, which share its pages; of all if None."""
        if slots is None:
            return self
        return dataclasses.replace(self, **jax.tree.map(lambda x: pick(x, slots), self._of_sequences))

    def with_sequences(self, slots: Int[Array, "some"] | None, some: "KVCache") -> "KVCache":
        """Writes what `of` returned back into the whole cache; slots out of range are left out."""
        if slots is None:
            return some
        slots = jnp.where(slots < 0, len(self.lengths), slots)
        back = lambda x, new: put(x, slots, new)  # noqa: E731
        return dataclasses.replace(some, **jax.tree.map(back, self._of_sequences, some._of_sequences))

    @property
    def _of_sequences(self) -> dict[str, Any]:
        names = ("exact_keys", "exact_values", "key_form", "lengths", "held", "tables", "overflow")
        return {name: getattr(self, name) for name in names}

    def check(self) -> None:
        """Raises a ValueError if an `append` under jit went past `max_len`."""
        with jax.ensure_compile_time_eval():  # under jit too, of a cache that is a constant there
            full = bool(self.overflow.any())
        if full:
            which = np.flatnonzero(np.asarray(self.overflow)).tolist()
            raise ValueError(
                f"sequences {which} were appended to past max_len = {self.max_len} or their pages, or truncated to "
                "tokens that are forgotten, and did not change"
            )


def together(*quantizers: Quantizer | LastPart) -> int:
    """Tokens that a cache encodes together: whole tiles of its own layout, and of its quantizers."""
    tiles = [quantizer.tile for quantizer in quantizers if isinstance(quantizer, Quantizer)]
    unit = math.lcm(UNIT, *tiles)
    if PAGE % unit:
        raise ValueError(f"expected tiles that divide {PAGE} tokens, got {' and '.join(map(str, tiles))}")
    return unit


def capacity(max_len: int, window: int, sinks: int, unit: int) -> int:
    """Tokens that there is room for in codes: a multiple of `PAGE`."""
    coded = max(0, max_len - sinks - window) // unit * unit
    return -(-coded // PAGE) * PAGE


def over(function: Callable[..., Any], *codes: Codes) -> Codes:
    """Maps a function of token arrays over the nest of codes."""
    return jax.tree.map(function, *codes, is_leaf=TokenArray.is_one)
