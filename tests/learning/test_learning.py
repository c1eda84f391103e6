"""Training: what it must reach on held-out vectors, what it minimizes, and how it stops, resumes and refuses."""

import functools
import os
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import rqjax
from experiments.data import samples
from rqjax import learning
from rqjax.learning import losses
from rqjax.recipes import klt, learned
from rqjax.rotations import Chain, Permutation, Rotor, StridedRotor, butterfly
from tests.tools.suites import some

DIM, BITS = 32, 3
measure = jax.jit(lambda q, x: rqjax.metrics.relative_mse(x, q.decode(q.encode(x))))
KEY = jax.random.key(0)


def vectors(name, n, dim=DIM):
    return samples.sample(name, 1, n, dim)[0]


def start(key=KEY, dim=DIM, bits=BITS):
    return rqjax.Normalized(rqjax.Rotated(Rotor.random(key, dim), rqjax.lloyd_max(dim, bits)))


def bivectors(quantizer):
    return quantizer.inner.rotation.bivectors


@functools.cache
def outliers():
    with jax.ensure_compile_time_eval():  # whoever asks first, under jit too
        return vectors("outlier_channels", 1200)


def fit(quantizer, x=None, **options):
    x = outliers() if x is None else x
    options = {"where": bivectors, "steps": 40, "evaluations": 4, "batch_size": 64, **options}
    return learning.fit(quantizer, x, KEY, **options)


@pytest.mark.full
def test_learned_rotors_and_permutation_on_loud_channels():
    """Error is at most 0.75 of the mean of eight random rotors (d = 128, 3 bits, held out). Learned levels beat
    Haar."""
    x = vectors("outlier_channels", 4000, 128)
    train, test = x[:3000], x[3000:]
    keys = jax.random.split(jax.random.key(1), 8)

    @jax.jit
    @jax.vmap
    def references(key):
        made = (rqjax.turboquant(key, 128, BITS), start(key, 128))
        return [rqjax.metrics.relative_mse(test, q.decode(q.encode(test))) for q in made]

    haar, rotors = (np.mean(errors) for errors in references(keys))
    rotor = Rotor.random(KEY, 128)
    order = Permutation.balanced((train**2).mean(0), rotor.groups)
    quantizer = rqjax.Normalized(rqjax.Rotated(Chain((order, rotor)), rqjax.lloyd_max(128, BITS)))
    learned, history = learning.fit(quantizer, train, KEY, where=lambda q: q.inner.rotation, steps=300)
    assert history["validation"].min() < history["validation"][0]
    assert measure(learned, test) < 0.75 * rotors
    assert rqjax.rotations.orthogonality_error(learned.inner.rotation) < 1e-5
    recipe = rqjax.rotorquant_learned(KEY, train, BITS)
    assert recipe.bits_per_vector == 3 * 128 + 16
    assert measure(recipe, test) < haar


@pytest.mark.full
def test_allocated_bits_on_loud_channels(tmp_path):
    """Error is at most 0.35 of `turboquant` at the same bits, held out, with a trellis 0.25; loading changes
    nothing."""
    x = vectors("outlier_channels", 3000)
    train, test = x[:2400], x[2400:]
    quantizer = rqjax.rotorquant_allocated(KEY, train, BITS)
    dense = rqjax.turboquant(KEY, DIM, BITS)
    assert quantizer.bits_per_vector == dense.bits_per_vector == 3 * DIM + 16
    assert measure(quantizer, test) < 0.35 * measure(dense, test)
    assert rqjax.rotations.orthogonality_error(quantizer.rotation) < 1e-5
    trellis = learned._with_trellis(quantizer, train)
    assert trellis.bits_per_vector == quantizer.bits_per_vector
    assert measure(trellis, test) < 0.25 * measure(dense, test)
    rqjax.save(quantizer, tmp_path / "q.safetensors", recipe="rotorquant_allocated")
    again = rqjax.load(tmp_path / "q.safetensors")
    assert jax.tree.structure(again) == jax.tree.structure(quantizer)
    np.testing.assert_array_equal(again.encode(test), quantizer.encode(test))


