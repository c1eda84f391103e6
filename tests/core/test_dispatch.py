"""Dispatch: which backend computes an operation, and how often it is compiled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rqjax
from rqjax.core import Quantizer, Refusal, Unsupported, dispatch, operation, pytree

KEY = jax.random.key(0)


def calls():
    """Operations called outside jit, each with arguments of one shape but of new numbers each time."""
    x = lambda seed, *shape: np.random.default_rng(seed).standard_normal((*shape, 64)).astype(np.float32)  # noqa: E731
    for name in ("turboquant_prod", "affine_rotated"):
        quantizer = rqjax.METHODS[name](KEY, 64, 3)
        codes = quantizer.encode(x(0, 100))
        yield f"encode {name}", lambda seed, q=quantizer: q.encode(x(seed, 100))
        yield f"decode {name}", lambda seed, q=quantizer, codes=codes: q.decode(codes)
        yield f"dot {name}", lambda seed, q=quantizer, codes=codes: q.dot(x(seed, 5), codes)
    cache = rqjax.append(rqjax.strategy("v3_3.5", KEY, 64).cache(2, 2, 256, window=16), *[x(1, 2, 60, 2)] * 2)
    yield "append", lambda seed: rqjax.append(cache, x(seed, 2, 1, 2), x(seed, 2, 1, 2))
    yield "attend", lambda seed: rqjax.attend(cache, x(seed, 2, 1, 4))
    index = rqjax.Index.build(quantizer, x(2, 300), store=rqjax.Exact(64))
    yield "search", lambda seed: index.search(x(seed, 3), 5, rerank=10)


@pytest.mark.full
def test_the_second_call_outside_jit_compiles_nothing(caplog):
    def compiled():
        return [record.message for record in caplog.records if "Finished XLA compilation" in record.message]

    with jax.log_compiles():
        jax.jit(lambda x: x + 1)(jnp.ones(3))
        assert compiled()
        for name, call in calls():
            call(1)
            caplog.clear()
            call(2)
            assert compiled() == [], name


class Toy:
    """A static argument, not a pytree."""


@operation
def shifted(first, x, *, by=1):
    return x + by


def test_bodies_kernels_and_refusals():
    x = jnp.arange(3.0)
    np.testing.assert_array_equal(shifted(Toy(), x, by=2), x + 2)
    with pytest.raises(Unsupported, match="there is no mps kernel to shifted Toy"):
        shifted(Toy(), x, implementation="mps")
    with pytest.raises(rqjax.UnknownName, match="unknown implementation 'msp'; did you mean 'mps'"):
        shifted(Toy(), x, implementation="msp")

    @shifted.kernel("mps", Toy)
    def find(first, x, *, by=1):
        return Refusal("only by 1") if by != 1 else lambda first, x: x + 100

    toy = Toy()
    try:
        np.testing.assert_array_equal(shifted(x=x, first=toy), x + 100)
        np.testing.assert_array_equal(shifted(toy, x), x + 100)
        np.testing.assert_array_equal(jax.jit(lambda x: shifted(toy, x))(x), x + 100)
        np.testing.assert_array_equal(shifted(toy, x, implementation="xla"), x + 1)
        np.testing.assert_array_equal(dispatch.only_xla(shifted)(toy, x, implementation="mps"), x + 1)
        np.testing.assert_array_equal(shifted(toy, x, by=3), x + 3)
        with pytest.raises(Unsupported, match="only by 1"):
            shifted(toy, x, by=3, implementation="mps")
    finally:
        del shifted.kernels[Toy]


@pytree
class Halves(Quantizer):
    """Codes are halves: a method that overrides an operation."""

    dim: int = rqjax.static()

    def encode(self, x):
        return x / 2

    def decode(self, codes):
        return codes * 2


class HalvesToo(Halves):
    """Has the methods of the class that it inherits, and their kernels."""


class Quarters(Halves):
    """Overrides a method, so that no kernel of the class that it inherits computes it."""

    def decode(self, codes):
        return 4 * codes


@operation
def _decode(quantizer, codes):
    """Shares the name of `Quantizer.decode` and nothing else."""
    return codes


def test_kernels_belong_to_an_operation_and_to_no_name():
    x = jnp.ones((2, 3))
    Quantizer.decode.kernel("mps", Halves)(lambda quantizer, codes, **_: lambda quantizer, codes, **_: codes + 100)
    try:
        for quantizer in (Halves(3), HalvesToo(3)):
            np.testing.assert_array_equal(quantizer.decode(x), x + 100)
            np.testing.assert_array_equal(rqjax.decode(quantizer, x, implementation="mps"), x + 100)
            np.testing.assert_array_equal(quantizer.decode(x, implementation="xla"), x * 2)
            np.testing.assert_array_equal(_decode(quantizer, x), x)
            with pytest.raises(Unsupported, match="there is no mps kernel to decode Halves"):
                _decode(quantizer, x, implementation="mps")
            with pytest.raises(Unsupported, match="there is no mps kernel to encode Halves"):
                rqjax.encode(quantizer, x, implementation="mps")
        np.testing.assert_array_equal(Quarters(3).decode(x), x * 4)
        with pytest.raises(Unsupported, match="there is no mps kernel to decode Quarters"):
            rqjax.decode(Quarters(3), x, implementation="mps")
    finally:
        del Quantizer.decode.kernels[Halves]


def test_options_of_equal_value_are_not_taken_for_each_other():
    """Options are told apart by type: to a dictionary True is 1 is 1.0."""
    x = jnp.arange(3)
    assert [shifted(Toy, x, by=by).dtype for by in (1, 1.0, True)] == ["int32", "float32", "int32"]
