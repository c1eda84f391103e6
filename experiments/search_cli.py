"""Nearest neighbors in files of vectors (`data.vector_files`): makes an index, searches it, and says what it takes.

python -m experiments.search_cli build --vectors=base.npy --index=out.safetensors --method=turboquant_trellis
python -m experiments.search_cli query --index=out.safetensors --queries=q.npy --k=10 --out=found.npz
python -m experiments.search_cli info --index=out.safetensors

With --lists the index is an inverted file, and a query looks into --probes lists. A terminal shows a bar of progress.
"""

import dataclasses
import inspect
import math
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import app, flags
from jax.errors import JaxRuntimeError
from safetensors import SafetensorError
from tqdm import tqdm

import experiments
from experiments.data import vector_files
from rqjax import FITTED, METHODS, Exact, Index, metrics, nbytes
from rqjax.arrays import norms
from rqjax.core import Quantizer, Registry, nest, treefile
from rqjax.search import filters, ids as names
from rqjax.search.centers import Cells

flags.DEFINE_string("vectors", None, "build: file of the vectors, PATH or PATH#ARRAY.")
flags.DEFINE_string("index", None, "File of the index.")
flags.DEFINE_string("method", "turboquant_trellis", "build: name of rqjax.METHODS or rqjax.FITTED, or exact.")
flags.DEFINE_float("bits", 4, "build: bits per coordinate.")
flags.DEFINE_enum("metric", "ip", ["ip", "l2", "cosine"], "build: what nearest means; ip is the inner product.")
flags.DEFINE_enum("store", "none", ["none", "float16", "int8"], "build: what --rerank scores candidates with.")
flags.DEFINE_integer("lists", None, "build: of an inverted file, how many; none without it.", lower_bound=1)
flags.DEFINE_integer("seed", 0, "build: of the quantizer and the lists.", lower_bound=0, upper_bound=2**31 - 1)
flags.DEFINE_string("queries", None, "query: file of the queries, PATH or PATH#ARRAY.")
flags.DEFINE_integer("k", None, "query: how many to find.", lower_bound=1)
flags.DEFINE_integer("rerank", None, "query: how many candidates are scored again by the store.")
flags.DEFINE_integer("probes", None, "query: how many lists of an inverted file are looked into.", lower_bound=1)
flags.DEFINE_string("where", None, "query: ids that may be found, FIRST-LAST or a file of ids or booleans.")
flags.DEFINE_string("truth", None, "query: file of the ids of the nearest, PATH or PATH#ARRAY, to tell the recall.")
flags.DEFINE_boolean("mapped", False, "query, info: rows, if in no lists, stay in the file.")
flags.DEFINE_string("out", None, "query: .npz file for scores and ids (queries, k); some are printed if there is none.")

TOGETHER, SHOWN = 4096, 5
"""Queries that are searched for together, and those whose results are printed, at most."""
CHECKED = 2**14
"""Vectors that are read at a time before any is encoded."""


def build(
    vectors: str, index: str, method: str, bits: float, metric: Any, store: str, seed: int, lists: int | None = None
) -> None:
    """Writes an index of the vectors of a file."""
    path = _output("index", index, vectors)
    x = _file(vector_files.mapped, vectors)
    key, dim = jax.random.key(seed), x.shape[1]
    stores = {"none": None, "float16": Exact(dim, "float16"), "int8": METHODS["hadamard"](key, dim, 8)}
    quantizer = _quantizer(method, key, dim, bits)
    _check_finite(x, vectors)
    options = {"metric": metric, "store": stores[store]}
    options |= {"lists": lists, "key": jax.random.fold_in(key, 1)} if lists else {}

    def encode() -> Index:
        with tqdm(total=len(x), desc="encode", unit="vector", disable=None) as bar:
            watched = x.view(_Watched)
            watched.bar = bar
            return Index.build(quantizer, watched, **options)

    made = _timed("build", encode, len(x), "vectors")
    path.parent.mkdir(parents=True, exist_ok=True)
    _timed("save", lambda: made.save(path))
    print(f"{len(x):,} vectors: {path}, {path.stat().st_size / 1e6:.2f} MB")


