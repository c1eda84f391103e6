"""Commands that build, search and describe an index; what is wrong is one line."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import flagsaver
from safetensors import SafetensorError
from safetensors.flax import save_file

import experiments
import rqjax
from experiments import readme, search_cli
from experiments.data import vector_files
from rqjax.search import centers

X = np.random.default_rng(0).standard_normal((300, 16)).astype(np.float32) * np.arange(1, 17, dtype=np.float32)


def run(*words):
    with flagsaver.flagsaver():
        search_cli.main(experiments.flags_parser(["search_cli", *words]))


def command(name, **options):
    run(name, *(f"--{k}={v}" for k, v in options.items()))


def write_torn_files(folder):
    x = X[:6, :4].copy()
    x[3, 2] = np.nan
    vector_files.write(folder / "nan.fvecs", x)
    for name, rows in {"a.fvecs": X[:2, :4], "b.fvecs": X[:1, :3], "c.bvecs": np.zeros((3, 4), np.uint8)}.items():
        vector_files.write(folder / name, rows)
    (folder / "mixed.fvecs").write_bytes((folder / "a.fvecs").read_bytes() + (folder / "b.fvecs").read_bytes())
    (folder / "torn.bvecs").write_bytes((folder / "c.bvecs").read_bytes()[:-5])
    (folder / "torn.safetensors").write_bytes(b"torn")
    (folder / "folder.npz").mkdir()
    (folder / "link").symlink_to(folder / "x.npy")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("search")
    np.save(folder / "x.npy", X)
    np.savez(folder / "q.npz", narrow=X[:7, :15], queries=X[:7])
    passing = np.isin(np.arange(300), np.arange(3, 151))
    np.savez(folder / "where.npz", mask=passing, short=passing[:200], bits=passing.astype(np.uint8), found=[5, -1])
    own = np.repeat(np.arange(7)[:, None], 8, axis=1)
    wrong = {"few": own[:6], "filled": np.where(own == 4, -1, own), "others": own + 296, "real": own.astype(float)}
    np.savez(folder / "true.npz", wide=own, narrow=own[:, :2], **wrong)
    write_torn_files(folder)
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
@pytest.mark.parametrize("where", ["3-150", "ids.npy", "where.npz#mask"])
def test_an_inverted_file_and_a_filter(where, folder, monkeypatch, capsys):
    """Queries in parts, the last of which overlaps the one before."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(search_cli, "TOGETHER", 3)
    passing = np.arange(3, 151)
    np.save("ids.npy", passing)
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
    command("info", index=few, mapped=True)
    stays = 300 * (10 + 2 * 16 + 4 + 4)  # codes, a store of float16, energies, ids
    assert f"bytes in the file  {stays:,}, the others in memory\n" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="expected k to be a whole number from 1 to 200, got 201"):
        command("query", index=few, queries=folder / "x.npy", k=201)


def test_the_recall_is_told(folder, index, capsys):
    """Columns beyond k are left out, and fewer than k columns are a recall of their own."""
    for name in ("wide", "narrow"):
        command("query", index=index, queries=f"{folder}/q.npz#queries", k=5, truth=f"{folder}/true.npz#{name}")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("recall")]
    assert lines == ["recall 1@5: 1.0000, 5@5: 1.0000", "recall 1@5: 1.0000, 2@5: 1.0000"]


def test_a_store_of_int8_bears_a_few_large_coordinates(folder):
    x = np.random.default_rng(2).standard_normal((100, 256)).astype(np.float32)
    x[:, :4] *= 10
    np.save(folder / "large.npy", x)
    command("build", vectors=folder / "large.npy", index=folder / "large", method="eden", bits=1, store="int8")
    decoded = rqjax.Index.load(folder / "large").reconstruct(range(100))
    assert rqjax.metrics.relative_mse(x, decoded) < 1e-4


@pytest.mark.full
def test_bfloat16_is_read_as_it_is(folder):
    x = jnp.asarray(X, jnp.bfloat16)
    save_file({"embeddings": x}, folder / "bfloat16.safetensors")
    np.save(folder / "rounded.npy", np.asarray(x, np.float32))
    for name in ("bfloat16.safetensors", "rounded.npy"):
        command("build", vectors=folder / name, index=folder / f"{name}.index", method="exact")
    one, other = (rqjax.Index.load(folder / f"{name}.index") for name in ("bfloat16.safetensors", "rounded.npy"))
    np.testing.assert_array_equal(one.rows.codes, other.rows.codes)


