"""The decorator that makes a quantizer a pytree: arrays are leaves, hyper-parameters are static."""

import ast
import contextlib
import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable
from typing import Any, TypeVar, dataclass_transform

import jax
import jax.export

T = TypeVar("T")
CLASSES: dict[str, type] = {}
"""All pytrees by name, for files that name them."""


def static(**kwargs: Any) -> Any:
    """A dataclass field that belongs to the tree's structure: compiled in, never traced. It must be hashable."""
    return dataclasses.field(metadata={"static": True}, **kwargs)


def derived(compute: Callable[[Any], Any]) -> Any:
    """A dataclass field that follows from the others: `with_derived` computes it. None stands for one that was not
    computed. Files leave it out."""
    return dataclasses.field(default=None, metadata={"derived": compute}, kw_only=True)


def derived_fields(part: Any) -> list[dataclasses.Field]:
    """The `derived` fields of a dataclass; none of anything else."""
    return [f for f in dataclasses.fields(part) if "derived" in f.metadata] if dataclasses.is_dataclass(part) else []


def without_derived(part: Any) -> Any:
    """Returns a dataclass with None for its derived fields, anything else as it is."""
    names = [field.name for field in derived_fields(part)]
    return dataclasses.replace(part, **dict.fromkeys(names)) if names else part


def with_derived(part: Any) -> Any:
    """Returns a dataclass with its derived fields computed, anything else as it is."""
    bare, fields = without_derived(part), derived_fields(part)
    return dataclasses.replace(bare, **{f.name: f.metadata["derived"](bare) for f in fields}) if fields else part


def described(tree: Any) -> str:
    """Describes a pytree as `Normalized(Rotated(Rotor(128), Scalar(3 bits)))`: its quantizers and rotations, and
    options that are not the default. One without parts has its bits or its dimension; one without these has its arrays'
    dtypes and shapes.
    """
    fields = [(field, getattr(tree, field.name)) for field in dataclasses.fields(tree)]
    values = [part for _, value in fields for part in (value if isinstance(value, tuple) else (value,))]
    shown = [repr(part) for part in values if dataclasses.is_dataclass(part) and hasattr(part, "dim")]
    bits, dim = getattr(tree, "bits", None), None if shown else getattr(tree, "dim", None)
    if isinstance(bits, int):
        shown.append(f"{bits} bits")
    elif isinstance(dim, int):
        shown.append(str(dim))
    elif not shown:
        shown = [f"{part.dtype}{list(part.shape)}" for part in values if hasattr(part, "shape")]
    options = {f.name: value for f, value in fields if type(value) in (str, int, float) and value != f.default}
    shown += [f"{name}={value!r}" for name, value in options.items() if name not in ("bits", "dim")]
    return f"{type(tree).__name__}({', '.join(shown)})"


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field, static))
def pytree(cls: type[T]) -> type[T]:
    """Makes `cls` a frozen dataclass and registers it as a pytree.

    `jax.tree_util.register_dataclass` calls `__init__` to unflatten. That rejects the placeholders which `vmap`,
    `eval_shape` and tree transposition put in the leaves as soon as `__init__` checks its arguments, so the object is
    made without it. Comparison is by identity: arrays have no truth value.

    Example:
      >>> import jax, rqjax
      >>> @rqjax.pytree
      ... class Scale:
      ...     factor: jax.Array
      ...     name: str = rqjax.static(default="x")
      >>> len(jax.tree.leaves(Scale(jax.numpy.ones(3))))
      1
    """
    cls = dataclasses.dataclass(frozen=True, eq=False, repr=False)(cls)
    cls.__init__ = _explained(cls)
    if cls.__repr__ is object.__repr__:
        cls.__repr__ = described  # pyright: ignore[reportAttributeAccessIssue]
    fields = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
    leaves = [f.name for f in fields if not f.metadata.get("static")]
    statics = [f.name for f in fields if f.metadata.get("static")]
    children_of, values_of = _getter(leaves), _getter(statics)

    def flatten(tree):
        return children_of(tree), values_of(tree)

    def flatten_with_keys(tree):
        children, values = flatten(tree)
        return list(zip(map(jax.tree_util.GetAttrKey, leaves), children, strict=True)), values

    def unflatten(values, children):
        tree = object.__new__(cls)
        for name, value in zip([*statics, *leaves], [*values, *children], strict=True):
            object.__setattr__(tree, name, value)
        return tree

    known, own = CLASSES.get(cls.__name__, cls).__module__, cls.__module__
    if known.startswith("rqjax.") and not own.startswith("rqjax."):  # files of that class could not be read any more
        raise ValueError(f"expected a name that no class of rqjax has, since files go by it, got {cls.__name__}")
    CLASSES[cls.__name__] = cls
    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    exportable(cls, lambda values: values, lambda values: values)
    return cls


def _explained(cls: type) -> Callable[..., None]:
    """Wraps the constructor of a dataclass so that its error about arguments says which there are."""
    made = cls.__init__

    @functools.wraps(made)
    def init(self, *args, **options):
        try:
            made(self, *args, **options)
        except TypeError as error:
            if error.__traceback__ and error.__traceback__.tb_next:  # it comes from within
                raise
            parameters = [p.replace(annotation=p.empty) for p in inspect.signature(cls).parameters.values()]
            raise TypeError(f"expected {cls.__name__}{inspect.Signature(parameters)}: {error}") from None

    return init


def exportable(cls: type, values_of: Callable[[Any], Any], made: Callable[[Any], Any]) -> None:
    """Lets `jax.export` write functions that take or return a registered pytree. Its static part is written as the
    Python literals `values_of` it, and `made` again of them. If two classes have one name, as where a notebook's cell
    runs twice, the first counts."""

    def written(part: Any) -> bytes:
        text = repr(values_of(part))
        try:
            ast.literal_eval(text)
        except (ValueError, SyntaxError):
            raise ValueError(f"expected numbers and texts to export in a {cls.__name__}, got {text}") from None
        return text.encode()

    name = f"{cls.__module__}.{cls.__qualname__}"
    with contextlib.suppress(ValueError):
        jax.export.register_pytree_node_serialization(
            cls,
            serialized_name=name,
            serialize_auxdata=written,
            deserialize_auxdata=lambda data: made(ast.literal_eval(data.decode())),
        )


def _getter(names: list[str]) -> Callable[[Any], tuple]:
    """Getter of an object's attributes as a tuple, a fast one: each call of a jitted function takes apart its
    arguments."""
    if len(names) > 1:
        return operator.attrgetter(*names)
    return lambda tree: tuple(getattr(tree, name) for name in names)
