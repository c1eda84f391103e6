"""Experiments measure what they say; wrong files and points are refused in one clear line."""

import hashlib
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from safetensors.flax import save_file

import rqjax
from experiments.caches import attention_error, kv_memory, kv_throughput, latent_throughput, needle, turning_bias
from experiments.codes import fractional, rate_distortion, train_rotor, trellis_tables, trellis_throughput
from experiments.data import passages, samples, vector_files, words
from experiments.harness import cache
from experiments.matrices import matrices, matrix_budget


def vectors():
    return np.random.default_rng(0).standard_normal((50, 24)).astype(np.float32)


def test_files_of_vectors(tmp_path):
    x = vectors()
    np.save(tmp_path / "x.npy", x.astype(np.float64))
    np.savez(tmp_path / "x.npz", vectors=x)
    save_file({"keys": jnp.asarray(x, jnp.bfloat16).reshape(5, 10, 24)}, tmp_path / "x.safetensors")
    np.concatenate([np.full((50, 1), 24, np.int32).view(np.float32), x], axis=1).tofile(tmp_path / "x.fvecs")
    for suffix in (".npy", ".npz", ".safetensors", ".fvecs"):
        sample = np.asarray(samples.sample(f"file:{tmp_path / f'x{suffix}'}", 2, 20, 16))
        assert sample.shape == (2, 20, 16)
        assert all(np.abs(x[:, :16] - row).max(axis=1).min() < 0.02 for row in sample[0])


def test_ids_of_tensors_keep_64_bits(tmp_path):
    ids = np.array([[2**40 + 5, 7]])
    safetensors.numpy.save_file({"ids": ids}, tmp_path / "ids.safetensors")
    np.testing.assert_array_equal(vector_files.read_ids(tmp_path / "ids.safetensors"), ids)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.txt", b"", "expected a file that ends in .npy, .npz, .safetensors, .fvecs, .bvecs, .ivecs, .hdf5, got"),
        ("x.npy", b"\x93NUMPY torn", r"cannot read .*x\.npy: "),
        ("x.npz", b"PK\x03\x04torn", r"cannot read .*x\.npz: "),
        ("x.safetensors", b"torn", r"cannot read .*x\.safetensors: "),
        ("x.fvecs", b"\x03\x00\x00\x00torn", r"cannot read .*x\.fvecs: vector 0 is cut off after 8 of 16 bytes"),
        (
            "x.npy",
            np.ones((3, 4), int),
            r"expected vectors \(n, d\) of floating-point numbers or bytes in .*, got int64 \(3, 4\)",
        ),
        ("x.npy", np.ones(4), r"got float64 \(4,\)"),
        ("x.npy", np.array([[1, 2, 3], [1, np.nan, np.inf]]), "got NaN or Inf in 2 places, the first in vector 1"),
        ("x.npz", {"a": np.ones((3, 4)), "b": np.ones((3, 4))}, "expected one of its arrays, as PATH#a: a, b"),
        ("x.npy", np.array([{}], object), r"cannot read .*x\.npy: "),
    ],
)
def test_bad_files(name, content, message, tmp_path):
    path = tmp_path / name
    if isinstance(content, dict):
        np.savez(path, **content)
    else:
        path.write_bytes(content) if isinstance(content, bytes) else np.save(path, content)
    with pytest.raises(ValueError, match=message):
        samples.sample(f"file:{path}", 1, 2, 3)


def test_embeddings_of_passages():
    """Committed, as unit vectors that have a mean in common; passages are whole lines, each of them once."""
    x = passages.vectors()
    assert x.shape == (10_510, samples.dimension({"dim": 0, "data": "passages"}))
    np.testing.assert_allclose(np.linalg.norm(x, axis=1), 1, rtol=1e-5)
    assert np.linalg.norm(x.mean(axis=0)) > 0.2
    line = "a line of forty characters, or nearly so"
    assert passages.passages([f"{line}\n\n{line}\nthe rest", f"{line}\n{line}"]) == [f"{line}\n{line}"]


def test_too_few_dimensions(tmp_path):
    np.save(tmp_path / "x.npy", vectors())
    with pytest.raises(ValueError, match="has 24 dimensions, expected at least 25"):
        samples.sample(f"file:{tmp_path / 'x.npy'}", 1, 2, 25)


