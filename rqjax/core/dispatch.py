"""Dispatch of operations: the body in plain JAX, or a kernel that a backend has for it.

The body of an operation is its reference, its fallback and its derivative. A backend registers a finder for an
operation and the class of its first argument. The finder returns a kernel, or refuses with the reason. Nothing here
knows a quantizer or a kernel.
"""

import functools
import inspect
from collections.abc import Callable, Hashable
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters.partial_eval import DynamicJaxprTracer
from jaxtyping import PyTree

from rqjax.core import platforms
from rqjax.core.checks import as_array
from rqjax.core.registry import nest, unknown_name

Result = TypeVar("Result", covariant=True)
Function = TypeVar("Function", bound=Callable[..., Any])

IMPLEMENTATIONS = {"xla"}
"""Names of implementations: plain JAX, and each backend that has registered a kernel."""
CONTEXT: list[Callable[[], Hashable]] = [platforms.platform, platforms.CAPABILITY.get]
"""Functions whose values tracing depends on beside the arguments; a change of one compiles anew."""
_ONLY_XLA: ContextVar[bool] = ContextVar("only_xla", default=False)


class Unsupported(ValueError):
    """Error where no kernel can compute an operation; the message says why."""


class Refusal(NamedTuple):
    """Answer of a finder that has no kernel for some arguments."""

    reason: str


class Kernel(NamedTuple):
    """Kernel of a backend for an operation on a class."""

    find: Callable[..., Callable[..., Any] | Refusal]
    """Called with the operation's arguments: returns what computes it, or a refusal."""
    rows: bool
    """True if leading axes of the other arguments are independent rows, so that `jax.vmap` may add one."""


@runtime_checkable
class Operation(Protocol[Result]):
    """Function or method that backends may have kernels for; `operation` makes it."""

    __name__: str
    kernels: dict[type, dict[str, Kernel]]
    """Kernels by class of the first argument, then by implementation, in the order in which they are asked."""
    vectors: bool
    """True if the second argument holds vectors, or lists of numbers in their place."""

    def __call__(self, *args: Any, **options: Any) -> Result: ...

    def __get__(self, instance: Any, owner: Any = None, /) -> "Operation[Result]": ...

    def kernel(self, implementation: str, *classes: type, rows: bool = False) -> Callable[[Function], Function]:
        """Decorates the finder of an implementation's kernel for classes of the first argument; see `Kernel`."""
        ...


def operation(body: Callable[..., Result], *, of: Any = None, vectors: bool = False) -> Operation[Result]:
    """Decorates a function or method of arrays, pytrees and hashable options that backends may have kernels for.

    Called outside jit it is compiled once for each shape, dtype, option and context; within jit it is a part of what is
    compiled there. What it returns takes one argument more:

      implementation: the name of a backend for its kernel, "xla" for none, None for the kernel wherever there is one.

    Args:
      body: the operation in plain JAX.
      of: operation whose kernels this body shares; a new operation if not given.
      vectors: whether the second argument holds vectors; it may be of lists of numbers, too.

    Raises:
      Unsupported: the kernel that is asked for cannot be used; the message says why.
      UnknownName: no backend of this name has registered a kernel.

    Example:
      >>> import jax.numpy as jnp
      >>> from rqjax.core import Refusal, operation
      >>> doubled = operation(lambda scale, x: 2 * scale * x)
      >>> @doubled.kernel("my_device", float)
      ... def find(scale, x):
      ...     return Refusal("only of whole numbers") if x.dtype != "int32" else lambda scale, x: x << 1
      >>> doubled(1.0, jnp.arange(3)), doubled(1.0, jnp.arange(3.0))
      (Array([0, 2, 4], dtype=int32), Array([0., 2., 4.], dtype=float32))
    """
    if isinstance(body, Operation):
        return body
    kernels: dict[type, dict[str, Kernel]] = {} if of is None else of.kernels
    vectors = vectors if of is None else of.vectors
    signature = inspect.signature(body)

    @functools.wraps(body)
    def run(*args, implementation=None, **options):
        if implementation is not None and implementation not in IMPLEMENTATIONS:
            raise unknown_name("implementation", implementation, sorted(IMPLEMENTATIONS))
        if not args:  # all by name
            bound = signature.bind(**options)
            args, options = bound.args, bound.kwargs
        if vectors and len(args) > 1:
            args = (args[0], as_array(args[1]), *args[2:])
        asked = "xla" if _ONLY_XLA.get() else implementation
        parts = _Parts.of(args, options)
        if any(isinstance(leaf, DynamicJaxprTracer) for leaf in (*parts.own, *parts.others)):
            return _run(run, asked, args, options)
        return _compiled(run, asked, tuple(part() for part in CONTEXT), *parts)

    def kernel(implementation: str, *classes: type, rows: bool = False) -> Callable[[Function], Function]:
        def registered(find: Function) -> Function:
            IMPLEMENTATIONS.add(implementation)
            for cls in classes:
                kernels.setdefault(cls, {})[implementation] = Kernel(find, rows)
            return find

        return registered

    more = inspect.Parameter("implementation", inspect.Parameter.KEYWORD_ONLY, default=None)
    parameters = sorted([*signature.parameters.values(), more], key=lambda parameter: parameter.kind)
    signed = signature.replace(parameters=parameters)
    run.__name__ = body.__name__ if of is None else of.__name__
    vars(run).update(__signature__=signed, kernels=kernels, vectors=vectors, kernel=kernel)
    return run  # pyright: ignore[reportReturnType]


