"""Strategies of caches: the quantizers of keys and values, and the form of keys."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from rqjax.cache.key_forms import AS_GIVEN, KeyForm, check_form
from rqjax.cache.kv import KVCache, LastPart
from rqjax.core import Quantizer, nbytes, pytree, static
from rqjax.core.pytree import without_derived
from rqjax.quantizers.exact import Exact
from rqjax.rotations import Rope


@pytree
class Strategy:
    """The quantizers of a cache, and the form of its keys. `rqjax.strategy` makes one by name.

    Example:
      >>> import jax, jax.numpy as jnp, rqjax
      >>> strategy = rqjax.strategy("eden_4", jax.random.key(0), dim=64)
      >>> str(strategy), strategy.nbytes(batch=1, kv_heads=2, max_len=4096)
      ('eden_4', 631837)
    """

    keys: Quantizer
    values: Quantizer | LastPart
    key_form: KeyForm = AS_GIVEN
    name: str = static(default="")
    """Name from which `rqjax.strategy` made it, if it did."""

    def __post_init__(self):
        check_form(self.key_form)

    def __str__(self) -> str:
        return self.name or repr(self)

    def cache(
        self,
        batch: int,
        kv_heads: int,
        max_len: int,
        *,
        rope: Rope | None = None,
        sliding_window: int | None = None,
        **options: Any,
    ) -> KVCache:
        """Makes an empty cache; `options` as in `KVCache.init`. If keys and values are both `Exact`, the window has the
        wider dtype of both.

        Args:
          rope: rope of the layer; left out if the form needs none. Keys and queries then come turned, and the cache's
            `key_form.rope` is None.
          sliding_window: tokens up to itself that a query sees at most. Where the cache would take fewer bytes, it has
            these in full precision, takes keys turned, and forgets older ones: `KVCache.init(sliding_window=)`. A cache
            whose values are parts of the keys has codes.

        Raises:
          ValueError: the key form needs a rope, and there is none.
        """
        parts = getattr(self.keys, "parts", ()) if isinstance(self.values, LastPart) else (self.keys, self.values)
        full = [part.dtype for part in parts if isinstance(part, Exact)]
        dtype = max(full, key=lambda dtype: jnp.dtype(dtype).itemsize) if len(full) == 2 else jnp.bfloat16
        options = {"dtype": dtype, "key_form": self.key_form.at(rope), **options}
        whole = functools.partial(KVCache.init, batch, kv_heads, max_len, self.keys, self.values, **options)
        if sliding_window is None or isinstance(self.values, LastPart):
            return whole()
        options |= {"key_form": AS_GIVEN, "sliding_window": sliding_window}
        exact = Exact(self.keys.dim, jnp.dtype(options["dtype"]).name)
        ring = functools.partial(KVCache.init, batch, kv_heads, max_len, exact, exact, **options)
        return min(ring, whole, key=lambda make: nbytes(without_derived(jax.eval_shape(make))))()

    def nbytes(self, batch: int, kv_heads: int, max_len: int, **options: Any) -> int:
        """Bytes of the cache that `cache` would make, without making it: codes, window, quantizers, everything."""
        return nbytes(jax.eval_shape(lambda: self.cache(batch, kv_heads, max_len, **options)))
