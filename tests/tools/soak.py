"""Requests of many kinds from several threads to one engine, with cancels and faults, and what holds after each step.

python -m tests.tools.soak --requests=10000 --strategy=eden_4 --degrade=eden_3,eden_2
"""

import argparse
import collections
import itertools
import random
import resource
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np

from rqjax.core import treefile
from rqjax.nn import Engine, Event, engine as engines, load_decoder, sampling
from tests.paging.test_paged import checked

OPTIONS: dict[str, Any] = {"pages": 6, "slots": 3, "chunk": 128, "window": 16, "sinks": 4}
WAITING = 12
"""Texts that wait or run at most."""


def said(ids: list[int]) -> str:
    return "".join(f"w{id}," for id in ids)


def kinds() -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts of three beginnings or of their own, with all options of requests."""
    rng = np.random.default_rng(0)
    begin = rng.integers(3, 60, (3, 290)).tolist()

    def own(count: int) -> list[int]:
        return rng.integers(3, 60, count).tolist()

    found = [([*begin[i % 3], *own(1 + 7 * i)], {"max_tokens": 2 + i, "seed": i}) for i in range(6)]
    found += [(own(1 + 9 * i), {"max_tokens": 1 + i, "top_k": i, "min_p": 0.02 * i, "stop": [i]}) for i in range(8)]
    found += [(own(30), {"max_tokens": 40, "stop_texts": ["2,w", ",w7"], "top_p": 0.9, "logprobs": 2})]
    found += [([*begin[0], *own(9)], {"max_tokens": 4, "n": 3, "seed": 2**32 - 1, "logprobs": 0})]
    found += [([*begin[i], *own(20)], {"max_tokens": 0, "logprobs": 3, "score_from": 1 + 140 * i}) for i in range(3)]
    return found


def soak(engine: Engine, count: int, threads: int, *, exact: bool = True) -> dict[str, Any]:
    """Asks for `count` requests at least, and returns what happened.

    Files of prefixes are damaged, writers are killed, the disk is full at times, and the decoder fails. After each step
    pages are in use as often as they are named, and texts have begun in the order in which they were asked for.

    Raises:
      AssertionError: something does not hold, an answer is lost or, if `exact`, not that of the request alone.
    """
    asked: dict[int, tuple[int, int]] = {}
    made: dict[int, list[Event]] = collections.defaultdict(list)
    gone, begun, told = set[int](), set[int](), collections.Counter[str]()
    room, errors = threading.Semaphore(WAITING), list[BaseException]()
    all_kinds = kinds()
    alone = [_alone(engine, *kind) for kind in all_kinds] if exact else []
    arrays, programs, memory = len(jax.live_arrays()), _programs(), list[int]()

    def asks(number: int) -> None:
        rng, mine = random.Random(number), collections.deque[int](maxlen=8)
        for _ in range(-(-count // threads)):
            kind = rng.randrange(len(all_kinds))
            prompt, options = all_kinds[kind]
            samples = range(options.get("n", 1))
            for _ in samples:
                room.acquire()
            first = engine.submit(prompt, **options)
            asked.update({first + i: (kind, i) for i in samples})
            mine.append(first + rng.choice(samples))
            if rng.random() < 0.1:
                try:
                    engine.cancel(id := rng.choice(mine))
                except ValueError:
                    continue  # it is done
                gone.add(id)
                told["cancelled"] += 1
                room.release()

    def guarded(number: int) -> None:
        try:
            asks(number)
        except BaseException as error:
            errors.append(error)

    def step() -> None:
        try:
            events = engine.step()
        except RuntimeError as error:
            events = []
            told["failures"] += 1
            for note in getattr(error, "__notes__", []):
                gone.add(int(note.split()[1]))
                told["dropped"] += 1
                room.release()
        for event in events:
            if event.id not in gone:
                made[event.id].append(event)
                told["done"] += event.done
                if event.done:
                    room.release()
        with engine._turns:
            checked(engine.paged)
            begun.update(request.id for request in engine._running)
            late = [request.id for request in engine._waiting if request.id not in begun]
        assert not late or min(late) > max(begun, default=-1), (late, max(begun))
        for id in [id for id in {*made, *gone} if id in asked and (id in gone or made[id][-1].done)]:
            kind, sample = asked.pop(id)
            found = made.pop(id, [])
            if exact and id not in gone:
                _same(found, alone[kind][sample])

    with _faults(engine, told) as spoil:
        workers = [threading.Thread(target=guarded, args=(number,), daemon=True) for number in range(threads)]
        for worker in workers:
            worker.start()
        started = time.perf_counter()
        while any(worker.is_alive() for worker in workers) or engine.waiting or engine.running:
            spoil()
            step()
            told["steps"] += 1
            if told["done"] >= len(memory) * count // 10:
                memory.append(_resident())
            assert not errors, errors
    step()  # what a failure kept
    assert not asked, asked
    assert engine.paged.free_pages == engine.paged.pages
    seconds = time.perf_counter() - started
    more = {"arrays": len(jax.live_arrays()) - arrays, "programs": _programs() - programs}
    return {**told, **more, "seconds": round(seconds), "megabytes": [size // 2**20 for size in memory]}


def _alone(engine: Engine, prompt: list[int], options: dict[str, Any]) -> list[list[Event]]:
    """Events of each sample, with nothing beside it."""
    first, found = engine.submit(prompt, **options), collections.defaultdict(list)
    while engine.waiting or engine.running:
        for event in engine.step():
            found[event.id - first].append(event)
    return [found[i] for i in range(options.get("n", 1))]


def _same(found: list[Event], expected: list[Event]) -> None:
    assert [(event.token, event.done) for event in found] == [(event.token, event.done) for event in expected]
    for one, other in zip(found, expected, strict=True):
        assert [token for token, _ in one.best] == [token for token, _ in other.best]
        nats = [[event.logprob or 0, *(x for _, x in event.best)] for event in (one, other)]
        np.testing.assert_allclose(*nats, atol=1e-4)


@contextmanager
def _faults(engine: Engine, told: collections.Counter[str]) -> Iterator[Callable[[], None]]:
    """Makes decoders and disks fail; yields a function that spoils files."""
    rng, folder = random.Random(7), Path(engine._book["folder"])
    real_save = treefile.save

    def save(tree: Any, path: Path, **options: str) -> None:
        if not told["full"] or rng.random() < 0.1:
            told["full"] += 1
            raise OSError(28, "No space left on device")
        real_save(tree, path, **options)

    calls = itertools.count(1)

    def failing(real: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            if (call := next(calls)) % 250 == 100:
                raise RuntimeError("before")
            found = real(*args)
            if call % 250 == 200:
                raise RuntimeError("after")  # the caches were donated
            return found

        return called

    def spoil() -> None:
        if rng.random() < 0.05 and (files := sorted(folder.iterdir())):
            path = rng.choice(files)
            data = bytearray(path.read_bytes())
            data[rng.randrange(len(data))] ^= 255
            path.write_bytes(data[: rng.choice((len(data), len(data) // 2))])
            path.with_name(".half").write_bytes(data[:99])  # as of a killed writer
            told["damaged"] += 1

    with (
        mock.patch.object(treefile, "save", save),
        mock.patch.object(engines, "next_tokens", failing(engines.next_tokens)),
        mock.patch.object(engines, "scores", failing(engines.scores)),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield spoil


def _programs() -> int:
    return sum(sampling.compiled(step, "cpu")._cache_size() for step in (sampling._next_tokens, sampling._scores))


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> None:
    """Runs one soak and prints what happened."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--strategy", default="eden_4")
    parser.add_argument("--degrade", default="", help="strategies of fewer bits; answers are then not compared")
    asked = parser.parse_args()
    decoder, key = load_decoder(Path(__file__).parents[1] / "checkpoints" / "llama"), jax.random.key(7)
    levels = [name for name in asked.degrade.split(",") if name]
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(decoder, asked.strategy, key, folder=folder, decode=said, degrade=levels, **OPTIONS)
        print(soak(engine, asked.requests, asked.threads, exact=not levels))
        print({"begun": engine.begun, "read": engine.read, "degraded": engine.degraded})


if __name__ == "__main__":
    main()
