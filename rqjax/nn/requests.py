"""Requests to an engine, and its events."""

import dataclasses
import math
import secrets
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, SupportsFloat

import jax
import numpy as np

from rqjax.core import check_int, check_ints, check_text
from rqjax.nn.config import DecoderConfig
from rqjax.nn.sampling import BEST, Logprobs, Sampling, batched, keys_of


class Event(NamedTuple):
    """A token that a step has made for a request, or one of a prompt that it has scored."""

    id: int
    token: int
    done: bool
    logprob: float | None = None
    """Log-probability of the token, if the request asked for it: of the logits as the decoder gives them, before
    temperature and choices of the likeliest."""
    best: tuple[tuple[int, float], ...] = ()
    """Likeliest tokens, as many as the request asked for, in order, each with its log-probability."""


@dataclasses.dataclass(eq=False)
class Request:
    """A text that is being made."""

    prompt: np.ndarray
    max_tokens: int
    sampling: Sampling
    seed: int
    stop: frozenset[int]
    stop_texts: tuple[str, ...]
    wanted: int
    """Number of likeliest tokens that have log-probabilities beside the own one; -1: not even that."""
    scored: int
    """Token of the prompt whose log-probability is the next that is wanted; the prompt's length, if none is."""
    others: list["Request"] = dataclasses.field(default_factory=list)
    """Further samples of the prompt, which begin when it has been read."""
    made: list[int] = dataclasses.field(default_factory=list)
    id: int = -1
    slot: int = -1
    fed: int = 0
    """Tokens in the cache, of the prompt and of what was made."""

    failed: int = -1
    """Tokens that were in the cache when the decoder failed at this request; -1 if it did not."""

    @property
    def length(self) -> int:
        """Tokens of the text in all, if none ends it before."""
        return len(self.prompt) + self.max_tokens

    def expected(self, *, degrades: bool) -> int:
        """Tokens to have pages for before another text begins: all that are asked for, since a text that must give its
        pages back costs more than one that waits. Where the cache `degrades` instead, those that there are."""
        return len(self.prompt) + len(self.made) if degrades else self.length

    @property
    def after(self) -> int:
        """Index of the made token that comes after those in the cache."""
        return self.fed - len(self.prompt)

    def reading(self) -> bool:
        """Returns whether a part of the prompt is still to be read."""
        return self.fed < len(self.prompt)

    def passed(self) -> None:
        """Forgets a failure at the token that has been computed now."""
        if self.failed == self.fed:
            self.failed = -1

    def read(self, stop: int) -> None:
        """Takes note of a piece of the prompt that is in the cache now."""
        self.passed()
        self.fed = stop

    def dropped(self, waiting: list["Request"]) -> list["Request"]:
        """Takes the request out of those that wait, and with a prompt that cannot be read all of its samples."""
        place, whole = waiting.index(self), self.failed < len(self.prompt)
        waiting[place : place + 1] = [] if whole else self.heir()
        return [self, *self.others] if whole else [self]

    def heir(self) -> list["Request"]:
        """Returns the next sample, if there is one, with those after it as its own."""
        if self.others:
            self.others[0].others = self.others[1:]
        return self.others[:1]

    def ends(self, token: int, decode: Callable[[list[int]], str] | None) -> bool:
        """Returns whether the text ends with one more token."""
        if token in self.stop or len(self.made) + 1 == self.max_tokens:
            return True
        if decode is None or not self.stop_texts:
            return False
        # A token has a byte at least. The first one may lose a space, so that one more is decoded. If it is one of the
        # up to four bytes of a character, some decoders spoil all bytes behind it.
        count = max(len(text.encode()) for text in self.stop_texts)
        for more in range(4):
            newest = decode([*self.made[-count - more :], token])
            if any(text in newest for text in self.stop_texts):
                return True
            if "\ufffd" not in newest:
                break
        return False

    def event(self, token: int, done: bool, found: Logprobs | None, *place: int) -> Event:
        """Returns an event with the log-probabilities at a place, if they are wanted."""
        if self.wanted < 0 or found is None:
            return Event(self.id, token, done)
        own, best, tokens = (x[place] for x in found)
        pairs = zip(tokens[: self.wanted].tolist(), best[: self.wanted].tolist(), strict=True)
        return Event(self.id, token, done, float(own), tuple(pairs))


