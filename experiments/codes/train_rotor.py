"""Learned rotations: held-out error of random and of trained parametrizations.

A name of `ROTATIONS` is that rotation before Lloyd-Max levels, random; with ":learned" behind it its rotors, angles,
quaternions or matrix are trained. A name of `rqjax.FITTED` is that recipe, at the same bits of codes.
"""

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp

import rqjax
from experiments.codes import rotation_mixing
from experiments.data import samples
from experiments.harness.rows import mean_and_deviation
from experiments.harness.table import Table
from rqjax import learning, metrics, rotations
from rqjax.arrays import norms
from rqjax.core import Registry, unknown_name
from rqjax.rotations import Chain, Dense, Permutation, Rotor

MADE_BY = (
    "experiments/codes/rotation_mixing.py",
    "experiments/data/samples.py",
    "rqjax/recipes/learned.py",
    "rqjax/learning/training.py",
)
TABLES = (
    Table(
        "Held-out mean squared error relative to a uniform rotation's",
        rows=("parametrisation",),
        columns=("data",),
        values=("vs_haar",),
        each=("dim", "bits"),
    ),
    Table(
        "Held-out error, of each vector its own and of all (energy), what a rotation costs, and how exact it is",
        rows=("bits", "parametrisation"),
        columns=(),
        values=(
            "mse",
            "vs_haar",
            "vs_rotor",
            "energy_vs_haar",
            "stored_bits",
            "parameters",
            "multiply_adds",
            "orthogonality",
            "seconds",
        ),
        each=("data", "dim"),
    ),
)

Make = Any
"""Function from (key, vectors (n, d)) to a rotation."""


def _oblivious(name: str) -> Make:
    return lambda key, x: rotation_mixing.ROTATIONS[name](key, x.shape[1])


def _permuted(key: jax.Array, x: jax.Array) -> Chain:
    rotor = Rotor.random(key, x.shape[1])
    return Chain((Permutation.balanced((norms.direction(x) ** 2).mean(axis=0), rotor.groups), rotor))


def _procrustes(key: jax.Array, x: jax.Array, bits: int, rounds: int = 20) -> Dense:
    """Alternates as OPQ: codes for the rotation, then the best rotation for the codes (Ge et al., 2013)."""
    unit, levels = norms.direction(x), rqjax.lloyd_max(x.shape[1], bits)

    def step(_, rotation):
        y = rotation(unit)
        return Dense.procrustes(unit, levels.decode(levels.encode(y)))

    return jax.lax.fori_loop(0, rounds, step, Dense.haar(key, x.shape[1]))


ROTATIONS: Registry = Registry(
    "parametrisation",
    {name: _oblivious(name) for name in rotation_mixing.ROTATIONS}
    | {"rotor_permuted": _permuted, "klt": lambda key, x: Dense.klt(norms.direction(x)), "procrustes": _procrustes},
)


def check(point: dict[str, Any]) -> None:
    name = point["parametrisation"]
    if name not in rqjax.FITTED and name.removesuffix(":learned") not in ROTATIONS:
        raise unknown_name("parametrisation", name, [*ROTATIONS, *rqjax.FITTED])
    samples.check(point["data"])


def run(point: dict[str, Any]) -> dict[str, Any]:
    dim, bits, name = point["dim"], point["bits"], point["parametrisation"]
    train, test = samples.split(samples.sample(point["data"], point["seeds"], point["n"], dim))
    start = time.perf_counter()
    quantizers, curve = jax.block_until_ready(_make(name, train, bits))
    seconds = time.perf_counter() - start
    own, energy = _errors(quantizers, test)
    references = [_reference(n, point["data"], point["seeds"], point["n"], dim, bits) for n in ("dense", "rotor")]
    (haar, haar_energy), (rotor, _) = references
    one = jax.tree.map(lambda leaf: leaf[0], quantizers)
    rotation = one.inner.rotation if hasattr(one.inner, "rotation") else one.rotation
    columns = {"mse": own, "vs_haar": own / haar, "vs_rotor": own / rotor, "energy_vs_haar": energy / haar_energy}
    return {
        **mean_and_deviation(columns),
        "stored_bits": one.bits_per_vector / dim,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(rotation)),
        "multiply_adds": rotation.cost,
        "orthogonality": float(rotations.orthogonality_error(rotation)),
        "seconds": seconds,
        "curve": [dict(zip(("step", "validation"), map(float, row), strict=True)) for row in curve],
    }


def _make(name: str, x: jax.Array, bits: int) -> tuple[Any, list[Any]]:
    """Makes quantizers for each seed (the first axis of x), and the learning curve, mean over the seeds."""
    keys = jax.random.split(jax.random.key(0), len(x))
    if name in rqjax.FITTED:
        return rqjax.FITTED[name](keys[0], x, bits).inner, []
    quantizers, history = _maker(name, bits)(keys, x)
    if not history:
        return quantizers, []
    return quantizers, list(zip(history["step"][0], history["validation"].mean(axis=0), strict=True))


@functools.cache
def _maker(name: str, bits: int) -> Any:
    """Compiles once for a parametrization: the data sets share it."""
    rotation, _, learned = name.partition(":")

    def one(key: jax.Array, x: jax.Array) -> Any:
        first, second = jax.random.split(key)
        make = functools.partial(_procrustes, bits=bits) if rotation == "procrustes" else ROTATIONS[rotation]
        quantizer = rqjax.Normalized(rqjax.Rotated(make(first, x), rqjax.lloyd_max(x.shape[1], bits)))
        return (
            learning.fit(quantizer, x, second, where=lambda q: q.inner.rotation, patience=20)
            if learned
            else (quantizer, {})
        )

    return jax.jit(jax.vmap(one))


@jax.jit
@jax.vmap
def _errors(quantizer: Any, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    decoded = quantizer.decode(quantizer.encode(x))
    return metrics.relative_mse(x, decoded), jnp.sum((x - decoded) ** 2) / jnp.sum(x**2)


@functools.cache
def _reference(name: str, source: str, seeds: int, n: int, dim: int, bits: int) -> tuple[jax.Array, jax.Array]:
    """Measures the errors of a random rotation, for each seed."""
    train, test = samples.split(samples.sample(source, seeds, n, dim))
    return _errors(_make(name, train, bits)[0], test)
