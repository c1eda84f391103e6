"""Rotations as the stages of kernels for NVIDIA GPUs."""

import importlib
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from rqjax.core import Refusal, nest
from rqjax.rotations import Chain, Dense, Hadamard, Rotation, Rotor

ROTATIONS = "Rotor, Hadamard, Dense, or a Chain of a Rotor and a Hadamard"


def kernel(module: str) -> Any:
    """A module of `pallas_kernels`, imported when it is used: jax.experimental.pallas takes a second."""
    return importlib.import_module(f"pallas_kernels.gpu.{module}")


def refusal_of_rotation(rotation: Rotation, back: bool) -> Refusal | None:
    """Why kernels do not rotate so, or back so, if they do not."""
    dims = kernel("launch").DENSE_DIMS
    match rotation:
        case Dense() if back:
            return Refusal("mosaic_gpu kernels do not rotate back by a dense matrix")
        case Dense() if rotation.dim not in dims:
            return Refusal(f"mosaic_gpu kernels take dense matrices of dimension {listed(dims)}, not {rotation.dim}")
        case Rotor() | Hadamard() | Dense():
            return None
        case Chain(rotations=(Rotor() | Hadamard() as first, Rotor() | Hadamard() as second)):
            if type(first) is not type(second):
                return None
    return Refusal(f"mosaic_gpu kernels rotate by {ROTATIONS}, not by {nest(rotation)}")


def stages(rotation: Any) -> tuple[tuple[str, Array], ...]:
    """A rotation as the kernels' stages."""
    match rotation:
        case Rotor():
            return (("rotor", rotation.coefficients),)
        case Hadamard():
            return (("hadamard", rotation.signs[None].astype(jnp.float32)),)
        case Dense():
            return (("dense", kernel("encode").halves(rotation.matrix)),)
    return tuple(stage for part in rotation.rotations for stage in stages(part))


def inverse_stages(rotation: Any) -> tuple[tuple[str, Array], ...]:
    """The inverse of a rotation as the kernels' stages."""
    match rotation:
        case Rotor():
            return (("rotor", rotation.inverted.coefficients),)
        case Hadamard():
            return (("hadamard_inverse", rotation.signs[None].astype(jnp.float32)),)
    return tuple(stage for part in reversed(rotation.rotations) for stage in inverse_stages(part))


def listed(values: Iterable[Any]) -> str:
    return ", ".join(map(str, values))