@pytest.mark.full
def test_principal_axes_with_a_trellis():
    """The same bits as `turboquant`: a quarter of its error where variances differ, half where all are equal."""
    x, sphere, dense = vectors("outlier_channels", 2400), vectors("sphere", 2400), rqjax.turboquant(KEY, DIM, BITS)
    quantizer, plain = (rqjax.klt_trellis(KEY, train[:2000], BITS) for train in (x, sphere))
    assert quantizer.bits_per_vector == dense.bits_per_vector
    assert measure(quantizer, x[2000:]) < 0.25 * measure(dense, x[2000:])
    assert rqjax.rotations.orthogonality_error(quantizer.inner.rotation) < 1e-5
    assert isinstance(plain.inner.inner, rqjax.Trellis)
    assert measure(plain, sphere[2000:]) < 0.65 * measure(dense, sphere[2000:])
    assert rqjax.klt_trellis(KEY, x, BITS - 16 / DIM).bits_per_vector == BITS * DIM
    heads = rqjax.klt_trellis(KEY, jnp.stack([x, x[:, ::-1]]), BITS)
    errors = [measure(jax.tree.map(lambda leaf, i=i: leaf[i], heads.inner), x[:, :: (1, -1)[i]]) for i in range(2)]
    assert max(errors) < 0.25 * measure(dense, x)


@pytest.mark.parametrize(("dim", "total", "alike"), [(64, 128, 8), (64, 160, 8), (64, 124, 4), (20, 50, 2)])
def test_neighboring_coordinates_have_equal_bits(dim, total, alike):
    """Groups are of eight coordinates, or of the most fewer that divide both the coordinates and the bits."""
    bits = np.array(klt._allocated(jnp.geomspace(1, 1e-4, dim) * jnp.array([[1], [2]]), total))
    assert bits.sum() == total
    assert (np.diff(bits) <= 0).all()
    assert len(set(bits.tolist())) > 1
    assert (bits.reshape(-1, alike) == bits[::alike, None]).all()


@pytest.mark.full
def test_principal_axes_are_chosen_on_held_out_vectors():
    """Few vectors without structure get no transform code, though it seems the best on those that made the axes."""
    assert isinstance(rqjax.klt_trellis(KEY, vectors("sphere", 48), 2).inner.inner, rqjax.Trellis)


@pytest.mark.full
def test_a_mean_is_worth_a_transform_code():
    """Vectors that differ by little from a large mean are not coded by `turboquant_trellis`, which knows no mean."""
    quantizer, x = rqjax.klt_trellis(KEY, vectors("sphere", 2000) + 10, 2), vectors("sphere", 256) + 10
    assert isinstance(quantizer.inner.inner, rqjax.TrellisPerCoordinate)
    assert jnp.mean((quantizer.decode(quantizer.encode(x)) - x) ** 2) * DIM < 0.1


@pytest.mark.full
def test_recipes_fit_each_head():
    """Heads with different loud channels, side by side."""
    x = jnp.stack([vectors("outlier_channels", 600), vectors("outlier_channels", 600)[:, ::-1]])
    quantizer = rqjax.FITTED["rotor_chain_learned"](KEY, x, 2)
    assert isinstance(quantizer, rqjax.PerHead)
    assert quantizer.heads == 2
    assert quantizer.bits_per_vector == 2 * DIM + 16
    errors = [measure(jax.tree.map(lambda leaf, i=i: leaf[i], quantizer.inner), x[i]) for i in range(2)]
    assert max(errors) < 0.116  # Lloyd-Max's at 2 bits


@pytest.mark.full
def test_codes_held_fixed_give_the_gradient_of_the_least_error():
    """The envelope theorem: differences of the error itself, encoding anew, have the gradient of decoding alone."""
    x, quantizer = outliers()[:1000], start()

    @jax.jit
    def error(b):
        return losses.Distortion()(rqjax.parameters(quantizer, bivectors)[1]([b]), x)

    at = bivectors(quantizer)
    gradient = jax.jit(jax.grad(error))(at)
    step = 0.02 * gradient / jnp.linalg.norm(gradient)
    np.testing.assert_allclose((error(at + step) - error(at - step)) / 0.04, jnp.linalg.norm(gradient), rtol=0.02)


