"""Training of any part of a quantizer: gradient descent by optax on some of its arrays.

Rotations stay rotations, because their parameters are bivectors and angles, any value of which is an exact rotation.
"""

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.tree_util import Partial, all_leaves
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int, PyTree

from rqjax.core import Key, Quantizer, check_data, check_int, is_traced, operation, platforms, random, treefile
from rqjax.learning.losses import Distortion
from rqjax.learning.parameters import Where, places, with_parameters
from rqjax.rotations import Chain, Dense, Rotation, StridedRotor

PER_PARAMETER = 10
"""Numbers of training data for each parameter below which `fit` warns."""
TURNING_RATE = 0.05
RATE = 0.02


class Plan(NamedTuple):
    """Static options that are compiled into a training."""

    places: tuple[int, ...]
    optimizer: optax.GradientTransformation
    steps: int
    every: int
    batch_size: int
    patience: int

    @property
    def rounds(self) -> int:
        """Evaluations, the first before any step."""
        return 1 - (-self.steps // self.every)


class State(NamedTuple):
    """A training under way."""

    params: list[Array]
    moments: PyTree
    error: Float[Array, ""]
    """Mean loss since the last evaluation."""
    best: list[Array]
    """The parameters with the least validation loss so far."""
    least: Float[Array, ""]
    waits: Int[Array, ""]
    """Evaluations since the least loss."""
    round: Int[Array, ""]
    history: dict[str, Array]
    """Rows (rounds,), those from `round` on not yet written."""


def fit(
    quantizer: Quantizer,
    x: PyTree,
    key: Key,
    *,
    where: Where,
    loss: Any = Distortion(),  # noqa: B008
    optimizer: optax.GradientTransformation | None = None,
    steps: int = 500,
    batch_size: int = 256,
    validation: PyTree | None = None,
    evaluations: int = 20,
    patience: int = 5,
    checkpoint: str | Path | None = None,
    progress: Callable[[dict[str, float]], None] | None = None,
) -> tuple[Quantizer, dict[str, Array]]:
    """Trains the floating-point arrays that `where` picks, and keeps those with the least loss on held-out data.

    One compiled `lax.scan`; under `jax.vmap` it trains a quantizer for each head, layer or seed side by side. `x` may
    be sharded along its first axis.

    Args:
      quantizer: where training begins.
      x: vectors (n, d), or a pytree of arrays with a common first axis if the loss takes batches of such.
      key: random key of the choice of batches.
      where: the trained part of a quantizer, as `lambda q: q.inner.rotation`; its integer arrays are left as they are.
      loss: a pytree that is called with a quantizer, a batch and the progress from 0 to 1, see `rqjax.losses`; or a
        plain function.
      optimizer: optimizer of optax; if not given, Adam with a cosine schedule. It starts from `TURNING_RATE` radians
        for arrays of rotations, for others from `RATE` of the root mean square that a column has at first. A new one
        compiles anew.
      steps: batches to train on, rounded up to whole rounds of as many as lie between two evaluations.
      batch_size: vectors in a batch, drawn with repetition.
      validation: held-out data like `x`; if not given, the last eighth of `x` is held out.
      evaluations: how often the loss on `validation` is taken at most, beside once before the first step: after each
        ceil(steps / evaluations) batches, which are a round.
      patience: evaluations without a new least loss after which training stops.
      checkpoint: file that the training is written to at each evaluation, and taken up from if it exists; not under jit
        or vmap.
      progress: called after each evaluation with its step, loss and validation loss; not under jit or vmap.

    Returns:
      The trained quantizer, and the history: "step", "loss" (mean since the last evaluation) and "validation", arrays
      (rounds + 1,). After training has stopped the rows stay the same but for the step.

    Raises:
      ValueError: `where` picks no floating-point array, there are too few vectors to hold some out, or (outside jit and
        vmap) they are not finite or all the same.

    Example:
      >>> import jax, jax.numpy as jnp, rqjax
      >>> q = rqjax.rotor_chain(jax.random.key(0), dim=32, bits=3)
      >>> x = jax.random.normal(jax.random.key(1), (2000, 32))
      >>> q, history = rqjax.fit(q, x, jax.random.key(2), where=lambda q: q.inner.rotation, steps=20)
      >>> sorted(history)
      ['loss', 'step', 'validation']
    """
    picked = places(where, quantizer)
    steps, evaluations = check_int("steps", steps, 1, 2**30), check_int("evaluations", evaluations, 1, 2**20)
    patience, batch_size = check_int("patience", patience, 1, 2**20), check_int("batch_size", batch_size, 1, 2**30)
    check_data("x", x)
    if validation is None:
        held = len(jax.tree.leaves(x)[0]) // 8
        if held == 0:
            raise ValueError("expected at least 8 vectors, an eighth of which is held out; or pass validation=")
        x, validation = jax.tree.map(lambda a: a[:-held], x), jax.tree.map(lambda a: a[-held:], x)
    else:
        check_data("validation", validation)
    leaves = jax.tree.leaves(quantizer)
    _warn_if_few(x, sum(leaves[place].size for place in picked))
    turning = _turning(quantizer)
    optimizer = optimizer or _adam(steps, tuple(turning[place] for place in picked))
    plan = Plan(picked, optimizer, steps, -(-steps // evaluations), batch_size, patience)
    key = platforms.plain_key(random.as_key(key))
    inputs = quantizer, x, validation, key, Partial(loss) if all_leaves([loss]) else loss
    state = _begin(plan, leaves)
    if checkpoint is None and progress is None:
        state = _train(plan, plan.rounds, state, *inputs)
    else:
        state = _observed(plan, state, inputs, checkpoint, progress)
    return with_parameters(quantizer, picked, state.best), state.history


def _observed(plan: Plan, state: State, inputs: PyTree, checkpoint: str | Path | None, progress: Any) -> State:
    """Runs one evaluation after another, each written to `checkpoint` and told to `progress`."""
    if any(map(is_traced, jax.tree.leaves((state, inputs)))):
        raise ValueError("checkpoint and progress need a training outside jit and vmap")
    if checkpoint is not None and Path(checkpoint).exists():
        state = treefile.load(checkpoint, state)[0]
    for i in range(int(state.round), plan.rounds):
        state = _train(plan, 1, state, *inputs)
        if checkpoint is not None:
            treefile.save(state, checkpoint)
        if progress is not None:
            progress({name: float(column[i]) for name, column in state.history.items()})
    return state


def _begin(plan: Plan, leaves: list[Array]) -> State:
    params = [leaves[place] for place in plan.places]
    zero, infinite = jnp.zeros((), jnp.int32), jnp.full((), jnp.inf)
    history = {name: jnp.zeros(plan.rounds) for name in ("step", "loss", "validation")}
    return State(params, plan.optimizer.init(params), infinite, params, infinite, zero, zero, history)


@operation
def _train(
    plan: Plan, rounds: int, state: State, quantizer: Quantizer, x: PyTree, validation: PyTree, key: Key, loss: Any
) -> State:
    """Runs some rounds: an evaluation, then steps of training unless it has stopped."""
    size = len(jax.tree.leaves(x)[0])

    def value(params: list[Array], batch: PyTree, progress: ArrayLike) -> Array:
        return loss(_multiplied_out(with_parameters(quantizer, plan.places, params)), batch, progress)

    def step(carry: tuple[Any, PyTree], i: Array) -> tuple[tuple[Any, PyTree], Array]:
        params, moments = carry
        rows = random.randint(random.fold_in(key, i), (plan.batch_size,), 0, size)
        batch = jax.tree.map(lambda a: a[rows], x)
        error, gradient = jax.value_and_grad(value)(params, batch, jnp.minimum(i / plan.steps, 1))
        updates, moments = plan.optimizer.update(gradient, moments, params)
        return (optax.apply_updates(params, updates), moments), error

    def train(state: State) -> State:
        steps = state.round * plan.every + jnp.arange(plan.every)
        (params, moments), errors = lax.scan(step, (state.params, state.moments), steps)
        return state._replace(params=params, moments=moments, error=errors.mean().astype(state.error.dtype))

    def evaluate(state: State, _: None) -> tuple[State, None]:
        held = value(state.params, validation, 1.0)
        better = held < state.least
        row = {"step": state.round * plan.every, "loss": state.error, "validation": held}
        history = {name: column.at[state.round].set(row[name]) for name, column in state.history.items()}
        waits = jnp.where(better, 0, state.waits + 1)
        goes_on = (waits < plan.patience) & (state.round + 1 < plan.rounds)
        state = state._replace(
            best=jax.tree.map(lambda new, old: jnp.where(better, new, old), state.params, state.best),
            least=jnp.where(better, held, state.least),
            waits=waits,
            history=history,
        )
        state = lax.cond(goes_on, train, lambda state: state, state)
        return state._replace(round=state.round + 1), None

    return lax.scan(evaluate, state, None, rounds)[0]


def _multiplied_out(quantizer: Quantizer) -> Quantizer:
    """Makes every rotation one matrix: small rotations are then chained once a batch, not for each vector."""

    def times(rotation: Rotation, m: Array) -> Array:
        if isinstance(rotation, Chain):
            return functools.reduce(lambda m, r: times(r, m), rotation.rotations, m)
        if isinstance(rotation, StridedRotor):
            return rotation.times(m)
        matrix = rotation.matrix if isinstance(rotation, Dense) else rotation(jnp.eye(rotation.dim)).T
        return jnp.matmul(matrix, m, precision="highest")

    def dense(node: Any) -> Any:
        return Dense(times(node, jnp.eye(node.dim))) if _is_rotation(node) else node

    return jax.tree.map(dense, quantizer, is_leaf=_is_rotation)


@functools.cache
def _adam(steps: int, turning: tuple[bool, ...]) -> optax.GradientTransformation:
    """Adam with a cosine schedule; `turning` tells which parameters belong to rotations."""
    rate = optax.cosine_decay_schedule(1.0, steps)
    return optax.chain(optax.scale_by_adam(), _in_units(turning), optax.scale_by_learning_rate(rate))


def _in_units(turning: tuple[bool, ...]) -> optax.GradientTransformation:
    """Scales updates: of bivectors and angles in radians, of other arrays relative to their first size. Each column of
    levels has a size of its own, since columns may be a thousand times as loud as others."""

    def rate(array: Array, turns: bool) -> Array:
        if turns:
            return jnp.asarray(TURNING_RATE)
        size = jnp.sqrt(jnp.mean(jnp.atleast_1d(array) ** 2, axis=0))
        return RATE * jnp.where(size > 0, size, 1)

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        return jax.tree.map(jnp.multiply, updates, state), state

    return optax.GradientTransformation(lambda params: list(map(rate, params, turning)), update)


def _turning(quantizer: Quantizer) -> list[bool]:
    """Tells of each leaf whether it belongs to a rotation."""
    parts = jax.tree.leaves(quantizer, is_leaf=_is_rotation)
    return [_is_rotation(part) for part in parts for _ in jax.tree.leaves(part)]


def _is_rotation(node: Any) -> bool:
    return isinstance(node, Rotation)


def _warn_if_few(x: PyTree, parameters: int) -> None:
    numbers = sum(array.size for array in jax.tree.leaves(x))
    if numbers < PER_PARAMETER * parameters:
        warnings.warn(
            f"{len(jax.tree.leaves(x)[0])} training vectors, {numbers} numbers in all, for {parameters} parameters: "
            f"fewer than {PER_PARAMETER} for each; other vectors may fare worse",
            stacklevel=3,
        )
