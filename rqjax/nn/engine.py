"""Many texts from one decoder at a time: continuous batching over a paged cache."""

import functools
import os
import secrets
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from rqjax.cache.strategy import Strategy
from rqjax.core import PAGE, check_int, check_ints
from rqjax.nn.decoder import Decoder
from rqjax.nn.degrade import level
from rqjax.nn.requests import Event, Request, checked_prompt, checked_sampling
from rqjax.nn.sampling import keys_of, next_tokens, padded
from rqjax.nn.weights import Weights, digest
from rqjax.paging.paged import PagedCache
from rqjax.paging.pages import CHUNK, NoRoom


class Engine:
    """Answers to many prompts, in as many slots at a time as there are pages for.

    Each step computes a piece of one prompt and a token of every text that has begun (continuous batching; Yu et al.,
    2022). Requests wait for a slot and for pages. If pages run out, the text that was admitted last gives its own back
    and is computed again later. Its prompt is read by pieces, then its tokens one by one, so that the cache is as it
    was. A request's tokens are those of `generate` with `jax.random.key(seed)`, whatever else is computed beside it.

    The decoder's weights may change between steps, as by `nnx.update`: each step compares the identity of their arrays
    and calls `reset` if one is new. `nnx.jit` of a function of the decoder makes all its arrays new, `jax.jit` none.

    Example:
      >>> import jax
      >>> from rqjax.nn import Engine, load_decoder
      >>> decoder = load_decoder("results/models/qwen2-d64")
      >>> engine = Engine(decoder, "eden_4", jax.random.key(0), pages=8, slots=2)
      >>> ids = [engine.submit([1, 2, 3 + i], max_tokens=4) for i in range(3)]
      >>> {id: len(tokens) for id, tokens in engine.run().items()}
      {0: 4, 1: 4, 2: 4}
    """

    def __init__(
        self,
        decoder: Decoder,
        strategy: str | Sequence[Strategy],
        key: Array,
        *,
        pages: int,
        slots: int,
        max_len: int | None = None,
        chunk: int = CHUNK,
        folder: str | os.PathLike[str] | None = None,
        degrade: Sequence[str | Sequence[Strategy]] = (),
        **options: Any,
    ):
        """An engine without requests.

        Args:
          decoder: the decoder.
          strategy: of the caches, as in `Decoder.caches`.
          key: random key of the caches.
          pages: of 128 tokens, which the texts share, in each layer.
          slots: texts at a time.
          max_len: tokens of a text at most; as many as the pages hold, if not given.
          chunk: as in `PagedCache`.
          folder: where prefixes are kept for other engines of this decoder, strategy and key; see `PagedCache`. Then
            all weights are hashed here and after each `reset`, at about 0.5 GB a second.
          degrade: strategies of fewer and fewer bits, each as `strategy`. Where pages run out, all codes are made anew
            by the next one, in the same bytes, before any text waits or gives its pages back; `degraded` says so.
            Tokens are those of `generate` up to then.
          **options: as in `Decoder.caches`.
        """
        room = PAGE * check_int("pages", pages, 1, 2**20) if max_len is None else max_len
        self.decoder, self.max_len = decoder, room
        self._caches = lambda: self.decoder.caches(strategy, key, slots, room, pages=pages, **options)
        self._book = {"chunk": chunk, "folder": folder}
        caches = self.paged.caches
        self._degrade = [level(decoder, name, key, caches, room, options) for name in degrade]
        counts = [pages, *(one[-1] for one in self._degrade)]
        if sorted(set(counts)) != counts:
            raise ValueError(f"expected degrade= of fewer and fewer bits, got strategies of {counts} pages")
        self._levels = [*self._degrade]
        self.degraded: list[tuple[str | Sequence[Strategy], int]] = []
        """Strategies that the cache was encoded again with, and the number of pages from then on."""
        self._total, self._count = slots, 0
        self.begun = 0
        """Number of requests that were given a slot; one that is begun again counts again."""
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._events: list[Event] = []

    @functools.cached_property
    def paged(self) -> PagedCache:
        """Caches and the book of their pages; `reset` replaces them."""
        self._weights = Weights(self.decoder)
        arrays = [] if self._book["folder"] is None else jax.tree.leaves(self.decoder)
        seed = digest(f"{self.decoder.config} {[(array.shape, array.dtype) for array in arrays]}", arrays)
        return PagedCache(self._caches(), seed=seed.encode(), **self._book)

    def reset(self) -> None:
        """Forgets all keys and values, not files. Texts that run are read again, with what was made of them, and go on;
        codes have the bits of `strategy` again."""
        self._waiting, self._running = [*self._running, *self._waiting], []
        self._levels, self.degraded = [*self._degrade], []
        vars(self).pop("paged", None)

    def submit(
        self,
        prompt: Any,
        *,
        max_tokens: int,
        temperature: Any = 1.0,
        top_p: Any = 1.0,
        stop: Any = (),
        seed: int | np.integer | None = 0,
    ) -> int:
        """Asks for the tokens after a prompt. All arguments are checked here.

        Args:
          prompt, temperature, top_p: as in `generate`.
          max_tokens: how many tokens to make at most.
          stop: tokens that end the text, beside those of the decoder's config; the one that does is its last.
          seed: of the sampling, from 0 to 2^32 - 1; None draws one.

        Returns:
          The number of the request.

        Raises:
          ValueError: an argument is wrong, or the prompt with its answer is longer than what a slot or all pages hold.
        """
        config, most = self.decoder.config, max([self.paged.pages, *(pages for *_, pages in self._levels)])
        text, sampling = checked_prompt(prompt, config.vocab_size), checked_sampling(temperature, top_p)
        check_int("max_tokens", max_tokens, 1, 2**30)
        ends = np.ravel(check_ints("stop", stop, config.vocab_size - 1)).tolist()
        seed = secrets.randbits(32) if seed is None else check_int("seed", seed, 0, 2**32 - 1)
        request = Request(self._count, text, max_tokens, *sampling, frozenset([*ends, *config.eos_token_ids]), seed)
        if request.length > self.max_len or self.paged.pages_for(request.length) > most:
            held = f"{self.max_len} tokens of a slot or the {most} pages"
            raise ValueError(f"a prompt of {len(request.prompt)} tokens and {max_tokens} more do not fit in the {held}")
        self._waiting.append(request)
        self._count += 1
        return request.id

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a slot."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Number of requests that have a slot."""
        return len(self._running)

    def cancel(self, id: int) -> None:
        """Forgets a request.

        Raises:
          ValueError: there is no such request, or it is done.
        """
        found = next((request for request in (*self._waiting, *self._running) if request.id == id), None)
        if found is None:
            raise ValueError(f"request {id} is not waiting or running")
        self._dropped(found)

    def step(self) -> list[Event]:
        """Computes a piece of a prompt and a token of each text that has begun; no events if there is nothing to do.

        If the decoder raises, all texts are read again in later steps, and no event is lost. A request whose prompt it
        fails to read twice in a row is dropped, so that others go on; the exception has a note of its number.
        """
        self._advance()
        events, self._events = self._events, []
        return events

    def run(self) -> dict[int, list[int]]:
        """Steps until nothing waits or runs; returns the tokens of each request that has ended."""
        made: dict[int, list[int]] = {}
        while self._waiting or self._running:
            self._advance()
        for event in self.step():
            made.setdefault(event.id, []).append(event.token)
        return made

    def _advance(self) -> None:
        if not self._weights.are_of(self.decoder):
            self.reset()
        reading = None
        try:
            self._admit()
            reading = next((r for r in self._running if r.fed < len(r.prompt)), None)
            if reading is not None:
                self._read(reading)
            others, reading = [r for r in self._running if r.fed >= len(r.prompt) and r is not reading], None
            self._write(others)
        except BaseException as error:
            self.reset()  # the caches were donated, and the book may be half written
            if isinstance(error, Exception) and reading is not None:
                if reading.failed:
                    self._waiting.remove(reading)
                    error.add_note(f"request {reading.id} is dropped")
                reading.failed = True
            raise

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._total:
            request = self._waiting[0]
            while self.paged.pages_for(request.length) > self.paged.pages:
                self._shrunk()
            request.slot, request.fed = self.paged.admit(request.prompt)
            missing = sum(self.paged.missing(r.slot, len(r.prompt) + len(r.made)) for r in (*self._running, request))
            if self._running and missing > self.paged.free_pages:
                self.paged.release(request.slot)
                if self._shrunk():
                    continue
                return
            self.begun += 1
            self._running.append(self._waiting.pop(0))

    def _read(self, request: Request) -> None:
        """Reads a piece of a prompt."""
        stop = self.paged.pieces(request.fed, len(request.prompt))[0]
        piece = request.prompt[request.fed : stop]
        if not self._reserved(request, piece):
            return
        tokens, valid = padded(piece, self.paged.chunk)
        found = self._called([request], tokens, valid, np.array([request.slot]))
        request.fed, request.failed = stop, False
        self._made({request: int(found[0])} if stop == len(request.prompt) else {})

    def _write(self, requests: list[Request]) -> None:
        """Makes a token of each text."""
        requests = [r for r in requests if self._reserved(r, 1)]
        requests = [r for r in requests if r in self._running]  # reserving for one may drop another
        if not requests:
            return
        tokens, valid = np.zeros((2, self._total), np.int32)
        rows: list[Request | None] = [None] * self._total
        for r in requests:
            tokens[r.slot], valid[r.slot], rows[r.slot] = r.made[r.after], 1, r
            r.fed += 1
        found = self._called(rows, tokens[:, None], valid, None)
        self._made({r: int(found[r.slot]) for r in requests})

    def _reserved(self, request: Request, tokens: Any) -> bool:
        """Reserves pages for tokens, if need be those of the texts that were admitted last; False if it fails."""
        while request in self._running:
            try:
                self.paged.reserve(request.slot, tokens)
                return True
            except NoRoom:
                if not self._shrunk():
                    last = self._running[-1]
                    self._dropped(last)
                    self._waiting.insert(0, last)
        return False

    def _shrunk(self) -> bool:
        """Encodes the cache again in fewer bits, for more pages; False if no strategy is left."""
        if not self._levels:
            return False
        name, strategies, pages = self._levels.pop(0)
        self.paged.requantize(strategies, pages)
        self.degraded.append((name, pages))
        return True

    def _dropped(self, request: Request) -> None:
        if request in self._running:
            self.paged.release(request.slot)
            self._running.remove(request)
        else:
            self._waiting.remove(request)

    def _called(
        self, rows: Sequence[Request | None], tokens: np.ndarray, valid: np.ndarray, slots: np.ndarray | None
    ) -> np.ndarray:
        """Appends tokens to the rows' slots, and returns the token after each row."""
        sampling = [(r.temperature, r.top_p, r.seed, max(r.after, 0)) if r else (0, 1, 0, 0) for r in rows]
        temperature, top_p, seeds, counts = map(np.asarray, zip(*sampling, strict=True))
        numbers = temperature.astype(np.float32), top_p.astype(np.float32), keys_of(seeds.astype(np.uint32), counts)
        found, caches = next_tokens(self.decoder, tokens, self.paged.caches, *numbers, valid, slots)
        self.paged.update(caches)
        return np.asarray(found)

    def _made(self, found: dict[Request, int]) -> None:
        """Records events of the tokens that were found; a request that is read again had some before."""
        for request, token in found.items():
            if request.after < len(request.made):
                continue
            request.made.append(token)
            done = token in request.stop or len(request.made) == request.max_tokens
            self._events.append(Event(request.id, token, done))
            if done:
                self._dropped(request)
