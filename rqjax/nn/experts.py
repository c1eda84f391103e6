"""Mixtures of experts: each token goes through a few of many MLPs (Shazeer et al., 2017, arXiv:1701.06538)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from rqjax.arrays.planes import as_bits
from rqjax.core import platforms
from rqjax.core.products import full_precision
from rqjax.nn.config import DecoderConfig
from rqjax.nn.families import ACTIVATIONS
from rqjax.nn.layers import MLP, Linear

BLOCK_ROWS = (8, 64)
"""The least and the most rows of a block on a CPU. It has as many as an expert has on average, a power of two. With 8,
64, 256, 2,048 and 8,192 rows for 128 experts, blocks of 8, 8, 8, 16 and 64 were the fastest of 8, 16, 32 and 64."""
Multiply = Callable[[Linear, Array], Array]
"""Rows times weights of their experts."""


class Experts(nnx.Module):
    """Gated MLPs: down(f(gate(x), up(x)))."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike):
        count, size, inner = config.num_experts, config.hidden_size, config.moe_intermediate_size
        bias, self.swiglu, self.activation = config.traits.expert_bias, config.swiglu, config.activation
        self.gate_proj = Linear(size, count, inner, bias=bias, rngs=rngs, dtype=dtype)
        self.up_proj = Linear(size, count, inner, bias=bias, rngs=rngs, dtype=dtype)
        self.down_proj = Linear(inner, count, size, bias=bias, rngs=rngs, dtype=dtype)

    def __call__(self, x: Float[Array, "rows size"], chosen: Int[Array, "rows k"]) -> Float[Array, "rows k size"]:
        """Returns the outputs of the chosen experts for each row, in float32."""
        count, k = len(self.gate_proj.weight[...]), chosen.shape[1]
        order = jnp.argsort(chosen.ravel())
        sizes = jnp.bincount(chosen.ravel(), length=count)
        found = (self._in_blocks if platforms.on_cpu() else self._ragged)(x, order // k, sizes)
        return found[jnp.argsort(order)].reshape(*chosen.shape, -1)

    def _through(self, x: Float[Array, "n size"], multiply: Multiply) -> Float[Array, "n size"]:
        gate, up = multiply(self.gate_proj, x), multiply(self.up_proj, x)
        if self.swiglu is None:
            inner = ACTIVATIONS[self.activation](gate) * up
        else:
            alpha, limit = self.swiglu
            gate = jnp.minimum(gate, limit)
            inner = gate * jax.nn.sigmoid(alpha * gate) * (jnp.clip(up, -limit, limit) + 1)
        return multiply(self.down_proj, inner.astype(x.dtype))

    def _ragged(
        self, x: Float[Array, "rows size"], rows: Int[Array, "n"], sizes: Int[Array, "experts"]
    ) -> Float[Array, "n size"]:
        """Computes rows in the order of their experts; `sizes` counts the rows of each expert."""
        experts = jnp.repeat(jnp.arange(len(sizes)), sizes, total_repeat_length=len(rows))

        def multiply(stack: Linear, y: Array) -> Array:
            weight = stack.weight[...].swapaxes(1, 2)
            precision = full_precision(y, weight)
            out = lax.ragged_dot(y, weight, sizes, precision=precision, preferred_element_type=jnp.float32)
            return out if stack.bias is None else out + stack.bias[...][experts]

        return self._through(x[rows], multiply)

    def _in_blocks(
        self, x: Float[Array, "rows size"], rows: Int[Array, "n"], sizes: Int[Array, "experts"]
    ) -> Float[Array, "n size"]:
        """Computes the same, block by block of rows of one expert.

        `lax.ragged_dot` multiplies all rows by all experts on a CPU. With 128 experts of 768 x 2,048 in bfloat16, 8 a
        token, one token takes 1,300 ms and 8 tokens take 1,590. With a copy of the weights of each row they take 48 and
        340 ms, in blocks 5 and 34.
        """
        count, n = len(sizes), len(rows)
        size = min(max(1 << (n // count).bit_length() - 1 if n >= count else 1, BLOCK_ROWS[0]), BLOCK_ROWS[1])
        blocks, first_row = -(-sizes // size), jnp.cumsum(sizes) - sizes
        ends = jnp.cumsum(blocks)
        first_block = ends - blocks
        i = jnp.arange(-(-n // size) + min(count, n))  # as many blocks as can be used
        expert = jnp.minimum(jnp.searchsorted(ends, i, side="right"), count - 1)
        of_block = first_row[expert] + (i - first_block[expert]) * size
        taken = rows[jnp.minimum(of_block[:, None] + jnp.arange(size), n - 1)]

        def block(inputs: tuple[Array, Array, Array]) -> Array:
            used, expert, taken = inputs

            def multiply(stack: Linear, y: Array) -> Array:
                weight = _one_of(stack.weight[...], expert)
                precision = full_precision(y, weight)
                out = jnp.einsum("ni,oi->no", y, weight, precision=precision, preferred_element_type=jnp.float32)
                return out if stack.bias is None else out + stack.bias[...][expert]

            # A branch also keeps float32 copies of narrow weights to those of the block; see `layers.product`.
            nothing = lambda y: jnp.zeros(y.shape, jnp.float32)  # noqa: E731
            return lax.cond(used, lambda y: self._through(y, multiply), nothing, x[taken])

        found = lax.map(block, (i < ends[-1], expert, taken)).reshape(-1, x.shape[1])
        experts = jnp.repeat(jnp.arange(count), sizes, total_repeat_length=n)
        return found[first_block[experts] * size + jnp.arange(n) - first_row[experts]]


@jax.custom_jvp
def _one_of(stack: Float[Array, "experts out in"], i: Int[Array, ""]) -> Float[Array, "out in"]:
    """Takes one matrix of a stack, as bits: XLA's CPU backend would first copy a whole stack of floats to float32."""
    return lax.bitcast_convert_type(as_bits(stack)[i], stack.dtype)


@_one_of.defjvp
def _(primals, tangents):
    return _one_of(*primals), tangents[0][primals[1]]


class Router(Linear):
    """Chooses the experts of a token, and their weights: a softmax of its scores, or sigmoids of them.

    If experts are in groups, only those of the best groups are chosen. A group is as good as its best expert
    (DeepSeek-AI, 2024, arXiv:2405.04434), or with sigmoids as its best two. With sigmoids each expert also has a bias
    that evens out how often it is chosen (arXiv:2412.19437).
    """

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike):
        count, self.sigmoid = config.num_experts, config.traits.router == "sigmoid"
        super().__init__(config.hidden_size, count, bias=config.traits.expert_bias, rngs=rngs, dtype=dtype)
        self.e_score_correction_bias = nnx.Param(jnp.zeros(count, jnp.float32)) if self.sigmoid else None
        self.count, self.normalized, self.groups = config.num_experts_per_tok, config.norm_topk_prob, config.groups
        self.scale = config.routed_scaling_factor

    def choose(self, x: Float[Array, "rows size"]) -> tuple[Float[Array, "rows k"], Int[Array, "rows k"]]:
        """Returns the weights of each row's experts, and the experts' numbers."""
        scores = self(x).astype(jnp.float32)
        all_weights = jax.nn.sigmoid(scores) if self.sigmoid else jax.nn.softmax(scores, axis=-1)
        bias = self.e_score_correction_bias
        chosen = lax.top_k(self._in_groups(all_weights if bias is None else all_weights + bias[...]), self.count)[1]
        weights = jnp.take_along_axis(all_weights, chosen, axis=-1)
        if self.normalized:
            weights /= weights.sum(-1, keepdims=True)
        return self.scale * weights, chosen

    def _in_groups(self, ranks: Float[Array, "rows experts"]) -> Float[Array, "rows experts"]:
        """Returns the ranks of the experts that may be chosen, and -inf for the others."""
        groups, most = self.groups
        if groups == 1:
            return ranks
        each = ranks.reshape(len(ranks), groups, -1)
        best = lax.top_k(each, 2 if self.sigmoid else 1)[0].sum(-1)
        allowed = jax.nn.one_hot(lax.top_k(best, most)[1], groups, dtype=bool).any(1)
        return jnp.where(allowed[..., None], each, -jnp.inf).reshape(ranks.shape)


class Mixture(nnx.Module):
    """Weighted sum of the experts that a router chooses, and the experts that all tokens share."""

    def __init__(self, config: DecoderConfig, *, rngs: nnx.Rngs, dtype: DTypeLike):
        self.router = Router(config, rngs=rngs, dtype=dtype)
        self.experts = Experts(config, rngs=rngs, dtype=dtype)
        shared = config.n_shared_experts * config.moe_intermediate_size
        self.shared_experts = MLP(config, shared, rngs=rngs, dtype=dtype) if shared else None

    def __call__(self, x: Float[Array, "*n size"]) -> Float[Array, "*n size"]:
        rows = x.reshape(-1, x.shape[-1])
        weights, chosen = self.router.choose(rows)
        out = jnp.einsum("nk,nkd->nd", weights, self.experts(rows, chosen), precision=lax.Precision.HIGHEST)
        out = out.astype(x.dtype).reshape(x.shape)
        return out if self.shared_experts is None else out + self.shared_experts(x)