def only_xla(function: Function) -> Function:
    """Wraps `function` so that no kernel computes an operation in it."""

    @functools.wraps(function)
    def run(*args, **options):
        token = _ONLY_XLA.set(True)
        try:
            return function(*args, **options)
        finally:
            _ONLY_XLA.reset(token)

    return run  # pyright: ignore[reportReturnType]


class _Parts(NamedTuple):
    """Arguments taken apart: arrays of the first one, arrays of the others, and the hashable rest."""

    own: list[Any]
    others: list[Any]
    rest: Any

    @classmethod
    def of(cls, args: Any, options: Any) -> "_Parts":
        leaves, structure = jax.tree.flatten((args, options))
        leaves = [
            leaf if isinstance(leaf, jax.Array) or not hasattr(leaf, "__array__") else as_array(leaf) for leaf in leaves
        ]
        count = len(jax.tree.leaves(args[:1]))
        arrays = [leaf if isinstance(leaf, jax.Array | np.ndarray | np.generic) else None for leaf in leaves]
        # With their types: 1 is True is 1.0 to a dictionary.
        statics = [(type(leaf), leaf) if x is None else None for x, leaf in zip(arrays, leaves, strict=True)]
        return cls(arrays[:count], arrays[count:], (structure, tuple(statics)))

    def joined(self) -> Any:
        structure, statics = self.rest
        arrays = [*self.own, *self.others]
        return jax.tree.unflatten(structure, [s[1] if s else x for x, s in zip(arrays, statics, strict=True)])


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 5), inline=True)
def _compiled(run: Any, asked: str | None, context: Hashable, own: Any, others: Any, rest: Hashable) -> PyTree:
    args, options = _Parts(own, others, rest).joined()
    return _run(run, asked, args, options)


def _run(run: Any, asked: str | None, args: Any, options: Any) -> PyTree:
    body = run.__wrapped__
    if asked == "xla":
        return only_xla(body)(*args, **options)
    kernels: dict[str, Kernel] = {}
    for base in reversed(type(args[0]).__mro__):
        own = isinstance(vars(base).get(run.__name__), Operation)  # whose body is not that of the classes before
        kernels = ({} if own else kernels) | run.kernels.get(base, {})
    if asked is not None and asked not in kernels:
        raise Unsupported(f"there is no {asked} kernel to {run.__name__.strip('_')} {nest(args[0])}")
    for implementation, kernel in kernels.items():
        if asked in (None, implementation):
            found = kernel.find(*args, **options)
            if not isinstance(found, Refusal):
                return _differentiable(found, body, kernel.rows, _Parts.of(args, options))
            if asked is not None:
                raise Unsupported(found.reason)
    return body(*args, **options)


def _differentiable(run: Callable[..., Any], body: Callable[..., Any], rows: bool, parts: _Parts) -> PyTree:
    """Runs `run` with the derivative of `body`. A batched first argument (a quantizer a head) runs one by one."""

    def called(function: Callable[..., Any], own: Any, others: Any) -> PyTree:
        args, options = _Parts(own, others, parts.rest).joined()
        return function(*args, **options)

    @jax.custom_batching.custom_vmap
    def batched(own, others):
        return called(run, own, others)

    @batched.def_vmap
    def rule(axis_size, in_batched, own, others):
        first, second = map(jax.tree.leaves, in_batched)
        if rows and not any(first) and all(second):
            out = batched(own, others)
        else:
            axes = [0 if b else None for b in (*first, *second)]
            leaves, structure = jax.tree.flatten((own, others))
            pick = lambda i: [x if a is None else x[i] for x, a in zip(leaves, axes, strict=True)]  # noqa: E731
            out = jax.lax.map(lambda i: batched(*jax.tree.unflatten(structure, pick(i))), jnp.arange(axis_size))
        return out, jax.tree.map(lambda _: True, out)

    @jax.custom_jvp
    def function(own, others):
        return batched(own, others)

    @function.defjvp
    def derivative(arrays, tangents):
        found = function(*arrays)
        again = jax.checkpoint(lambda *arrays: called(only_xla(body), *arrays))  # keeps nothing but the arguments
        return found, jax.tree.map(_as_tangent, found, jax.jvp(again, arrays, tangents)[1])

    return function(parts.own, parts.others)


def _as_tangent(found: Any, tangent: Any) -> Any:
    """A tangent of the body's result as one of the kernel's, which may be of another dtype."""
    return tangent.astype(found.dtype) if jnp.issubdtype(found.dtype, jnp.floating) else tangent