def test_cached_arrays_are_made_once_and_mended(tmp_path, monkeypatch):
    monkeypatch.setenv("RQJAX_CACHE", str(tmp_path / "cache"))
    made = []

    def make():
        made.append(1)
        return np.arange(3.0)

    for _ in range(2):
        np.testing.assert_array_equal(cache.cached("a.npy", make), np.arange(3.0))
    assert len(made) == 1
    (tmp_path / "cache" / "a.npy").write_bytes(b"torn")
    np.testing.assert_array_equal(cache.cached("a.npy", make), np.arange(3.0))
    assert len(made) == 2
    assert os.listdir(tmp_path / "cache") == ["a.npy"]


@pytest.mark.full
def test_words_are_real_vectors(monkeypatch):
    """Related words are near, from a tenth of the corpus (for speed). The running Python plays no part."""
    monkeypatch.setattr(words, "corpus", lambda: pytest.fail("the running Python's library was read"))
    texts = words.pinned_words()
    whole = hashlib.sha256("\n".join(texts).encode()).hexdigest()
    assert whole == "aac3302bff6959bd72f713e31e2620ba02d515e1d796e3d007748155f087f64f"
    assert len(texts) == 1790
    with monkeypatch.context() as patched:
        patched.setattr(words, "cached", lambda name, make: make())
        patched.setattr(words, "word_vectors", lambda texts: (texts, {}))
        assert words.vectors.__wrapped__() == texts
    monkeypatch.setattr(words, "WORD_COUNT", 2000)
    monkeypatch.setattr(words, "WORD_DIMS", 50)
    array, index = words.word_vectors(texts[::10])
    assert array.shape == (2000, 50)
    assert np.isfinite(array).all()
    unit = array / np.linalg.norm(array, axis=1, keepdims=True)
    known = list(index)
    near = {known[i] for i in np.argsort(-unit @ unit[index["true"]])[:10]}
    assert "false" in near


@pytest.mark.full
def test_nothing_is_trained_on_what_is_held_out(monkeypatch):
    """Experiment `train_rotor` measures a quarter of the rows, for the point's parametrization and both references."""
    made, measured, make = [], [], train_rotor._make

    def errors(quantizers, x):
        measured.append(np.asarray(x))
        return jnp.ones(2), jnp.ones(2)

    monkeypatch.setattr(
        train_rotor, "_make", lambda name, x, bits: (made.append(np.asarray(x)), make(name, x, bits))[1]
    )
    monkeypatch.setattr(train_rotor, "_errors", errors)
    monkeypatch.setattr(train_rotor, "_reference", train_rotor._reference.__wrapped__)
    train_rotor.run({"data": "gaussian", "seeds": 2, "n": 64, "dim": 16, "bits": 2, "parametrisation": "identity"})
    sample = np.asarray(samples.sample("gaussian", 2, 64, 16))
    assert len(made) == len(measured) == 3
    for train, test in zip(made, measured, strict=True):
        assert train.shape == (2, 48, 16)
        assert test.shape == (2, 16, 16)
        for seed in range(2):
            rows = {tuple(row) for row in np.concatenate([train[seed], test[seed]])}
            assert rows == {tuple(row) for row in sample[seed]}  # so none is on both sides


@pytest.mark.full
def test_structured_data_are_what_they_say():
    key = jax.random.key(0)
    spectrum = samples.DATA["decaying_spectrum"](key, 20_000, 16)
    np.testing.assert_allclose(spectrum.var(0) * np.arange(1, 17), 1, rtol=0.06)
    rotated = samples.DATA["decaying_spectrum_rotated"](key, 20_000, 16)
    np.testing.assert_allclose(
        np.linalg.svd(rotated, compute_uv=False), np.linalg.svd(spectrum, compute_uv=False), rtol=1e-3
    )
    loud = np.sort(np.asarray(samples.DATA["outlier_channels"](key, 5000, 16).std(0)))
    np.testing.assert_allclose(loud, [1] * 12 + [10] * 4, rtol=0.06)
    assert set(np.unique(samples.DATA["one_hot"](key, 100, 16))) == {0, 1}
    np.testing.assert_allclose(jnp.linalg.norm(samples.DATA["sphere"](key, 100, 16), axis=1), 1, rtol=1e-5)