def test_relaxed_to_the_nearest_levels_is_what_codes_decode_to():
    quantizer = rqjax.Scaled(rqjax.Rotated(Rotor.random(KEY, DIM), rqjax.lloyd_max(DIM, BITS)))
    columns = rqjax.PerCoordinate.gaussian(jnp.zeros(DIM), jnp.ones(DIM), (4,) * 8 + (3,) * 16 + (0,) * 8)
    nests = [quantizer, rqjax.Centered(jnp.ones(DIM), rqjax.Gain(jnp.full(DIM, 1 / DIM), columns))]

    def nearest(y, levels):
        levels = jnp.broadcast_to(levels.reshape(len(levels), -1), (len(levels), y.shape[-1]))
        index = jnp.abs(y[:, None] - levels).argmin(axis=1)
        return jnp.take_along_axis(levels, index, axis=0)

    @jax.jit
    def errors(q):
        x = outliers()
        return losses.Distortion()(q, x), losses.Distortion().error(x, q.relaxed(x, nearest))

    for hard, relaxed in map(errors, nests):
        np.testing.assert_allclose(relaxed, hard, rtol=0.02)
    with pytest.raises(TypeError, match=r"expected norms, .* around a Scalar or PerCoordinate .*, got Affine"):
        losses.CodingGain()(rqjax.rtn(KEY, DIM, 3), outliers())


QUERIES = np.float32(np.random.default_rng(7).standard_normal((100, DIM)) * np.linspace(0, 2, DIM))
LOSSES = {
    "distortion": lambda: losses.Distortion(),
    "coding_gain": lambda: losses.CodingGain(),
    "scores": lambda: losses.ScoreError.of(jnp.asarray(QUERIES)),
}


@pytest.mark.full
@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_falls(name):
    loss = LOSSES[name]()
    x = outliers() @ jnp.eye(DIM)[::-1]
    before = start().inner.rotation
    learned, history = fit(start(), x, loss=loss, where=lambda q: q.inner.rotation)
    assert history["validation"][0] == pytest.approx(float(loss(start(), x[-150:])), rel=1e-3)
    assert history["validation"].min() < 0.97 * history["validation"][0]
    assert np.isfinite(history["loss"][1:]).all()
    assert jnp.abs(learned.inner.rotation.bivectors - before.bivectors).max() > 0.05


@pytest.mark.full
def test_batches_of_pytrees():
    """Values with the weights of their tokens, and a plain function as a loss."""
    batch = outliers(), jnp.linspace(0, 1, len(outliers()))
    loss = losses.OutputError()
    learned, _ = fit(start(), batch, loss=loss, patience=20)
    assert loss(learned, batch) < loss(start(), batch)
    same, _ = fit(start(), batch, loss=lambda q, batch, progress: loss(q, batch), patience=20)
    np.testing.assert_array_equal(bivectors(same), bivectors(learned))
    fit(start(), (batch[0], jnp.ones(len(batch[0]))), loss=loss, steps=20)  # equal weights are no equal vectors


@pytest.mark.full
def test_training_side_by_side_is_training_one_by_one():
    keys = jax.random.split(KEY, 2)
    train = lambda key: learning.fit(start(key), outliers(), key, where=bivectors, steps=20, evaluations=2)  # noqa: E731
    together, history = jax.vmap(train)(keys)
    for i in range(2):
        alone, own = train(keys[i])
        np.testing.assert_allclose(bivectors(together)[i], bivectors(alone), atol=1e-4)
        np.testing.assert_allclose(history["validation"][i], own["validation"], rtol=1e-4)


@pytest.mark.full
def test_a_stopped_training_goes_on_to_the_bit(tmp_path):
    whole, history = fit(start())
    file, rows = tmp_path / "training.safetensors", []

    def stop(row):
        rows.append(row)
        if len(rows) == 3:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        fit(start(), checkpoint=file, progress=stop)
    again, resumed = fit(start(), checkpoint=file, progress=rows.append)
    np.testing.assert_array_equal(bivectors(again), bivectors(whole))
    np.testing.assert_array_equal(resumed["validation"], history["validation"])
    assert [row["step"] for row in rows] == [0, 10, 20, 30, 40]
    assert rows[-1]["validation"] == history["validation"][-1]
    with pytest.raises(
        ValueError, match=r"does not match: expected .params\[0\] float32 \(21, 3\), got float32 \(10, 3\)"
    ):
        fit(start(dim=64), vectors("sphere", 800, 64), checkpoint=file)


@pytest.mark.full
def test_it_stops_when_held_out_vectors_fare_no_better():
    """Steps that are far too long find nothing better, so the best so far is returned."""
    wild = optax.sgd(1e4)
    learned, history = fit(start(), optimizer=wild, patience=2, evaluations=20, steps=40)
    least = int(history["validation"].argmin())
    assert least < 17
    assert len(set(history["validation"][least + 3 :].tolist())) == 1
    assert measure(learned, outliers()[-150:]) == pytest.approx(float(history["validation"][least]), rel=1e-5)


