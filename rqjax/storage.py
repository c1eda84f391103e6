"""Quantizers, caches and indexes on disk."""

import os

import jax
from jaxtyping import PyTree

from rqjax.cache.kv import KVCache
from rqjax.core import treefile, unknown_name
from rqjax.recipes import klt, learned, oscar, vector_quantizers  # noqa: F401  # they fill FITTED
from rqjax.recipes.fitted import FITTED
from rqjax.recipes.methods import METHODS


def save(tree: PyTree, path: str | os.PathLike[str], *, recipe: str | None = None) -> None:
    """Writes a quantizer, a cache with its quantizers, or a tuple of such. A file that was there is replaced at once or
    stays as it was.

    Args:
      tree: the quantizer, cache or tuple.
      path: path of the file.
      recipe: name of the entry of `METHODS` or `FITTED` that made a quantizer, to be kept with it.

    Raises:
      UnknownName: there is no such recipe.
      ValueError: an `append` under jit went past `max_len` of a cache.

    Example:
      >>> import jax, jax.numpy as jnp, rqjax
      >>> rqjax.save(rqjax.eden(jax.random.key(0), 64, 3), "q.safetensors", recipe="eden")
      >>> rqjax.load("q.safetensors")
      Scaled(Rotated(Dense(64), Scalar(3 bits)))
    """
    for part in jax.tree.leaves(tree, is_leaf=lambda part: isinstance(part, KVCache)):
        if isinstance(part, KVCache):
            part.check()
    _check_recipe(recipe)
    treefile.save(tree, path, packed=False, **({} if recipe is None else {"recipe": recipe}))


def load(path: str | os.PathLike[str], like: PyTree = None) -> PyTree:
    """Reads a quantizer, a cache or a tuple that `save` wrote.

    Args:
      path: path of the file.
      like: if given, the file must have its fields: an empty cache, or `jax.eval_shape` of it.

    Raises:
      FileNotFoundError: there is no such file.
      UnknownName: the file is of a recipe, or has a part, that there is not.
      ValueError: the file is torn, not of this library, or has other fields than `like`; the first difference is named.

    Example:
      >>> import jax, jax.numpy as jnp, rqjax
      >>> rqjax.save(rqjax.Exact(64), "exact.safetensors")
      >>> rqjax.load("exact.safetensors")
      Exact(64)
    """
    tree, metadata = treefile.load(path, like)
    _check_recipe(metadata.get("recipe"))
    return tree


def recipe(path: str | os.PathLike[str]) -> str | None:
    """The name of the recipe that a file was saved with."""
    return treefile.metadata(path).get("recipe")


def _check_recipe(name: str | None) -> None:
    if name is not None and name not in METHODS and name not in FITTED:
        raise unknown_name("recipe", name, [*METHODS, *FITTED])