def test_splits():
    assert fractional.parse("32@3+96@2") == [(32, 3), (96, 2)]
    with pytest.raises(ValueError, match="expected channels and bits in the split '64x3' like '64@3', got '64x3'"):
        fractional.parse("64x3")


@pytest.mark.full
def test_the_published_cache_of_969_mb():
    point = {"model": "Llama 3.2 3B", "context": 8192}
    assert round(kv_memory.run({**point, "strategy": "float16"})["mb"]) == 969
    ours = {name: kv_memory.run({**point, "strategy": name}) for name in ("v3_3.5", "v3_3", "v3_2.5")}
    assert all(row["mb"] < row["published_mb"] for row in ours.values())
    assert all(row["compression"] > row["published_compression"] for row in ours.values())


@pytest.mark.full
def test_needles_are_found():
    point = {"dim": 64, "context": 256, "needles": 8, "seeds": 2, "similarity": 1.0, "method": "rotorquant", "bits": 2}
    assert needle.run(point) == {"found": 1.0, "found_sd": 0.0}


@pytest.mark.parametrize(
    ("module", "point", "message"),
    [
        (
            kv_memory,
            {"model": "Llama 3.2", "strategy": "v3_3"},
            "unknown model 'Llama 3.2'; did you mean 'Llama 3.2 3B'",
        ),
        (kv_memory, {"model": "Gemma 3 4B", "strategy": "v3"}, "unknown strategy 'v3'"),
        (kv_throughput, {"shape": "3x1", "strategy": "v3_3"}, "expected tokens to be a whole number from 2"),
        (
            kv_throughput,
            {"shape": "3-512", "strategy": "v3_3"},
            "expected query heads a KV head and tokens like '3x8192'",
        ),
        (
            train_rotor,
            {"parametrisation": "butterfly:learnd", "data": "words"},
            "unknown parametrisation 'butterfly:learnd'; did you mean 'butterfly'",
        ),
        (
            train_rotor,
            {"parametrisation": "rotor", "data": "word"},
            "unknown data set 'word'; did you mean 'words'",
        ),
        (
            matrix_budget,
            {"method": "qet_vanila", "data": "synthetic_1"},
            "unknown method under a budget 'qet_vanila'; did you mean 'qet_vanilla'",
        ),
        (matrix_budget, {"method": "l3w8c10", "data": "synthetic_4"}, "unknown matrix 'synthetic_4'; did you mean"),
        (
            matrix_budget,
            {"method": "pq", "data": "llama-d128#key"},
            "unknown matrix of a model 'key'; did you mean 'keys'",
        ),
        (
            rate_distortion,
            {"code": "trelis_8", "dim": 128, "bits": 2.0, "data": "sphere"},
            "unknown code 'trelis_8'; did you mean 'trellis_8'",
        ),
        (
            rate_distortion,
            {"code": "trellis_10", "dim": 128, "bits": 4.5, "data": "sphere"},
            "expected state_bits to be a whole number",
        ),
        (attention_error, {"data": "gausian"}, "unknown data set 'gausian'; did you mean 'gaussian'"),
        (
            attention_error,
            {"data": "gaussian", "strategy": "v3_3", "keep": "128"},
            "expected newest and first tokens like",
        ),
    ],
)
def test_points_are_checked_before_anything_runs(module, point, message):
    with pytest.raises((ValueError, KeyError), match=message):
        module.check(point)


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["eden_3+turned", "klt_trellis_2+pre_rope"])
def test_a_bias_that_turns(strategy):
    """A mean that turns takes it off; one that stays does not. Scores of the keys and of the bias deviate by 2 each."""
    point = {"strategy": strategy, "norm": 100, "tokens": 512, "queries": 16, "heads": 1, "dim": 32, "theta": 1e4}
    point |= {"loud": 1, "seeds": 2}
    row = turning_bias.run(point)
    most = {"eden_3+turned": 1.1, "klt_trellis_2+pre_rope": 1.3}.get(strategy)
    assert row["over_unbiased"] < most if most else row["over_unbiased"] > 5
    rope = rqjax.Rope(1e4)
    q, k, _, bias = turning_bias._sample(*jax.random.split(jax.random.key(0)), rope, point)
    positions = jnp.arange(512)[:, None]
    parts = (rope(k, positions), rope(jnp.broadcast_to(bias, k.shape), positions))
    deviations = [jnp.einsum("bthd,bshd->bhts", rope(q, positions[-16:]), part).std() / 32**0.5 for part in parts]
    np.testing.assert_allclose(deviations, 2, rtol=0.3)
    assert jnp.linalg.norm(bias) == pytest.approx(100)


