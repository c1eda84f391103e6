"""Commands that build, search and describe an index; what is wrong is one line."""

import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from absl.testing import flagsaver

import experiments
import rqjax
from experiments import search_cli

X = np.random.default_rng(0).standard_normal((300, 16)).astype(np.float32) * np.arange(1, 17, dtype=np.float32)


def command(name, **options):
    with flagsaver.flagsaver():
        search_cli.main(experiments.flags_parser(["search_cli", name, *(f"--{k}={v}" for k, v in options.items())]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("search")
    np.save(folder / "x.npy", X)
    np.savez(folder / "q.npz", narrow=X[:7, :15], queries=X[:7])
    command("build", vectors=folder / "x.npy", index=folder / "new" / "i.safetensors", store="float16", metric="l2")
    return folder


@pytest.fixture
def index(folder):
    return folder / "new" / "i.safetensors"


@pytest.mark.full
def test_what_is_found_is_what_the_library_finds(folder, index, capsys):
    command("query", index=index, queries=f"{folder}/q.npz#queries", k=4, rerank=40, out=folder / "out" / "found.npz")
    found = np.load(folder / "out" / "found.npz")
    quantizer = rqjax.turboquant_trellis(jax.random.key(0), 16, 4)
    expected = rqjax.Index.build(quantizer, X, metric="l2", store=rqjax.Exact(16, "float16"))
    scores, ids = expected.search(X[:7], 4, rerank=40)
    np.testing.assert_array_equal(found["ids"], ids)
    np.testing.assert_allclose(found["scores"], scores, rtol=1e-4, atol=1e-2)
    np.testing.assert_array_equal(found["ids"][:, 0], np.arange(7))
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == [
        "load",
        "compile",
        "search",
        "scores and ids (7, 4)",
    ]
    command("query", index=index, queries=f"{folder}/q.npz#queries", k=2)
    shown = capsys.readouterr().out.splitlines()[3:]
    assert len(shown) == search_cli.SHOWN
    assert shown[1].startswith("query 1: 1 (")


@pytest.mark.full
@pytest.mark.parametrize("where", ["3-150", "ids.npy", "mask.npz#mask"])
def test_an_inverted_file_and_a_filter(where, folder, monkeypatch, capsys):
    """Queries in parts, the last of which overlaps the one before."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(search_cli, "TOGETHER", 3)
    passing = np.arange(3, 151)
    np.save("ids.npy", passing)
    np.savez("mask.npz", mask=np.isin(np.arange(200), passing))
    command("build", vectors="x.npy", index="ivf", lists=9, method="eden_unbiased", bits=8)
    command("query", index="ivf", queries="q.npz#queries", k=5, probes=4, where=where, out="found.npz")
    quantizer = rqjax.eden_unbiased(jax.random.key(0), 16, 8)
    expected = rqjax.Index.build(quantizer, X, lists=9, key=jax.random.fold_in(jax.random.key(0), 1))
    scores, ids = expected.search(X[:7], 5, probes=4, where=passing)
    np.testing.assert_array_equal(np.load("found.npz")["ids"], ids)
    np.testing.assert_allclose(np.load("found.npz")["scores"], scores, rtol=1e-4, atol=1e-2)
    capsys.readouterr()
    command("info", index="ivf")
    shown = capsys.readouterr().out
    assert "lists              9, of 33 vectors\n" in shown
    assert f"bytes of lists     {4 * (9 * 16 + 10):,}\n" in shown
    assert "quantizer          Scaled(Rotated(Dense, Scalar))\n" in shown


def test_rows_stay_in_the_file(index, folder, monkeypatch):
    monkeypatch.setattr(search_cli, "TOGETHER", 3)
    for mapped in (False, True):
        command("query", index=index, queries=folder / "x.npy", k=5, mapped=mapped, out=folder / f"{mapped}.npz")
    one, other = (np.load(folder / f"{mapped}.npz") for mapped in (False, True))
    np.testing.assert_array_equal(one["ids"], other["ids"])
    np.testing.assert_array_equal(one["scores"], other["scores"])


def test_the_bytes_are_those_of_the_arrays(index, capsys):
    command("info", index=index)
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.replace("bytes of ", "").splitlines())
    assert lines["vectors"] == "300"
    assert lines["metric"] == "l2"
    assert lines["quantizer"] == f"{rqjax.nbytes(rqjax.Index.load(index).quantizer):,}"
    assert lines["codes"] == f"{300 * (4 * 16 + 16) // 8:,}"
    assert (lines["ids"], lines["energies"], lines["store"]) == ("1,200", "1,200", "9,600")


def test_a_center_is_shown(folder, index, capsys):
    """Bytes of a file far from 0 are centered unasked; the norm is that of their mean."""
    x = np.round(X + 120).clip(0, 255).astype(np.uint8)
    np.save(folder / "bytes.npy", x)
    command("build", vectors=folder / "bytes.npy", index=folder / "bytes", method="eden", bits=2)
    capsys.readouterr()
    command("info", index=folder / "bytes")
    shown = capsys.readouterr().out
    assert f"center             a mean of norm {np.linalg.norm(x.mean(axis=0)):.3g}\n" in shown
    assert "quantizer          Around(Scaled(Rotated(Dense, Scalar)))\n" in shown
    assert "codes              80 bits, 10 bytes per vector" in shown
    command("info", index=index)
    assert "center             none\n" in capsys.readouterr().out


def test_the_nest_and_the_free_rows_are_shown(index, folder, capsys):
    few = folder / "few.safetensors"
    rqjax.Index.load(index).remove(np.arange(100)).save(few)
    command("info", index=few)
    shown = capsys.readouterr().out
    assert "quantizer          Scaled(Rotated(Dense, Trellis))\n" in shown
    assert "codes              80 bits, 10 bytes per vector; 5 bits per coordinate\n" in shown
    assert "vectors            200, and 100 free rows\n" in shown
    with pytest.raises(SystemExit, match="expected k to be a whole number from 1 to 200, got 201"):
        command("query", index=few, queries=folder / "x.npy", k=201)


@pytest.mark.full
def test_fitted_methods_learn_from_a_part_of_the_file(folder, monkeypatch):
    """Directions, where the metric is the cosine; the first and the last vectors are among those learned from."""
    seen = []

    def learn(key, x, bits):
        seen.append((np.asarray(x), bits))
        return rqjax.pq(key, x, bits)

    monkeypatch.setitem(rqjax.FITTED, "pq", learn)
    monkeypatch.setattr(search_cli, "LEARNED", 280)
    for metric in ("ip", "cosine"):
        command("build", vectors=folder / "x.npy", index=folder / "pq.safetensors", method="pq", bits=1, metric=metric)
    (plain, bits), (unit, _) = seen
    assert plain.shape == unit.shape == (280, 16)
    assert isinstance(bits, int)
    np.testing.assert_array_equal(plain[[0, -1]], X[[0, -1]])
    np.testing.assert_allclose(np.linalg.norm(unit, axis=1), 1, rtol=1e-5)
    assert rqjax.Index.load(folder / "pq.safetensors").metric == "cosine"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("bild", {}, "unknown command 'bild'; did you mean 'build'"),
        ("build", {"vectors": "x.npy"}, "build needs --index"),
        ("build", {"vectors": "none.npy", "index": "a"}, "there is no file none.npy"),
        (
            "build",
            {"vectors": "x.npy", "index": "a", "method": "turboqant"},
            "unknown method 'turboqant'; did you mean",
        ),
        ("build", {"vectors": "x.npy", "index": "a", "bits": 9}, "a multiple of 1/8 from 0.5 to 8, got 9"),
        ("build", {"vectors": "x.npy", "index": "x.npy/a"}, "File exists: 'x.npy'"),
        ("build", {"vectors": "x.npy", "index": "a", "metric": "dot"}, "flag --metric=dot: value should be one of"),
        ("build", {"vectors": "x.npy", "index": "a", "k": 3}, "build has no --k; it has --vectors, --index"),
        ("query", {"index": "new/i.safetensors"}, "query needs --queries, --k"),
        ("query", {"queries": "q.npz#narrow", "k": 1}, r"expected vectors of dimension 16 .*, got shape \(7, 15\)"),
        ("query", {"queries": "x.npy", "k": 301}, "expected k to be a whole number from 1 to 300, got 301"),
        ("query", {"queries": "x.npy", "k": 1, "probes": 2}, "has no lists to probe; build it with --lists"),
        (
            "query",
            {"queries": "x.npy", "k": 1, "where": "x.npy"},
            "expected whole numbers or booleans in x.npy, got float32",
        ),
        ("query", {"queries": "x.npy", "k": 1, "where": "7-no"}, "expected a file that ends in .npy"),
        (
            "build",
            {"vectors": "x.npy", "index": "a", "lists": 301},
            "expected lists to be a whole number from 1 to 300",
        ),
        ("info", {"index": "quantizer"}, "expected an Index in quantizer, found a Scaled"),
        ("query", {"queries": "x.npy", "k": 5, "rerank": 4}, "expected rerank to be a whole number from 5 to 300"),
        ("query", {"queries": "x.npy", "k": 1, "index": "torn"}, "torn is not a whole safetensors file"),
        ("query", {"queries": "x.npy", "k": 1, "index": "flipped"}, "flipped is damaged"),
        ("info", {"index": "none"}, "there is no file none"),
    ],
)
def test_what_is_wrong_is_one_line(name, options, message, index, folder, monkeypatch):
    monkeypatch.chdir(folder)
    content = index.read_bytes()
    rqjax.save(rqjax.eden(jax.random.key(0), 16, 3), "quantizer")
    Path("torn").write_bytes(content[:-1])
    Path("flipped").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    options = options if name != "query" else {"index": index, **options}
    with pytest.raises(SystemExit, match=message) as error:
        command(name, **options)
    assert error.value.code.startswith("error: ")
    assert "\n" not in error.value.code
    assert not Path("a").exists()


@pytest.mark.full
def test_the_command_line_ends_with_status_1():
    line = [sys.executable, "-m", "experiments.search_cli", "info", "--index=none.safetensors"]
    done = subprocess.run(line, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "error: there is no file none.safetensors\n"