@pytest.mark.full
def test_fitted_methods_learn_from_a_part_of_what_is_encoded(folder, monkeypatch):
    """Directions are learned from where the metric is the cosine, and residuals where there are lists."""
    seen = []

    def learn(key, x, bits):
        seen.append((np.asarray(x), bits))
        return rqjax.pq(key, x, bits)

    monkeypatch.setitem(rqjax.FITTED, "pq", learn)
    monkeypatch.setattr(centers, "LEARNED", 280)
    norms = []
    for options in ({"metric": "ip"}, {"metric": "ip", "lists": 30}, {"metric": "cosine"}):
        command("build", vectors=folder / "x.npy", index=folder / "pq.safetensors", method="pq", bits=1, **options)
        x, bits = seen[-1]
        assert x.shape == (280, 16)
        assert isinstance(bits, int)
        norms.append(np.linalg.norm(x, axis=1))
    plain, residuals, unit = norms
    np.testing.assert_allclose(plain.mean(), np.linalg.norm(X, axis=1).mean(), rtol=0.05)
    assert residuals.mean() < 0.9 * plain.mean()
    np.testing.assert_allclose(unit, 1, rtol=1e-5)
    assert rqjax.Index.load(folder / "pq.safetensors").metric == "cosine"


@pytest.mark.full
def test_commands_of_the_guide_run(tmp_path, monkeypatch, capsys):
    """The compressed index finds most of the true neighbors, which another command has found."""
    pytest.importorskip("h5py")
    monkeypatch.chdir(tmp_path)
    x = np.random.default_rng(1).standard_normal((1200, 16)).astype(np.float32)
    np.save("base.npy", x)
    np.save("queries.npy", x[:20])
    vector_files.write("base.fvecs", x)
    vector_files.write("data.hdf5", x, "train")
    vector_files.write("data.hdf5", x[:20], "test")
    text = (readme.ROOT / "rqjax" / "docs" / "search.md").read_text()
    lines = re.findall(r"^python -m experiments\.search_cli (.*?)(?:  #.*)?$", text, re.MULTILINE)
    assert len(lines) == text.count("search_cli")
    for line in lines:
        run(*shlex.split(line))
    recall = re.findall(r"^recall 1@10: (\S+), 10@10: (\S+)$", capsys.readouterr().out, re.MULTILINE)
    assert len(recall) == 1
    assert min(map(float, recall[0])) > 0.8


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("bild", {}, "unknown command 'bild'; did you mean 'build'"),
        ("build", {"vectors": "x.npy"}, "build needs --index"),
        ("build", {"vectors": "none.npy", "index": "a"}, "there is no file none.npy"),
        ("build", {"vectors": "x.npy#x", "index": "a"}, "expected no #x: x.npy holds one array"),
        (
            "build",
            {"vectors": "x.npy", "index": "a", "method": "turboqant"},
            "unknown method 'turboqant'; did you mean",
        ),
        ("build", {"vectors": "x.npy", "index": "a", "bits": 9}, "a multiple of 1/8 from 0.5 to 8, got 9"),
        ("build", {"vectors": "x.npy", "index": "x.npy/a"}, "cannot write --index=x.npy/a: Not a directory"),
        (
            "build",
            {"vectors": "x.npy", "index": "a", "method": "klt_trellis", "bits": "inf"},
            "expected --bits to be a finite number, got inf",
        ),
        ("build", {"vectors": "none.npy", "index": "a/b"}, "there is no file none.npy"),
        ("build", {"vectors": "nan.fvecs", "index": "a", "method": "klt_trellis"}, "in nan.fvecs, got NaN or Inf"),
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
        ("query", {"queries": "x.npy", "k": 1, "where": "7-no"}, "expected FIRST-LAST or a file for --where, got 7-no"),
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
        ("info", {"index": "new"}, "new is not a whole safetensors file: .*Is a directory"),
        ("build", {"vectors": "x.npy", "index": "new"}, "expected a file for --index, new is a folder"),
        ("build", {"vectors": "x.npy", "index": "./x.npy"}, "--index=./x.npy would overwrite x.npy, which is read"),
        ("build", {"vectors": "link", "index": "x.npy"}, "--index=x.npy would overwrite link, which is read"),
        ("build", {"vectors": "q.npz#queries", "index": "q.npz"}, "--index=q.npz would overwrite q.npz"),
        ("build", {"vectors": "nan.fvecs", "index": "a", "method": "exact"}, "NaN or Inf, the first is vector 3"),
        ("build", {"vectors": "mixed.fvecs", "index": "a"}, "vector 2 has dimension 3, those before it have 4"),
        ("build", {"vectors": "torn.bvecs", "index": "a"}, "torn.bvecs: vector 2 is cut off after 3 of 8 bytes"),
        ("build", {"vectors": "torn.safetensors", "index": "a"}, "cannot read torn.safetensors: "),
        ("query", {"queries": "x.npy", "k": 1, "out": "a"}, "expected --out to end in .npz, got a"),
        ("query", {"queries": "x.npy", "k": 1, "out": "folder.npz"}, "expected a file for --out, folder.npz is a"),
        ("query", {"queries": "q.npz#queries", "k": 1, "out": "q.npz"}, "--out=q.npz would overwrite q.npz"),
        ("query", {"queries": "x.npy", "k": 1, "out": "q.npz", "where": "q.npz#mask"}, "--out=q.npz would overwrite"),
        ("query", {"queries": "nan.fvecs", "k": 1}, "NaN or Inf in 1 places, the first in vector 3"),
        ("query", {"queries": "x.npy", "k": 1, "where": "10-3"}, "no vector of the index passes --where=10-3"),
        ("query", {"queries": "x.npy", "k": 1, "where": "300-400"}, "no vector of the index passes --where=300-400"),
        ("query", {"queries": "x.npy", "k": 1, "where": "where.npz"}, "expected one of its arrays, as PATH#mask: mask"),
        ("query", {"queries": "x.npy", "k": 1, "where": "where.npz#no"}, "cannot read where.npz: unknown array 'no'"),
        ("query", {"queries": "x.npy", "k": 1, "where": "where.npz#short"}, "expected 300 booleans in .*, got 200"),
        ("query", {"queries": "x.npy", "k": 1, "where": "where.npz#bits"}, "got a mask of uint8; write it as booleans"),
        ("query", {"queries": "x.npy", "k": 1, "where": "where.npz#found"}, "expected ids from 0 to .*, got -1 to 5"),
        (
            "query",
            {"queries": "q.npz#queries", "k": 5, "truth": "true.npz#few"},
            "expected ids for 7 queries in true.npz#few, got those for 6",
        ),
        (
            "query",
            {"queries": "q.npz#queries", "k": 5, "truth": "true.npz#filled"},
            "expected ids of the index in true.npz#filled, got 5 others, the first is -1 for query 4",
        ),
        (
            "query",
            {"queries": "q.npz#queries", "k": 1, "truth": "true.npz#others"},
            "got 3 others, the first is 300 for query 4",
        ),
        ("query", {"queries": "x.npy", "k": 1, "truth": "true.npz#real"}, "expected whole numbers .* in true.npz"),
    ],
)
def test_what_is_wrong_is_one_line(name, options, message, index, folder, monkeypatch):
    monkeypatch.chdir(folder)
    content = index.read_bytes()
    rqjax.save(rqjax.eden(jax.random.key(0), 16, 3), "quantizer")
    Path("torn").write_bytes(content[:-1])
    Path("flipped").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    options = options if name != "query" else {"index": index, **options}
    read = {path: path.read_bytes() for path in map(Path, ("x.npy", "q.npz"))}
    with pytest.raises(SystemExit, match=message) as error:
        command(name, **options)
    assert error.value.code.startswith("error: ")
    assert "\n" not in error.value.code
    assert not Path("a").exists()
    assert read == {path: path.read_bytes() for path in read}


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (MemoryError(), "MemoryError"),
        (SafetensorError("Error while serializing:\n No space left"), "Error while serializing: No space left"),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"), "RESOURCE_EXHAUSTED: Out of memory"),
    ],
)
def test_what_memory_and_disk_lack_is_one_line(error, line, index, monkeypatch):
    def failing(*_, **__):
        raise error

    monkeypatch.setattr(rqjax.Index, "load", failing)
    with pytest.raises(SystemExit, match=f"^error: {line}$"):
        command("info", index=index)


def test_an_interrupted_command_says_so_in_one_line(capsys):
    sys.excepthook(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.full
def test_the_command_line_ends_with_status_1():
    line = [sys.executable, "-m", "experiments.search_cli", "info", "--index=none.safetensors"]
    done = subprocess.run(line, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "error: there is no file none.safetensors\n"