@pytest.mark.full
def test_caches_of_latents():
    point = {"turning": 16, "latent": 32, "rounds": 1, "shape": "4x512"}
    names = ("bfloat16", "eden_8/klt_trellis_2", "klt_trellis_2")
    rows = [latent_throughput.run({**point, "strategy": name}) for name in names]
    assert [row["bits"] for row in rows] == pytest.approx([16, (8 * 16 + 2 * 32 + 32) / 48, 2 + 32 / 48], rel=0.1)
    assert rows[0]["bytes"] > 2 * 48 * 512 > rows[1]["bytes"] > rows[2]["bytes"]
    assert all(row["vs_bfloat16"] > 0 for row in rows)
    with pytest.raises(ValueError, match="query heads a"):
        latent_throughput.check({**point, "shape": "many", "strategy": "eden_4"})


@pytest.mark.full
def test_weights_are_those_of_attention():
    """Weights of a cache that keeps everything exact are the softmax, with positions and without."""
    k, v = jax.random.normal(jax.random.key(0), (2, 1, 64, 2, 16))
    q = jax.random.normal(jax.random.key(1), (1, 8, 6, 16))
    rope, exact = rqjax.Rope(1e4), rqjax.Exact(16, "float32")
    mean = rqjax.TurnedMean(jnp.ones((2, 16)), rope=rope)
    for form in (rqjax.AsGiven(), rqjax.AsGiven(rope=rope), mean, rqjax.BeforeRope(rope=rope)):
        options = {"window": 0, "sinks": 0, "key_form": form, "dtype": jnp.float32}
        cache = rqjax.KVCache.init(1, 2, 64, exact, exact, **options)
        row = attention_error.errors(cache, q, k, v)
        assert abs(row["kl"]) < 1e-5
        assert row["top5"] == 1


@pytest.mark.full
def test_learned_rotations_in_a_table():
    """Held-out error relative to random rotations, with what they cost."""
    point = {"dim": 32, "bits": 3, "data": "outlier_channels", "n": 800, "seeds": 2}
    row = train_rotor.run({**point, "parametrisation": "rotor_permuted:learned"})
    assert row["vs_rotor"] < 0.9
    assert row["vs_haar"] > 1
    assert row["multiply_adds"] == 9 * 10 + 4
    assert row["parameters"] == 3 * 10 + 1 + 32
    assert row["stored_bits"] == 3 + 16 / 32
    assert row["orthogonality"] < 1e-5
    assert row["curve"][-1]["validation"] < row["curve"][0]["validation"]


@pytest.mark.full
def test_matrices_under_a_budget_in_a_table(tmp_path):
    """Errors relative to PQ, what the paper has, and what does not fit."""
    weight = jax.random.normal(jax.random.key(0), (256, 130))
    save_file({"weight": weight}, tmp_path / "w.safetensors")
    point = {"data": f"file:{tmp_path / 'w.safetensors'}#weight", "scale": 1, "ratio": 4, "seeds": 1}
    assert matrix_budget.matrix(point["data"], 0, 2).shape == (128, 128)
    row = matrix_budget.run({**point, "method": "l1w1"})
    assert row["vs_pq"] < 20
    assert row["stored_ratio"] >= 4
    assert matrix_budget.run({**point, "method": "pq"})["vs_pq"] == 100
    assert "does not hold" in matrix_budget.run({**point, "method": "opq"})["does_not_fit"]
    published = matrix_budget._published({"data": "synthetic_1", "method": "qet_vanilla", "ratio": 4})
    assert published["published_vs_pq"] == 36.53


