"""Attention to the codes of a cache by a kernel of a device: whether there is one, and its call."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from rqjax.backends import nests
from rqjax.backends.finders import Entry
from rqjax.cache import attention
from rqjax.cache.coded import with_mean
from rqjax.cache.kv import KVCache
from rqjax.cache.queries import Queries
from rqjax.cache.sums import Sums
from rqjax.core import Codes, Quantizer


def times_step(leaf: Any, x: Array) -> Array:
    """Multiplies queries, or sums of whole levels, by the step of the levels."""
    return x * nests.step(leaf)


def packed(quantizer: Quantizer, codes: Codes) -> Any:
    """Codes of a `Scalar` or an `Affine` as kernels take them."""
    return nests.packed(nests.part(quantizer, codes))


class CodedAttention(NamedTuple):
    """Kernel of a device for attention to the codes of a cache."""

    limits: Callable[[KVCache, Quantizer, Codes, int], str | None]
    """Called with a cache, a quantizer, its codes and the queries per head: returns why the kernel does not take them,
    or None."""
    kernel: Callable[..., Any]
    """Called with queries, packed keys and values, bounds and a shift, and the options `tables`, `dim`, `softcap`."""
    packed: Callable[[Quantizer, Codes], Any] = packed
    """Codes as the kernel takes them."""
    multiplied: Callable[[Any, Array], Array] = times_step
    """Scales rotated queries for products with the levels of a leaf."""
    restored: Callable[[Any, Array], Array] = times_step
    """Scales sums of the levels of a leaf to sums of vectors, still rotated."""
    turning: Callable[[KVCache], Any] | None = None
    """Called with a cache of keys before they turn: returns how the kernel turns keys. None if it does not."""
    latents: bool = False
    """True if values may be parts of keys; queries are then those of both, and the kernel has an option `latent`."""

    def entry(self, implementation: str) -> Entry:
        """Entry of the kernel in the table of a device."""
        limits = functools.partial(self.reason, implementation)
        call = functools.partial(attention.attend_with, kernel=self.past)
        return Entry(attention.attend, (KVCache,), limits, call, rows=False)

    def reason(
        self,
        name: str,
        cache: KVCache,
        q: Any,
        mask: Any,
        new: Any,
        *,
        sliding_window: Any,
        softcap: Any,
        **others: Any,
    ) -> str | None:
        _, time, q_heads, _ = q.shape
        abilities = {"turns": self.turning is not None, "latents": self.latents}
        reason = nests.reason_of_queries(cache, time, q_heads, mask, sliding_window, softcap, **abilities)
        rows = q_heads // cache.exact_keys.shape[1] * time
        for side, (quantizer, codes) in zip(("keys", "values"), nests.sides(cache), strict=False):
            wide = nests.part(quantizer).leaf.dim != quantizer.dim
            found = "a rotation into more dimensions" if wide else self.limits(cache, quantizer, codes, rows)
            if reason is None and found:
                reason = f"{side}: {found}"
        return reason and f"no {name} kernel for this attention: {reason}"

    def past(self, cache: KVCache, queries: Queries) -> Sums:
        """The sums over the tokens in codes, by the kernel."""
        form, options = cache.key_form, {}
        (keys, of_keys), (values, of_values) = nests.sides(cache)
        if form.turns_late and self.turning:
            y, options["turning"] = queries.y, self.turning(cache)
        elif cache.values_in_keys:
            options["latent"], parts = True, jnp.split(queries.y, [keys.dim], axis=-1)
            of_sides = zip((keys, values), parts, strict=True)
            y = jnp.concatenate([self.as_multiplied(*of_side) for of_side in of_sides], axis=-1)
        else:
            y = nests.by_head(self.as_multiplied, cache.key_quantizer, queries.y)
        largest, total, sums = self.kernel(
            y,
            self.packed(keys, of_keys),
            self.packed(values, of_values),
            *nests.bounds(cache, queries),
            form.bias(queries.y, jnp.int32(cache.sinks), cache.capacity),
            tables=cache.tables,
            dim=values.dim,
            softcap=queries.softcap,
            **options,
        )
        return with_mean(cache, Sums(largest, total, nests.by_head(self.as_restored, values, sums)))

    def as_multiplied(self, quantizer: Quantizer, y: Float[Array, "b h r d"]) -> Float[Array, "b h r n"]:
        found = nests.RotatedScalar.of(quantizer)
        return self.multiplied(found.leaf, found.rotated(y))

    def as_restored(self, quantizer: Quantizer, sums: Float[Array, "b h r n"]) -> Float[Array, "b h r d"]:
        found = nests.RotatedScalar.of(quantizer)
        return found.rotated_back(self.restored(found.leaf, sums))
