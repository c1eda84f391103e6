"""flax nnx modules (extra `flax`)."""

from rqjax.nn.attention import CachedAttention as CachedAttention