@pytest.mark.full
def test_matrices_of_a_model():
    """A seed is a layer. Rows are spread over a weight; a row of keys has all heads of a token."""
    first, again, other = (matrices.matrix("llama-d128#up_proj", seed, 1) for seed in (0, 4, 1))
    assert first.shape == (448, 192)
    assert bool((first == again).all())  # of four layers
    assert not bool((first == other).all())
    assert matrices.matrix("llama-d128#embed_tokens", 0, 2).shape == (128, 192)
    assert matrices.matrix("llama-d128#keys", 0, 1).shape == (matrices.ROWS, 2 * 128)
    assert [matrices.word_bits(f"llama-d128#{part}") for part in ("keys", "values", "k_proj")] == [16, 16, 32]
    row = matrix_budget.run(
        {"data": "llama-d128#values", "scale": 8, "ratio": 4, "seeds": 2, "method": "rtn", "mean_over": (4, 16)}
    )
    assert row["mean_multiple"] == row["multiple_of_qet"]  # 16 bits hold none at ratio 16
    assert row["published_mean_multiple"] == 7.69


@pytest.mark.full
def test_trellis_codes_in_tables(tmp_path):
    """Fractional bits, the curve of entropy-coded scalars, speeds, and the file of tables."""
    point = {"dim": 64, "bits": 1.5, "data": "sphere", "n": 500, "seeds": 2}
    rows = {code: rate_distortion.run({**point, "code": code}) for code in ("lloyd_max", "trellis_6", "entropy_coded")}
    assert rows["trellis_6"]["stored_bits"] == rows["lloyd_max"]["stored_bits"] == 1.5 + 16 / 64
    assert 1 < rows["trellis_6"]["over_shannon"] < 0.9 * rows["lloyd_max"]["over_shannon"]
    for row in rows.values():
        assert row["over_shannon"] == pytest.approx(row["mse"] * 4 ** row["stored_bits"])
    norm = 4 ** (16 / 64)
    assert abs(rows["entropy_coded"]["over_shannon"] / norm - 1.4216) < 1e-4  # pi e / 6 at many bits
    speeds = trellis_throughput.run({"shape": (512, 32), "bits": 2, "state_bits": 6, "rounds": 1})
    assert all(value > 0 for value in speeds.values())
    table = {"table": (4, 6), "dim": 32, "n": 256, "steps": 30}
    trained = trellis_tables.run(table)
    (path,) = trellis_tables.plot([{"point": table, "metrics": trained}], tmp_path)
    stored = np.load(path)
    assert stored["levels_4_6"].dtype == np.int8
    assert 127 * stored["step_4_6"] == pytest.approx(np.abs(stored["levels_4_6"] * stored["step_4_6"]).max())
    assert trained["shannon"] < trained["mse"] < trained["lloyd_max"]


@pytest.mark.full
def test_search_in_tables(tmp_path):
    """Recall rises with k and with bits, and is above that of FAISS's RaBitQ, which takes 20 bytes more."""
    from experiments.search import indexing_time, recall, search_throughput

    point = {"vectors": "clustered, d = 32", "n": 1000, "queries": 100, "seeds": 2, "codec": "klt_trellis:tight"}
    rows = [{"point": {**point, "bits": bits}, "metrics": recall.run({**point, "bits": bits})} for bits in (2, 4)]
    few, many = (row["metrics"] for row in rows)
    assert (few["bytes"], many["bytes"]) == (8, 16)
    assert few["1@1"] < few["1@4"] <= few["1@64"]
    assert few["10@10"] + 0.1 < many["10@10"]
    assert all(path.exists() for path in recall.plot(rows, tmp_path))
    by_distance = recall.run({**point, "codec": "klt_trellis:l2", "bits": 2})
    centered = recall.run({**point, "codec": "klt_trellis:centered", "bits": 2})
    # The scale's 2 bytes, and 4 of |x|^2 or of the product with the mean.
    assert by_distance["bytes"] == centered["bytes"] == few["bytes"] + 2 + 4
    assert by_distance["10@10"] > few["10@10"]  # it has the scale's bits more
    faiss = recall.run({**point, "codec": "faiss_rabitq", "bits": 2})
    assert faiss["bytes"] == 28
    assert faiss["10@10"] < few["10@10"]
    times = indexing_time.run({"n": 500, "dim": 32, "bits": 4, "codec": "turboquant", "enough": 30.0})
    assert 0 < times["seconds"] < times["first"]
    speed = search_throughput.run({"n": 500, "dim": 32, "bits": 4, "batch": 2, "codec": "turboquant", "rounds": 1})
    assert speed["bytes"] == 18
    with pytest.raises(LookupError, match="unknown codec 'turboquant:loose'"):
        recall.check({"codec": "turboquant:loose", "vectors": "words, d = 200"})