@pytest.mark.full
def test_sharded_data():
    script = """
import jax, jax.numpy as jnp, numpy as np, rqjax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
x = jax.random.normal(jax.random.key(0), (512, 32)) * jnp.linspace(1, 9, 32)
mesh = Mesh(np.asarray(jax.devices()), ("data",))
assert mesh.size == 2
shared = jax.device_put(x, NamedSharding(mesh, PartitionSpec("data")))
train = lambda x: rqjax.fit(
    rqjax.rotorquant(jax.random.key(1), 32, 3), x, jax.random.key(2), where=lambda q: q.inner.rotation, steps=10,
    evaluations=2, validation=x[:64])[1]["validation"]
np.testing.assert_allclose(train(x), train(shared), rtol=1e-5)
"""
    environment = {**os.environ, "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda x: x.at[3, 4].set(jnp.nan), {}, "expected finite numbers in x, got 1 NaN or Inf"),
        (jnp.ones_like, {}, "expected vectors that differ in x, got 1200 equal ones"),
        (lambda x: x[:1], {}, r"expected at least 2 vectors in x, got shape \(1, 32\)"),
        (lambda x: x[:7], {}, "expected at least 8 vectors, an eighth of which is held out"),
        (None, {"validation": np.full((50, DIM), np.inf)}, "expected finite numbers in validation"),
        (None, {"where": lambda q: q.inner.inner.levels}, r"picks no floating-point array of the quantizer"),
        (None, {"where": lambda q: []}, r"q.inner.rotation.bivectors, q.inner.rotation.tail, q.inner.inner.step"),
        (None, {"steps": 0}, "expected steps to be a whole number from 1"),
        (None, {"patience": 0}, "expected patience to be a whole number from 1"),
    ],
)
def test_fit_rejects_constant_and_nonfinite_data(change, options, message):
    with pytest.raises(ValueError, match=message):
        fit(start(), change(outliers()) if change else outliers(), **options)


def test_recipes_check_their_data():
    for recipe in rqjax.FITTED.values():
        with pytest.raises(ValueError, match="expected finite numbers in x"):
            recipe(KEY, outliers().at[0, 0].set(jnp.inf), BITS)
        with pytest.raises(ValueError, match="expected vectors that differ in x"):
            recipe(KEY, jnp.ones((2, 50, DIM)), BITS)
        with pytest.raises(ValueError, match=r"expected floating-point vectors \(n, d\) or \(heads, n, d\), got int32"):
            recipe(KEY, jnp.ones((50, DIM), int), BITS)
        with pytest.raises(
            ValueError, match=r"expected (the whole part of )?bits to be a whole number from 1 to 8, got 0"
        ):
            recipe(KEY, outliers(), 0)


@pytest.mark.full
def test_few_vectors_are_warned_of():
    message = r"8 training vectors, 256 numbers in all, for 30 parameters: fewer than 10 for each"
    with pytest.warns(UserWarning, match=message):
        fit(start(), outliers()[:8], validation=outliers()[8:16], steps=1, evaluations=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(start(), steps=1, evaluations=1)


def test_checkpoints_are_for_trainings_of_their_own(tmp_path):
    with pytest.raises(ValueError, match="checkpoint and progress need a training outside jit and vmap"):
        jax.vmap(lambda key: fit(start(key), checkpoint=tmp_path / "t")[0])(jax.random.split(KEY, 2))


@pytest.mark.parametrize("dim", some([9, 32, 80], [32]))
def test_butterflies_begin_as_the_identity_and_mix(dim):
    """A butterfly of 9 = 3^2 coordinates mixes all of them. If groups are cut short, a few pairs stay apart."""
    x = jax.random.normal(KEY, (5, dim))
    chain = jax.jit(butterfly, static_argnums=1)(KEY, dim)
    assert [layer.stride for layer in chain.rotations] == [3**i for i in range(len(chain.rotations))]
    layer = chain.rotations[1]

    @jax.jit
    def run(chain, x):
        second = chain.rotations[1]
        return butterfly(None, dim)(x), chain(jnp.eye(dim)), second(x), second.times(jnp.eye(dim))

    same, mixed, turned, matrix = map(np.asarray, run(chain, x))
    np.testing.assert_allclose(same, x, atol=1e-6)
    share = (np.abs(mixed) > 1e-7).mean()
    assert share == 1 if dim == 9 else share > 0.8
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(dim), atol=1e-5)
    np.testing.assert_allclose(turned, x @ matrix.T, atol=1e-5)
    assert isinstance(layer, StridedRotor)
