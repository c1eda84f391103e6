"""Programs for a GPU say the precision of their products, and round where codes of a CPU are rounded."""

import ast
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import rqjax
from rqjax.core import PAGE
from rqjax.core.products import full_precision_einsum, rounded_to
from tests.tools import hopper, precision
from tests.tools.apple import formulated
from tests.tools.programs import DIM, TRACED, x
from tests.tools.suites import some

LIBRARY = Path(rqjax.__file__).parent
PRODUCTS = {"einsum", "matmul", "dot", "vdot", "inner", "tensordot", "dot_general", "ragged_dot", "convolve"}
CORE = ("method eden", "method turboquant_prod", "method affine", "cache v3_4+centered", "cache kvarn_2")
NUMBERS = np.concatenate(
    [
        np.random.default_rng(0).integers(0, 2**32, 20_000, dtype=np.uint32).view(np.float32),
        np.geomspace(1e-10, 1e6, 20_000, dtype=np.float32),
        np.array([0, -0.0, np.inf, -np.inf, np.nan, 65504, 65520, 2**-14, 2**-24, 2**-25], np.float32),
    ]
)


@pytest.mark.parametrize("name", some(TRACED, [*CORE, "format nvfp4", "decoder of experts", "exact attention"]))
def test_a_gpu_computes_as_a_cpu(name):
    function, operands = TRACED[name]()
    assert precision.findings(function, *operands) == []


@pytest.mark.full
@pytest.mark.skipif(not hopper.has_kernels(), reason="this jax has no kernels")
def test_a_gpu_computes_around_kernels_as_a_cpu():
    from pallas_kernels.gpu import mosaic
    from rqjax.backends import hopper as kernels

    def run(cache, tokens):
        quantizer = rqjax.METHODS["turboquant_prod"](jax.random.key(0), DIM, 3)
        decoded = rqjax.decode(quantizer, rqjax.encode(quantizer, tokens, implementation="mosaic_gpu"))
        cache = rqjax.append(cache, decoded, tokens)
        return rqjax.attend(cache, tokens[:, :1], implementation="mosaic_gpu")

    cache = rqjax.strategy("eden_3/v2_lean+centered", jax.random.key(0), DIM).cache(1, 2, 2 * PAGE)
    token = kernels.INTERPRET.set(mosaic.interpret())
    assert precision.findings(run, cache, x(1, 130, 2, DIM)) == []
    kernels.INTERPRET.reset(token)


def test_every_product_of_the_library_says_its_precision():
    """Products of integers have another type of result instead; `@` has no place for a precision."""
    wrong = []
    for path in LIBRARY.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                names = [ast.unparse(part).split(".") for part in (node.func, *node.args[:1])]
                product = any(name[0] in ("jnp", "lax") and name[-1] in PRODUCTS for name in names)
                said = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                if product and "precision" not in said and said.get("preferred_element_type") != "jnp.int32":
                    wrong.append(f"{path.relative_to(LIBRARY)}:{node.lineno}")
            elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
                wrong.append(f"{path.relative_to(LIBRARY)}:{node.lineno}")
    assert wrong == []


def narrowed(x):
    return lax.cond(x.sum() > 0, lambda x: x.astype(jnp.bfloat16), lambda x: jnp.zeros(3, jnp.bfloat16), x)


@pytest.mark.parametrize(
    ("function", "found"),
    [
        (lambda x: jnp.matmul(x, x), ["product of float32 without a precision"]),
        (lambda x: jnp.matmul(x, x, precision="highest"), []),
        (lambda x: jnp.matmul(x.astype(jnp.bfloat16), x.astype(jnp.bfloat16)), []),
        (lambda x: lax.scan(lambda y, _: (y * jnp.dot(y, x), None), x, None, 3), ["product of float32"]),
        (lambda x: jnp.sin(x.astype(jnp.bfloat16).reshape(3, 1).astype(jnp.float32)), ["rounded to bfloat16, widened"]),
        (lambda x: narrowed(x).astype(jnp.float32) + 1, ["rounded to bfloat16, widened"]),
        (lambda x: x.astype(jnp.float16).astype(jnp.float32), ["rounded to float16, widened again for a result"]),
        (lambda x: jnp.sin(x.astype(jnp.float16)), []),
        (lambda x: jnp.sin(rounded_to(x, "float16").astype(jnp.float32)), []),
        (lambda x: jnp.sin(rounded_to(x.astype(jnp.bfloat16), "bfloat16").astype(jnp.float32)), []),
        (lambda x: jnp.sin(lax.reduce_precision(x, 8, 10).astype("bfloat16").astype("float32")), ["rounded to bfloat"]),
    ],
)
def test_other_programs_are_found(function, found):
    places = precision.findings(function, x(3))
    assert len(places) == len(found)
    assert all(text in place for place, text in zip(places, found, strict=True))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float32"])
def test_rounding_is_that_of_a_conversion(dtype):
    """It is, whether or not XLA removes the conversion, and of subnormal numbers, too."""
    largest = np.float32(jnp.finfo(dtype).max)
    numbers = np.clip(NUMBERS, -largest, largest) if dtype == "float8_e4m3fn" else NUMBERS
    with np.errstate(over="ignore", invalid="ignore"):
        expected = numbers.astype(jnp.dtype(dtype)).astype(np.float32)
    with formulated("gpu"):
        found = jax.jit(lambda x: rounded_to(x, dtype))(numbers).astype(jnp.float32)
    np.testing.assert_array_equal(found, expected)


def test_a_cpu_keeps_conversions():
    """There `rounded_to` relies on it."""
    there_and_back = lambda x: x.astype(jnp.bfloat16).astype(jnp.float32)  # noqa: E731
    x = NUMBERS[20_000:40_000]
    np.testing.assert_array_equal(jax.jit(there_and_back)(x), x.astype(jnp.bfloat16).astype(np.float32))


def test_products_with_bfloat16_have_all_bits_of_the_queries():
    rng = np.random.default_rng(0)
    y, x = rng.standard_normal((1, 1, 4, 64)).astype(np.float32), rng.standard_normal((1, 1, 9, 64))
    x = jnp.asarray(x, jnp.bfloat16)
    with formulated("gpu"):
        found = jax.jit(lambda y, x: full_precision_einsum("bhrd,bhtd->bhrt", y, x))(y, x)
    expected = np.einsum("bhrd,bhtd->bhrt", y.astype(np.float64), np.asarray(x, np.float64))
    np.testing.assert_allclose(found, expected, atol=2e-6)
