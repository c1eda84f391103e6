"""What the rotations have in common."""

from typing import Protocol, runtime_checkable

from jaxtyping import Array, Float, Shaped


@runtime_checkable
class Rotation(Protocol):
    """A linear isometry. Input in any floating-point dtype, output in float32 (float64 for float64)."""

    @property
    def dim(self) -> int:
        """The dimension of the vectors."""
        ...

    def __call__(self, x: Shaped[Array, "*n d"]) -> Float[Array, "*n e"]:
        """R x; e = d unless the isometry embeds."""
        ...

    def inverse(self, y: Shaped[Array, "*n e"]) -> Float[Array, "*n d"]:
        """R^T y, which is R^-1 y for every y that R reaches."""
        ...