def query(
    index: str,
    queries: str,
    k: int,
    rerank: int | None = None,
    probes: int | None = None,
    where: str | None = None,
    truth: str | None = None,
    mapped: bool = False,
    out: str | None = None,
) -> None:
    """Finds the k vectors nearest to each query."""
    if out and Path(out).suffix != ".npz":
        raise ValueError(f"expected --out to end in .npz, got {out}")
    path = out and _output("out", out, index, queries, where, truth)
    y = _file(vector_files.read, queries)
    passing = _filter(where)
    true = _file(vector_files.read_ids, truth)[:, :k] if truth else None
    if true is not None and len(true) != len(y):
        raise ValueError(f"expected ids for {len(y)} queries in {truth}, got those for {len(true)}")
    loaded = _timed("load", lambda: Index.load(index, mapped=mapped))
    if probes and not loaded.lists:
        raise ValueError(f"{index} has no lists to probe; build it with --lists")
    if rerank and not loaded.store:
        raise ValueError(f"{index} has no store to rerank with; build it with --store=float16 or --store=int8")
    if where or truth:
        _check_ids(loaded, where, passing, truth, true)
    options: dict[str, Any] = {"where": passing, "rerank": rerank} | ({"probes": probes} if probes else {})
    size = min(len(y), TOGETHER)

    def search() -> list[np.ndarray]:
        parts, starts = [], range(0, len(y), size)
        with tqdm(total=len(starts) * len(loaded.rows.ids), desc="search", unit="row", disable=None) as bar:
            searched = _watched(loaded, bar) if mapped else loaded
            for start in starts:
                low = min(start, len(y) - size)  # the last part overlaps the one before: nothing is compiled for it
                found = searched.search(y[low : low + size], k, **options)
                parts.append([np.asarray(a)[start - low :] for a in found])
                bar.update((start // size + 1) * len(loaded.rows.ids) - bar.n)
        return [np.concatenate(arrays) for arrays in zip(*parts, strict=True)]

    if not mapped:
        _timed("compile", lambda: loaded.search(y[:size], k, **options))
    scores, ids = _timed("compile and search" if mapped else "search", search, len(y), "queries")
    if true is not None:
        nearest, all_of_them = metrics.recall(ids, true[:, :1]), metrics.recall(ids, true)
        print(f"recall 1@{k}: {nearest:.4f}, {true.shape[1]}@{k}: {all_of_them:.4f}")
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        with treefile.replacing(path) as temporary, temporary.open("wb") as file:
            np.savez(file, scores=scores, ids=ids)
        print(f"scores and ids {ids.shape}: {path}")
        return
    for i, pairs in enumerate(zip(ids[:SHOWN], scores[:SHOWN], strict=True)):
        print(f"query {i}: " + ", ".join(f"{found} ({score:.4g})" for found, score in zip(*pairs, strict=True)))


def info(index: str, mapped: bool = False) -> None:
    """Says what an index holds and takes."""
    loaded = Index.load(index, mapped=mapped)
    quantizer, store, rows = loaded.quantizer, loaded.store, loaded.rows
    bits = quantizer.bits_per_vector - 32 * bool(loaded.lists)  # rows lie in lists and do not say in which
    quantizer, free = quantizer.inner if isinstance(quantizer, Cells) else quantizer, len(rows.ids) - len(loaded)
    origin = "none" if loaded.origin is None else f"a mean of norm {float(norms.norm(loaded.origin)[0]):.3g}"
    lines = {
        "vectors": f"{len(loaded):,}" + (f", and {free:,} free rows" if free else ""),
        "lists": f"{loaded.lists:,}, of {len(loaded) / loaded.lists:,.0f} vectors" if loaded.lists else "none",
        "dimension": loaded.dim,
        "metric": loaded.metric,
        "center": origin,
        "quantizer": nest(quantizer),
        "store": f"{nest(store)}, {store.bits_per_vector} bits per vector" if store else "none",
        "codes": f"{bits} bits, {bits / 8:g} bytes per vector; {bits / loaded.dim:.3g} bits per coordinate",
    }
    parts = {"codes": rows.codes, "ids": rows.ids, "energies": rows.energies, "store": (rows.stored, store)}
    if isinstance(loaded.quantizer, Cells):
        parts["lists"] = (loaded.quantizer.centroids, loaded.starts)
    for name, part in {**parts, "quantizer": quantizer, "all": loaded}.items():
        lines[f"bytes of {name}"] = f"{nbytes(part):,}"
    if mapped:
        lines["bytes in the file"] = f"{loaded.nbytes_in_file:,}, the others in memory"
    print("\n".join(f"{name:18} {text}" for name, text in lines.items()))


COMMANDS = Registry("command", {command.__name__: command for command in (build, query, info)})


def _file(read: Callable[[str, str], np.ndarray], name: str) -> np.ndarray:
    return read(*name.partition("#")[::2])


def _filter(where: str | None) -> np.ndarray | range | None:
    """Returns the ids that pass: from FIRST to LAST, or those of a file."""
    ends = re.fullmatch(r"(\d+)-(\d+)", where or "")
    if ends:
        return range(int(ends[1]), int(ends[2]) + 1)
    if where and not Path(where.partition("#")[0]).suffix:
        raise ValueError(f"expected FIRST-LAST or a file for --where, got {where}")
    return _file(vector_files.read_filter, where) if where else None


def _check_finite(x: np.ndarray, name: str) -> None:
    """Raises for NaN or Inf in a file of vectors, which an index finds after it has encoded them."""
    for start in range(0, len(x), CHECKED):
        wrong = np.flatnonzero(~np.isfinite(x[start : start + CHECKED]).all(axis=1))
        if len(wrong):
            first = f"the first is vector {start + wrong[0]}"
            raise ValueError(f"expected finite vectors in {name}, got NaN or Inf, {first}")


def _check_ids(index: Index, where: str | None, passing: Any, truth: str | None, true: np.ndarray | None) -> None:
    """Raises if no vector passes the filter, its mask is of other ids, or true neighbors are not in the index."""
    ids = names.known(index.rows.ids)
    ids = ids[ids != names.FREE]
    count = int(np.max(ids, initial=-1)) + 1
    if isinstance(passing, np.ndarray) and passing.dtype == bool and len(passing) != count:
        raise ValueError(f"expected {count} booleans in {where}, one for each id from 0 on, got {len(passing)}")
    if passing is not None and not filters.passes(filters.check_filter(passing), ids).any():
        raise ValueError(f"no vector of the index passes --where={where}")
    if true is None:
        return
    wrong = np.argwhere(~np.isin(true, ids))
    if len(wrong):
        first = f"the first is {true[tuple(wrong[0])]} for query {wrong[0][0]}"
        raise ValueError(f"expected ids of the index in {truth}, got {len(wrong)} others, {first}")


def _watched(index: Index, bar: tqdm) -> Index:
    """An index of mapped rows, whose bar moves on with each part of them that is read."""
    first, *others = jax.tree.leaves(index.rows.codes)
    first = first.view(_Watched)
    first.bar = bar
    codes = jax.tree.unflatten(jax.tree.structure(index.rows.codes), [first, *others])
    return dataclasses.replace(index, rows=dataclasses.replace(index.rows, codes=codes))


class _Watched(np.ndarray):
    """An array whose bar moves on with each slice that is read."""

    bar: tqdm | None = None

    def __getitem__(self, key: Any) -> Any:
        part = np.asarray(super().__getitem__(key))
        if self.bar is not None and isinstance(key, slice):
            self.bar.update(min(len(part), self.bar.total - self.bar.n))
        return part


def _output(flag: str, name: str, *read: str | None) -> Path:
    """Returns a file to write; raises before anything is computed if it cannot be written, or is one that is read."""
    path = Path(name)
    if path.is_dir():
        raise ValueError(f"expected a file for --{flag}, {name} is a folder")
    for other in (Path(text.partition("#")[0]) for text in read if text):
        if path.exists() and other.exists() and path.samefile(other):
            raise ValueError(f"--{flag}={name} would overwrite {other}, which is read")
    folder = next(parent for parent in path.parents if parent.exists())  # others are made when there is a file for them
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ValueError(f"cannot write --{flag}={name}: {error.strerror}") from None
    return path


def _quantizer(method: str, key: jax.Array, dim: int, bits: float) -> Quantizer | Callable[[Any], Quantizer]:
    """Returns a quantizer, or a function that learns one from vectors as they are encoded: directions or residuals."""
    if not math.isfinite(bits):
        raise ValueError(f"expected --bits to be a finite number, got {bits}")
    rate = int(bits) if bits.is_integer() else bits  # most methods take an int alone
    recipe = Registry("method", {**METHODS, **FITTED, "exact": Exact})[method]
    if method == "exact":
        return recipe(dim, "float32")
    if method in METHODS:
        return recipe(key, dim, rate)
    return lambda x: recipe(key, x, rate)


def _timed(stage: str, function: Callable[[], Any], count: int = 0, unit: str = "") -> Any:
    """Returns what the function returns, and prints its seconds."""
    start = time.perf_counter()
    value = jax.block_until_ready(function())
    seconds = time.perf_counter() - start
    print(f"{stage}: {seconds:.2f} s" + (f", {count / seconds:,.0f} {unit}/s" if count else ""), flush=True)
    return value


def _arguments(name: str) -> dict[str, Any]:
    """Values of the flags that have the names of a command's parameters."""
    parameters = inspect.signature(COMMANDS[name]).parameters
    for other in (flag for command in COMMANDS.values() for flag in inspect.signature(command).parameters):
        if other not in parameters and flags.FLAGS[other].present:
            raise ValueError(f"{name} has no --{other}; it has --{', --'.join(parameters)}")
    missing = [flag for flag, p in parameters.items() if p.default is p.empty and flags.FLAGS[flag].value is None]
    if missing:
        raise ValueError(f"{name} needs --{', --'.join(missing)}")
    return {flag: flags.FLAGS[flag].value for flag in parameters}


def main(argv: list[str]) -> None:
    if len(argv) != 2:
        known = ", ".join(COMMANDS)
        raise app.UsageError(f"expected one command of {known}, got {argv[1:]}; flags begin with --, quote spaces")
    try:
        COMMANDS[argv[1]](**_arguments(argv[1]))
    except (ValueError, TypeError, LookupError, OSError, MemoryError, SafetensorError, JaxRuntimeError) as error:
        sys.exit(f"error: {experiments.one_line(error)}")


if __name__ == "__main__":
    app.run(main, flags_parser=experiments.flags_parser)
