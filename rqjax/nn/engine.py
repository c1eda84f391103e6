"""Many texts from one decoder at a time: continuous batching over a paged cache."""

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from rqjax.cache.strategy import Strategy
from rqjax.core import PAGE, check_int
from rqjax.nn.decoder import Decoder
from rqjax.nn.degrade import levels
from rqjax.nn.requests import Event, Request, asked, checked_prompt, checked_sampling, checked_stops, options
from rqjax.nn.sampling import Found, Logprobs, chosen, next_tokens, padded, scores
from rqjax.nn.turns import Turns
from rqjax.nn.weights import Weights, digest
from rqjax.paging.paged import PagedCache
from rqjax.paging.pages import CHUNK, NoRoom


class Engine:
    """Answers to many prompts, in as many slots at a time as there are pages for.

    Each step computes pieces of prompts and a token of each text that has begun (continuous batching; Yu et al., 2022).
    Requests wait for a slot and for pages. If pages run out, the text that was admitted last gives its own back. Later
    its prompt is computed again by pieces, then its tokens one by one, so that the cache is as it was. A request's
    tokens are those of `generate` with `jax.random.key(seed)`, whatever else is computed beside it.

    The decoder's weights may change between steps, as by `nnx.update`: each step compares the identity of their arrays
    and calls `reset` if one is new. `nnx.jit` of a function of the decoder makes all its arrays new, `jax.jit` none.
    `update` takes another decoder and says what becomes of texts that run. Threads that call methods take turns.

    Example:
      >>> import jax
      >>> from rqjax.nn import Engine, load_decoder
      >>> decoder = load_decoder("results/models/qwen2-d64")
      >>> engine = Engine(decoder, "eden_4", jax.random.key(0), pages=8, slots=2)
      >>> ids = [engine.submit([1, 2, 3 + i], max_tokens=4) for i in range(3)]
      >>> {id: len(tokens) for id, tokens in engine.run().items()}
      {0: 4, 1: 4, 2: 4}
      >>> id = engine.submit([1, 2, 3, 4], max_tokens=0, logprobs=1)  # scores the tokens of a prompt but the first
      >>> [(event.token, event.logprob <= event.best[0][1] <= 0) for event in engine.step()]
      [(2, True), (3, True), (4, True)]
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
        step_tokens: int = 1024,
        folder: str | os.PathLike[str] | None = None,
        degrade: Sequence[str | Sequence[Strategy]] = (),
        decode: Callable[[list[int]], str] | None = None,
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
          step_tokens: tokens of prompts that a step reads, up to a piece more, before it makes one of each text.
          folder: where prefixes are kept for other engines of this decoder, strategy and key; see `PagedCache`. Then
            all weights are hashed here and after each `reset`, at about 0.5 GB a second.
          degrade: strategies of fewer and fewer bits, each as `strategy`. Where pages run out, all codes are made anew
            by the next one, in the same bytes, before any text waits or gives its pages back; `degraded` says so, and
            tokens are those of `generate` up to then.
          decode: makes a text of tokens, as `load_tokenizer(...).decode`; only `stop_texts` need it.
          **options: as in `Decoder.caches`.
        """
        room = PAGE * check_int("pages", pages, 1, 2**20) if max_len is None else max_len
        self.decoder, self.max_len, self._turns = decoder, room, Turns()
        self._caches = lambda: self.decoder.caches(strategy, key, slots, room, pages=pages, **options)
        self._book = {"chunk": chunk, "folder": folder}
        self._degrade = levels(decoder, degrade, key, self.paged.caches, pages, room, options)
        self.degraded: list[tuple[str | Sequence[Strategy], int]] = []
        """Strategies that the cache was encoded again with, and the number of pages from then on."""
        self._levels, self._total, self._count, self._decode = [*self._degrade], slots, 0, decode
        self._step_tokens = check_int("step_tokens", step_tokens, 1, 2**30)
        self.begun = 0
        """Number of requests that were given a slot, each time that they begin."""
        self.read = 0
        """Number of tokens of prompts that were computed, not found in pages."""
        self._waiting, self._running, self._events = list[Request](), list[Request](), list[Event]()
        self._blamed, self._refused = None, None  # who raises, if it does; who found no room, with pages to spare

    @functools.cached_property
    def paged(self) -> PagedCache:
        """Caches and the book of their pages; `reset` replaces them."""
        return PagedCache(self._caches(), seed=self._seed(), **self._book)

    def _seed(self) -> bytes:
        """Notes the weights of the decoder, and hashes them if prefixes are in files."""
        self._weights = Weights(self.decoder)
        arrays = [] if self._book["folder"] is None else jax.tree.leaves(self.decoder)
        return digest(f"{self.decoder.config} {[(array.shape, array.dtype) for array in arrays]}", arrays).encode()

    def reset(self) -> None:
        """Forgets all keys and values, not files. Texts that run are read again, with what was made of them, and go on;
        codes have the bits of `strategy` again."""
        with self._turns:
            self._reset()

    def _reset(self) -> None:
        self._waiting, self._running = [*self._running, *self._waiting], []
        self._levels, self.degraded = [*self._degrade], []
        vars(self).pop("paged", None)

    def update(self, decoder: Decoder, *, again: bool = True) -> None:
        """Goes on with the weights of another decoder, as after a step of training. No text finds prefixes of the old
        ones from now on.

        Args:
          decoder: a decoder of the same config, or the same one with other weights.
          again: True reads all texts that run again by the new weights, as `reset` does. False lets them go on with the
            keys and values that they have, of the old weights.

        Raises:
          ValueError: the decoder has another config.

        Example:
          >>> import jax
          >>> from rqjax.nn import Engine, load_decoder
          >>> engine = Engine(load_decoder("results/models/qwen2-d64"), "eden_4", jax.random.key(0), pages=8, slots=2)
          >>> engine.update(load_decoder("results/models/qwen2-d64"), again=False)
        """
        with self._turns:
            if decoder.config != self.decoder.config:
                raise ValueError(f"expected a decoder of the config of the one before, got {decoder.config}")
            self.decoder = decoder
            if again:
                self._reset()
            else:
                self.paged.forget(self._seed())

    def submit(
        self,
        prompt: Any,
        *,
        max_tokens: int,
        temperature: Any = 1.0,
        top_p: Any = 1.0,
        top_k: Any = 0,
        min_p: Any = 0.0,
        stop: Any = (),
        stop_texts: Any = (),
        logprobs: int | None = None,
        score_from: int = 1,
        n: int = 1,
        seed: int | np.integer | None = 0,
    ) -> int:
        """Asks for the tokens after a prompt, or for the log-probabilities of its own. All arguments are checked here.

        Args:
          prompt, temperature, top_p, top_k, min_p: as in `generate`.
          max_tokens: how many tokens to make at most; with 0 the prompt is scored, each token an event.
          stop: tokens that end the text, beside those of the decoder's config; the one that does is its last.
          stop_texts: texts that end the text. The token that completes one is the last, and nothing is cut off.
          logprobs: how many of the likeliest tokens, from 0 to 20, events have with their log-probabilities, beside
            that of their own token. They are natural logarithms of the softmax of the decoder's logits, before
            temperature, `top_p`, `top_k` and `min_p`, as vLLM's `raw_logprobs`.
          score_from: index of the first token that is scored, if `max_tokens` is 0. Only tokens before it may be found
            in the pages of others; those from it on are computed.
          n: samples of the prompt. They share its pages, and each has a number and a seed above the one before.
          seed: of the sampling, from 0 to 2^32 - 1; None draws one.

        Returns:
          The number of the request; its further samples have the numbers after it.

        Raises:
          ValueError: an argument is wrong, or the prompt with its answer is longer than what a slot or all pages hold.
        """
        stops = checked_stops(self.decoder.config, stop, stop_texts, self._decode)
        sampling = checked_sampling(temperature, top_p, top_k, min_p)
        text = checked_prompt(prompt, self.decoder.config.vocab_size)
        request = asked(text, max_tokens, sampling, stops, logprobs, score_from, n, seed)
        with self._turns:
            most = max([self.paged.pages, *(pages for *_, pages in self._levels)])
            if request.length > self.max_len or self.paged.pages_for(request.length) > most:
                held = f"{self.max_len} tokens of a slot or the {most} pages"
                raise ValueError(f"a prompt of {len(text)} tokens and {max_tokens} more do not fit in the {held}")
            for one in (request, *request.others):
                one.id, self._count = self._count, self._count + 1
            self._waiting.append(request)
        return request.id

    @property
    def waiting(self) -> int:
        """Number of requests that wait for a slot."""
        return len(self._waiting) + sum(len(request.others) for request in (*self._waiting, *self._running))

    @property
    def running(self) -> int:
        """Number of requests that have a slot."""
        return len(self._running)

    def cancel(self, id: int) -> None:
        """Forgets a request, not its other samples.

        Raises:
          ValueError: there is no such request, or it is done.
        """
        with self._turns:
            for request in (*self._waiting, *self._running):
                if request.id == id:
                    place = self._waiting.index(request) if request in self._waiting else 0
                    self._dropped(request)
                    self._waiting[place:place] = request.heir()
                    return
                if other := next((other for other in request.others if other.id == id), None):
                    request.others.remove(other)
                    return
        raise ValueError(f"request {id} is not waiting or running")

    def step(self) -> list[Event]:
        """Computes pieces of prompts and a token of each text that has begun; no events if there is nothing to do.

        If the decoder raises, all texts are read again in later steps, and no event is lost. A request whose prompt it
        reads, or whose `stop_texts` are decoded, is dropped if that fails twice at the same token. The exception then
        has a note of its number, and others go on.
        """
        with self._turns:
            self._advance()
            events, self._events = self._events, []
        return events

    def run(self) -> dict[int, list[int]]:
        """Steps until nothing waits or runs, in one thread; returns the tokens of each request that has ended."""
        made: dict[int, list[int]] = {}
        while True:
            with self._turns:
                if not (self._waiting or self._running):
                    events, self._events = self._events, []
                    break
                self._advance()
        for event in events:
            made.setdefault(event.id, []).append(event.token)
        return made

    def _advance(self) -> None:
        if not self._weights.are_of(self.decoder):
            self._reset()
        stop = self.read + self._step_tokens
        try:
            while self._read() and self.read < stop:
                pass
            self._blamed = None
            self._write()
        except BaseException as error:
            blamed, place = self._blamed, self._blamed.fed if self._blamed else 0
            self._reset()  # the caches were donated, and the book may be half written
            if isinstance(error, Exception) and blamed is not None:
                for request in blamed.dropped(self._waiting) if blamed.failed == place else ():
                    error.add_note(f"request {request.id} is dropped")
                blamed.failed = place
            raise

    def _admit(self) -> None:
        # A prompt is looked up in the pages once those before it have been read.
        while self._waiting and len(self._running) < self._total and not any(map(Request.reading, self._running)):
            request = self._waiting[0]
            if self._running and self._refused == (request, self._spare()):
                return
            while self.paged.pages_for(request.length) > self.paged.pages:
                self._shrunk()
            request.slot, request.fed = self.paged.admit(request.prompt[: request.scored])
            if self._running and self._spare(request) < 0:
                self.paged.release(request.slot)
                if self._shrunk():
                    continue
                self._refused = request, self._spare()
                return
            self.begun += 1
            self._running.append(self._waiting.pop(0))

    def _spare(self, *more: Request) -> int:
        """Pages that are free beside those that texts that run are to have."""
        texts, some = (*self._running, *more), bool(self._levels)
        return self.paged.free_pages - sum(self.paged.missing(r.slot, r.expected(degrades=some)) for r in texts)

    def _read(self) -> bool:
        """Reads a piece of the oldest prompt; False if there is none, or no room for it."""
        self._blamed = None
        self._admit()
        request = self._blamed = next(filter(Request.reading, self._running), None)
        if request is None:
            return False
        stop = self.paged.pieces(request.fed, len(request.prompt))[0]
        piece = request.prompt[request.fed : stop]
        if not self._reserved(request, piece):
            return False
        (tokens, valid), slots, wanted = padded(piece, self.paged.chunk), *np.array([[request.slot], [request.wanted]])
        self.read += len(piece)
        if stop >= request.scored < len(request.prompt):
            targets, _ = padded(np.append(request.prompt, 0)[request.fed + 1 : stop + 1], self.paged.chunk)
            found, caches = scores(self.decoder, tokens, self.paged.caches, targets, wanted, valid, slots)
        else:
            found, caches = next_tokens(self.decoder, tokens, self.paged.caches, *options([request]), valid, slots)
        self.paged.update(caches)
        request.read(stop)
        if isinstance(found, Logprobs):
            self._scored(request, Logprobs(*map(np.asarray, found)))
        elif stop == len(request.prompt):
            self._branched(request, found)
            self._made({request: 0}, found)
        return True

    def _scored(self, request: Request, found: Logprobs) -> None:
        """Records events of the tokens of a prompt that the newest piece predicts."""
        last = len(request.prompt) - 1
        for place in range(request.scored, min(request.fed, last) + 1):
            token = int(request.prompt[place])
            self._events.append(request.event(token, place == last, found, 0, place - request.fed - 1))
            request.scored = place + 1
        if request.fed >= last:
            self._dropped(request)

    def _branched(self, request: Request, found: Found) -> None:
        """Begins the other samples of a prompt in copies of its slot; those that find no room wait for one."""
        while request.others:
            other = request.others[0]
            try:
                other.slot, other.fed = self.paged.fork(request.slot), request.fed
            except NoRoom:
                break
            self._running.append(request.others.pop(0))
            self.begun += 1
            self._made({other: 0}, chosen(found.logits, *options([other])))
        self._waiting[:0], request.others = request.others, []

    def _write(self) -> None:
        """Makes a token of each text."""
        requests = [r for r in [*self._running] if not r.reading() and self._reserved(r, 1)]
        requests = [r for r in requests if r in self._running]  # reserving for one may drop another
        if not requests:
            return
        tokens, valid = np.zeros((2, self._total), np.int32)
        rows: list[Request | None] = [None] * self._total
        for r in requests:
            tokens[r.slot], valid[r.slot], rows[r.slot] = r.made[r.after], 1, r
            r.fed += 1
        found, caches = next_tokens(self.decoder, tokens[:, None], self.paged.caches, *options(rows), valid, None)
        self.paged.update(caches)
        self._made({r: r.slot for r in requests}, found)

    def _reserved(self, request: Request, tokens: Any) -> bool:
        """Reserves pages for tokens, if need be those of the texts that were admitted last; False if it fails."""
        while request in self._running:
            try:
                self.paged.reserve(request.slot, tokens)
                return True
            except NoRoom:
                if not self._shrunk():
                    self._waiting.insert(0, self._running[-1])
                    self._dropped(self._running[-1])
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

    def _made(self, rows: dict[Request, int], found: Found) -> None:
        """Records events of the tokens in rows of what was found; a request that is read again had some before."""
        tokens, some = np.asarray(found.tokens), any(request.wanted >= 0 for request in rows)
        logprobs = Logprobs(*map(np.asarray, found.logprobs)) if some else None
        for request, row in rows.items():
            if request.after < len(request.made):
                continue
            token, self._blamed = int(tokens[row]), request
            done = request.ends(token, self._decode)
            request.passed()
            request.made.append(token)
            self._events.append(request.event(token, done, logprobs, row))
            if done:
                self._dropped(request)
