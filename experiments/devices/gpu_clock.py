"""Device time of functions of jax and of torch, by one method for both: a full queue.

A long piece of work is queued on the device, behind it `count` calls of the function, each on inputs of its own, and
the host waits for all results. The calls are launched while the long piece runs, so what the host takes for them is
hidden. The same without the calls is subtracted, and the rest is divided by their number. The long piece streams
gigabytes through the L2 cache, so every call finds its inputs in memory. The median over the rounds is reported.

The time contains the kernels and the gaps between them on the device, about a microsecond each. Its error is that of
the host's clock and its waking up, about 10 us a round. Divided by the calls of a round (up to 24) it is 0.5 us, and
less in the median of 25. A function that waits for the device by itself, as XLA does at a branch or a loop that depends
on data, cannot be queued. `queued` is then False, and the time is what a caller sees, host included.
"""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

L2 = 60 * 2**20
MEMORY = 8 * 2**30
"""Bytes of inputs and results that one measurement may hold at a time, if they are not of one call."""
STEPS = 6
"""Passes of the long piece over its memory; on an H200 a GiB takes half a millisecond."""


class Settings(NamedTuple):
    """Settings of a clock; `of` takes them from a config."""

    rounds: int
    calls: int
    """Calls of a round, at most; jax's own limit of programs in flight is 32."""
    occupy_mib: int
    """Memory, in MiB, that the long piece reads and writes `STEPS` times."""

    @classmethod
    def of(cls, point: dict[str, Any]) -> "Settings":
        return cls(point["rounds"], point["calls"], point["occupy_mib"])


class Time(NamedTuple):
    us: float
    spread: float
    """Half the distance of the quartiles, in microseconds."""
    queued: bool


class Clock(NamedTuple):
    """A library's ways to keep the device busy and to wait for it."""

    occupy: Callable[[], Any]
    wait: Callable[[Any], Any]
    rounds: int

    def time(self, calls: Sequence[Callable[[], Any]]) -> Time:
        """Measures the device time of one of the calls, which do the same on inputs of their own."""
        for call in (*calls, self.occupy):
            self.wait(call())
        times, launched, idle = [], [], []
        for _ in range(self.rounds + 1):
            start = time.perf_counter()
            busy = self.occupy()
            results = [call() for call in calls]  # kept, so that no memory is freed and used again
            launched.append(time.perf_counter() - start)
            self.wait((busy, results))
            full = time.perf_counter() - start
            del results
            start = time.perf_counter()
            self.wait(self.occupy())
            idle.append(time.perf_counter() - start)
            times.append((full - idle[-1]) / len(calls) * 1e6)
        low, middle, high = np.percentile(times[1:], (25, 50, 75))
        return Time(float(middle), float(high - low) / 2, bool(np.median(launched) < np.median(idle)))


def counts(settings: Settings, bytes_read: int, bytes_moved: int) -> tuple[int, int]:
    """Returns the calls of a round, and the number of sets of inputs that keeps all of them out of the L2 cache."""
    calls = min(settings.calls, max(3, MEMORY // max(bytes_moved, 1)))
    return calls, min(calls, -(-4 * L2 // max(bytes_read, 1)))


def over(function: Callable[..., Any], inputs: Sequence[tuple[Any, ...]], calls: int) -> list[Callable[[], Any]]:
    """Makes `calls` calls that take turns among the inputs."""
    return [functools.partial(function, *inputs[i % len(inputs)]) for i in range(calls)]


@functools.cache
def of_jax(settings: Settings) -> Clock:
    numbers = jax.random.normal(jax.random.key(0), (settings.occupy_mib * 2**18,))

    @jax.jit
    def occupy(x: jax.Array) -> jax.Array:
        for _ in range(STEPS):
            x = lax.optimization_barrier(x * 0.99 + 1)  # else XLA would do all in one pass
        return x[:1]

    return Clock(lambda: occupy(numbers), jax.block_until_ready, settings.rounds)


@functools.cache
def of_torch(settings: Settings) -> Clock:
    """Makes a clock of torch, on its GPU or, for a rehearsal, on the CPU."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    numbers = torch.randn(settings.occupy_mib * 2**18, device=device)

    def occupy() -> None:
        for _ in range(STEPS):
            numbers.mul_(-1)

    return Clock(occupy, lambda _: torch.cuda.synchronize() if device == "cuda" else None, settings.rounds)
