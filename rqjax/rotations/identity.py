"""The identity as a rotation: the row that every table needs."""

from jaxtyping import Array, Float, Shaped

from rqjax.arrays.planes import as_float32
from rqjax.core import pytree, static


@pytree
class Identity:
    dim: int = static()

    blocked = False

    @property
    def cost(self) -> int:
        return 0

    def __call__(self, x: Shaped[Array, "*n d"]) -> Float[Array, "*n d"]:
        return as_float32(x)

    inverse = __call__
