"""A decoder whose keys and values go through a compressed cache, as lm_eval (lm-evaluation-harness) asks for it.

An `Engine` scores and makes all texts, so that a question is read once for all its answers. Tokens of a piece see each
other in full precision there, as when the engine serves.
"""

from typing import Any

import jax

import rqjax
from rqjax.core import PAGE, check_int, extras
from rqjax.nn import Decoder, Engine, Event
from rqjax.paging.pages import CHUNK

with extras.explained():
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM

MADE = 256
"""Tokens of a text, if a task does not say how many."""
LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names by which tasks say it."""


class CachedLM(TemplateLM):
    """A decoder as lm_eval asks for it."""

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Any,
        strategy: str | list[rqjax.Strategy],
        *,
        batch: int = 8,
        chunk: int = CHUNK,
        max_length: int = 2048,
        seed: int = 0,
        **options: Any,
    ):
        """Makes an engine of `batch` slots; `options` are those of `Decoder.caches`."""
        super().__init__()
        self.tokens, self.max_length, self.ends = tokenizer, max_length, decoder.config.eos_token_ids
        self.engine = Engine(
            decoder,
            strategy,
            jax.random.key(seed),
            pages=batch * -(-(max_length + 1) // PAGE),
            slots=batch,
            max_len=max_length + 1,
            chunk=chunk,
            decode=tokenizer.decode,
            **options,
        )

    @property
    def eot_token_id(self) -> int:
        return min(self.ends, default=0)

    @property
    def prefix_token_id(self) -> int:
        """Token before texts without a context: the one that texts begin with, if there is one."""
        return (*self.tok_encode(""), self.eot_token_id)[0]

    @property
    def tokenizer_name(self) -> str:
        return "rqjax"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return self.tokens.encode(string, add_special_tokens=add_special_tokens is not False).ids

    def _loglikelihood_tokens(self, requests: list[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        """Returns the log-likelihood of the continuation of each (texts, context, continuation), and whether its tokens
        are the likeliest."""
        ids = []
        for _, context, rest in requests:
            text = [*context, *rest][-self.max_length - 1 :]
            first = max(1, len(text) - len(rest))
            ids.append(self.engine.submit(text, max_tokens=0, logprobs=1, score_from=first))
        events = self._events()
        return [
            (sum(event.logprob or 0.0 for event in made), all(event.token == event.best[0][0] for event in made))
            for made in map(events.__getitem__, ids)
        ]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Returns the log-likelihood of whole texts, in windows of `max_length` tokens, each predicted once."""
        found = []
        for request in requests:
            tokens = self.tok_encode(request.args[0], add_special_tokens=False)
            windows = utils.get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, 1)
            parts = [(None, *utils.make_disjoint_window(window)) for window in windows]
            found.append(sum(nats for nats, _ in self._loglikelihood_tokens(parts)))
        return found

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Makes the likeliest tokens after each context, up to one of the task's stops."""
        wanted = [dict(request.args[1]) for request in requests]
        if any(one.get("do_sample") for one in wanted):
            raise ValueError("expected tasks that take the likeliest tokens, got do_sample: true")
        most = self.max_length - 1
        limits = [
            check_int("max_gen_toks", next((one[name] for name in LIMITS if name in one), min(MADE, most)), 1, most)
            for one in wanted
        ]
        stops = [one.get("until") or [] for one in wanted]
        stops = [[stop] if isinstance(stop, str) else [text for text in stop if text] for stop in stops]
        ids = []
        for request, count, texts in zip(requests, limits, stops, strict=True):
            context = (self.tok_encode(request.args[0]) or [self.prefix_token_id])[count - self.max_length :]
            ids.append(self.engine.submit(context, max_tokens=count, temperature=0, stop_texts=texts))
        events, found = self._events(), []
        for id, texts in zip(ids, stops, strict=True):
            text = self.tokens.decode([event.token for event in events[id] if event.token not in self.ends])
            found.append(text[: min((text.find(stop) for stop in texts if stop in text), default=len(text))])
        return found

    def _events(self) -> dict[int, list[Event]]:
        """Runs the engine until nothing waits or runs."""
        found: dict[int, list[Event]] = {}
        while self.engine.running or self.engine.waiting:
            for event in self.engine.step():
                found.setdefault(event.id, []).append(event)
        return found
