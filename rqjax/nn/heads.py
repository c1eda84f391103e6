"""A decoder on a mesh of devices: heads, columns of the MLP and the vocabulary lie along one of its axes.

Each device computes attention of its own heads to its own part of the caches, so that no code leaves it. Outputs of
the output projections of attention and MLP are summed over devices, twice a layer (Shoeybi et al., 2019,
arXiv:1909.08053).
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from rqjax.cache.attention import dot_product_attention
from rqjax.cache.kv import KVCache
from rqjax.core.mesh import along, count, everywhere, mapped
from rqjax.nn.config import DecoderConfig
from rqjax.quantizers.per_head import PerHead

ROWS = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "sinks"}
"""Projections whose outputs lie along the axis, and the sinks of heads."""
COLUMNS = {"o_proj", "down_proj"}
"""Projections whose inputs lie along the axis."""
VOCABULARY = {"embed_tokens", "lm_head"}
"""Parameters with a row for each token: a quarter of the weights of small models."""
BY_HEAD = {"keys", "values", "exact_keys", "exact_values", "key_form"}
"""Parts of a cache whose second axis is that of the heads."""


def checked(config: DecoderConfig, mesh: Any, axis: str | None) -> NamedSharding:
    """Returns the sharding of heads along an axis of a mesh; a mesh with one axis needs no name for it.

    Raises:
      TypeError, ValueError: as `along`; or the decoder's heads or columns are no multiple of the devices.
    """
    names = getattr(mesh, "axis_names", ())
    sharding = along(mesh, names[0] if axis is None and len(names) == 1 else axis)
    widths = [name for name in ("intermediate_size", "moe_intermediate_size") if getattr(config, name)]
    for name in ("num_key_value_heads", *widths):
        if (size := getattr(config, name)) % count(sharding):
            raise ValueError(f"expected {name} to be a multiple of the {count(sharding)} devices, got {size}")
    return sharding


def of_weight(path: Sequence[Any], shape: tuple[int, ...], sharding: NamedSharding) -> NamedSharding:
    """Returns the sharding of a parameter; a vocabulary that does not divide is on all devices."""
    names, axis = set(path), sharding.spec[0]
    lead = [None] if "experts" in names else []
    by_row = names & ROWS or (names & VOCABULARY and shape[0] % count(sharding) == 0)
    by_column = names & COLUMNS and len(shape) - len(lead) == 2
    spec = PartitionSpec(*lead, axis) if by_row else PartitionSpec(*lead, None, axis) if by_column else PartitionSpec()
    return NamedSharding(sharding.mesh, spec)


def specs(cache: KVCache, axis: Any) -> Any:
    """Returns the partition specs of a cache along the axis of its heads; arrays without heads are on all devices."""
    whole = lambda part: isinstance(part, PerHead)  # noqa: E731

    def spec(path: Any, part: Any) -> Any:
        if whole(part):
            return jax.tree.map(lambda _: PartitionSpec(axis), part)
        if path[0].name == "constants" or getattr(path[-1], "name", "") == "prediction":  # of each group, or one of all
            return PartitionSpec(axis) if part.ndim == 3 and part.shape[0] > 1 else PartitionSpec()
        return PartitionSpec(None, axis) if path[0].name in BY_HEAD else PartitionSpec()

    return jax.tree_util.tree_map_with_path(spec, cache, is_leaf=whole)


def empty(make: Callable[[], KVCache], sharding: NamedSharding) -> KVCache:
    """Makes a cache with each part on the device that it belongs to: no device holds the whole."""
    cache = jax.eval_shape(make)
    if (groups := jax.tree.leaves(cache.keys)[0].shape[1]) % count(sharding):
        raise ValueError(f"expected a multiple of {count(sharding)} groups of heads with codes together, got {groups}")
    laid = jax.tree.map(lambda spec: NamedSharding(sharding.mesh, spec), specs(cache, *sharding.spec))
    return jax.jit(make, out_shardings=laid)()


def attention(
    sharding: NamedSharding | None,
    q: Array,
    k: Array,
    v: Array | None,
    cache: KVCache,
    valid: Any,
    slots: Any,
    *,
    sink_logits: Array | None = None,
    **options: Any,
) -> tuple[Array, KVCache]:
    """Computes `dot_product_attention`; on a mesh each device's heads attend to its own part of the cache."""

    def own(q: Array, k: Array, v: Any, cache: KVCache, valid: Any, slots: Any, sinks: Any) -> tuple[Array, KVCache]:
        return dot_product_attention(q, k, v, cache, valid=valid, slots=slots, sink_logits=sinks, **options)

    if sharding is None:
        return own(q, k, v, cache, valid, slots, sink_logits)
    copy, by_head, laid = PartitionSpec(), PartitionSpec(None, None, *sharding.spec), specs(cache, *sharding.spec)
    run = mapped(own, sharding, (by_head, by_head, by_head, laid, copy, copy, sharding.spec), (by_head, laid))
    return run(q, k, v, cache, valid, slots, sink_logits)


def everyone(sharding: NamedSharding | None, logits: Array) -> Array:
    """Returns logits on all devices of a mesh. If the vocabulary lies along the axis, logits are constrained to lie
    along it first: the compiler would else gather the vocabulary's weights."""
    if sharding is None:
        return logits
    if logits.shape[-1] % count(sharding) == 0:
        by_token = PartitionSpec(*[None] * (logits.ndim - 1), *sharding.spec)
        logits = lax.with_sharding_constraint(logits, NamedSharding(sharding.mesh, by_token))
    return lax.with_sharding_constraint(logits, everywhere(sharding))