def checked_prompt(prompt: Any, vocabulary: int) -> np.ndarray:
    """Returns the tokens (time,) of a prompt.

    Raises:
      ValueError: it is not one text of whole numbers below the vocabulary's size, or empty.
    """
    text = check_ints("tokens", check_text(prompt), vocabulary - 1)
    if not len(text):
        raise ValueError("expected a prompt of at least one token, got none")
    return np.asarray(text)


def checked_sampling(temperature: Any, top_p: Any, top_k: Any, min_p: Any) -> Sampling:
    """Returns all as numbers.

    Raises:
      ValueError: they are no numbers, or out of range.
    """
    heat, part, least = (float(x) if isinstance(x, SupportsFloat) else math.nan for x in (temperature, top_p, min_p))
    if not (0 <= heat <= 1e6 and 0 < part <= 1):
        raise ValueError(f"expected 1e6 >= temperature >= 0 and 0 < top_p <= 1, got {temperature} and {top_p}")
    if not 0 <= least <= 1:
        raise ValueError(f"expected 0 <= min_p <= 1, got {min_p}")
    return Sampling(heat, part, check_int("top_k", top_k, 0, 2**24), least)


def checked_stops(
    config: DecoderConfig, stop: Any, stop_texts: Any, decode: Any
) -> tuple[frozenset[int], tuple[str, ...]]:
    """Returns the tokens that end a text, with those of the config, and the texts, given as one or several.

    Raises:
      ValueError: they are no tokens of the vocabulary, no texts, or empty, or nothing decodes tokens.
    """
    texts = (stop_texts,) if isinstance(stop_texts, str) else stop_texts
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"expected stop_texts to be texts of a character at least, got {stop_texts!r}")
    if texts and decode is None:
        raise ValueError("stop_texts need an Engine with decode=, as of a tokenizer")
    tokens = np.ravel(check_ints("stop", stop, config.vocab_size - 1)).tolist()
    return frozenset([*tokens, *config.eos_token_ids]), tuple(texts)


def asked(
    text: np.ndarray,
    max_tokens: int,
    sampling: Sampling,
    stops: tuple[frozenset[int], tuple[str, ...]],
    logprobs: int | None,
    score_from: int,
    n: int,
    seed: int | np.integer | None,
) -> Request:
    """Returns the request for a text, with its further samples; see `Engine.submit`.

    Raises:
      ValueError: a number is out of range.
    """
    wanted = -1 if logprobs is None else check_int("logprobs", logprobs, 0, BEST)
    scoring = check_int("max_tokens", max_tokens, int(wanted < 0), 2**30) == 0
    if scoring and len(text) == 1:
        raise ValueError("expected a prompt of at least two tokens to score, got one")
    first = check_int("score_from", score_from, 1, len(text) - 1 if scoring else 1)
    seed = secrets.randbits(32) if seed is None else check_int("seed", seed, 0, 2**32 - 1)
    request, *others = (
        Request(text, max_tokens, sampling, (seed + i) % 2**32, *stops, wanted, first if scoring else len(text))
        for i in range(check_int("n", n, 1, 1 if scoring else 2**16))
    )
    request.others = others
    return request


def options(rows: Sequence[Request | None]) -> tuple[Sampling, jax.Array, np.ndarray]:
    """Returns how the next token of each row is sampled, its key, and which log-probabilities are wanted."""
    free = Sampling(0, 1, 0, 0), 0, 0, -1
    asked = [(r.sampling, r.seed, max(r.after, 0), r.wanted) if r else free for r in rows]
    samplings, seeds, counts, wanted = zip(*asked, strict=True)
    return batched(samplings), keys_of(np.array(seeds, np.uint32), np.array(counts)), np.array(wanted)
