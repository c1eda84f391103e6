"""The layers of decoders. Names, and the orientation (out, in) of weights, are those of Hugging Face's checkpoints."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from rqjax.arrays.planes import never_true
from rqjax.core import platforms
from rqjax.core.products import full_precision
from rqjax.nn.config import DecoderConfig
from rqjax.nn.families import ACTIVATIONS


def product(
    x: Float[Array, "*n inner"], weight: Float[Array, "..."], subscripts: str = "...i,oi->...o"
) -> Float[Array, "*n outer"]:
    """Computes x W^T, or another einsum, in float32.

    On a CPU, XLA makes float32 copies of narrow weights, of all layers before the first is used. A branch is entered
    only when its operands are there, so that there is one copy at a time.
    """

    def multiply(x: Array) -> Array:
        precision = full_precision(x, weight)
        return jnp.einsum(subscripts, x, weight, precision=precision, preferred_element_type=jnp.float32)

    if not platforms.on_cpu() or weight.dtype == jnp.float32:
        return multiply(x)
    nothing = lambda x: jnp.full(jax.eval_shape(multiply, x).shape, jnp.nan, jnp.float32)  # noqa: E731
    return jax.lax.cond(never_true(x), nothing, multiply, x)


def scaled(x: Float[Array, "..."], scale: float) -> Float[Array, "..."]:
    """Multiplies x by a number, in the dtype of x."""
    return x if scale == 1 else x * jnp.asarray(scale, x.dtype)


class Linear(nnx.Module):
    """x W^T + b with W (out, in); those of experts, W (experts, out, in) and b (experts, out), are not called."""

    def __init__(self, inner: int, *outer: int, bias: bool = False, rngs: nnx.Rngs, dtype: DTypeLike):
        self.weight = nnx.Param(0.02 * jax.random.normal(rngs.params(), (*outer, inner), dtype))
        self.bias = nnx.Param(jnp.zeros(outer, dtype)) if bias else None

    def __call__(self, x: Float[Array, "*n inner"]) -> Float[Array, "*n outer"]:
        y = product(x, self.weight[...]).astype(x.dtype)
        return y if self.bias is None else y + self.bias[...]


class Embedding(Linear):
    """A row of W for each token."""

    def __call__(self, x: Int[Array, "*n"]) -> Float[Array, "*n dim"]:
        """Returns rows of the weight; NaN for a token that has none, since jitted code cannot raise."""
        return self.weight[...].at[x.astype(jnp.uint32)].get(mode="fill", fill_value=jnp.nan)


class RMSNorm(nnx.Module):
    """x / rms(x) times w, in Gemma times 1 + w (Zhang & Sennrich, 2019)."""

    def __init__(self, dim: int, config: DecoderConfig, dtype: DTypeLike, eps: float | None = None):
        self.offset, self.eps = float(config.traits.unit_offset), config.rms_norm_eps if eps is None else eps
        self.weight = nnx.Param(jnp.full(dim, 1 - self.offset, dtype))

    def __call__(self, x: Float[Array, "*n dim"]) -> Float[Array, "*n dim"]:
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(y**2, axis=-1, keepdims=True) + self.eps)
        return (y * (self.weight[...].astype(jnp.float32) + self.offset)).astype(x.dtype)


class MLP(nnx.Module):
    """Gated: down(f(gate(x)) * up(x))."""

    def __init__(self, config: DecoderConfig, inner: int | None = None, *, rngs: nnx.Rngs, dtype: DTypeLike):
        size, inner, bias = config.hidden_size, inner or config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(size, inner, bias=bias, rngs=rngs, dtype=dtype)
        self.up_proj = Linear(size, inner, bias=bias, rngs=rngs, dtype=dtype)
        self.down_proj = Linear(inner, size, bias=bias, rngs=rngs, dtype=dtype)
        self.activation = config.activation

    def __call__(self, x: Float[Array, "*n size"]) -> Float[Array, "*n size"]:
        return self.down_proj(ACTIVATIONS[self.activation](self.gate_proj(x)) * self.up_proj(x))
