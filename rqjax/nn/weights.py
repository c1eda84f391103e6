"""Identity of a decoder's weights: whether they are still the same, and hashes of them for files."""

import hashlib
import weakref
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from rqjax.core.mesh import fetched


class Weights:
    """The weights of a decoder at one time. They are compared by the identity of their arrays and not kept alive."""

    def __init__(self, decoder: Any):
        self.arrays = [weakref.ref(array) for array in jax.tree.leaves(decoder)]

    def are_of(self, decoder: Any) -> bool:
        """Returns whether a decoder has the same arrays.

        Raises:
          RuntimeError: its arrays were deleted, as by donating them.
        """
        arrays = jax.tree.leaves(decoder)
        if any(isinstance(array, jax.Array) and array.is_deleted() for array in arrays):
            raise RuntimeError("expected a decoder with weights, got deleted arrays: nnx.update it with new ones")
        return len(arrays) == len(self.arrays) and all(
            ref() is array for ref, array in zip(self.arrays, arrays, strict=True)
        )


def digest(said: str, arrays: Iterable[Array]) -> str:
    """Hashes a text and the numbers of arrays; one array at a time is in the host's memory."""
    found = hashlib.sha256(said.encode())
    for array in arrays:
        found.update(np.ascontiguousarray(fetched(array)).reshape(-1).view(np.uint8).data)
    return found.hexdigest()
