"""A decoder whose keys and values go through a compressed cache, as lm_eval (lm-evaluation-harness) asks for it.

Log-likelihoods are of tokens that are fed to the cache in chunks, as a decoder would see them. Texts are made token by
token.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

import rqjax
from experiments.models import reading
from rqjax.core import check_int, extras
from rqjax.nn import Decoder

with extras.explained():
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM

MADE = 256
"""Tokens of a text, if a task does not say how many."""


class CachedLM(TemplateLM):
    """A decoder as lm_eval asks for it."""

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Any,
        strategy: str | list[rqjax.Strategy],
        *,
        batch: int = 8,
        chunk: int = 64,
        max_length: int = 2048,
        seed: int = 0,
        **options: Any,
    ):
        """`options` are those of `Decoder.caches`."""
        super().__init__()
        self.decoder, self.strategy, self.options = decoder, strategy, options
        self.tokens, self.batch, self.chunk, self.max_length = tokenizer, batch, chunk, max_length
        self.key = jax.random.key(seed)

    @property
    def eot_token_id(self) -> int:
        return min(self.decoder.config.eos_token_ids, default=0)

    @property
    def tokenizer_name(self) -> str:
        return "rqjax"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        return self.tokens.encode(string, add_special_tokens=add_special_tokens is not False).ids

    def _loglikelihood_tokens(self, requests: list[Any], **kwargs: Any) -> list[tuple[float, bool]]:
        """Returns the log-likelihood of the continuation of each (texts, context, continuation), and whether its tokens
        are the likeliest."""
        found: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        texts = [[*context, *rest][-self.max_length - 1 :] for _, context, rest in requests]
        for some in self._batches(texts):
            rows, counts = [texts[i] for i in some], np.array([len(texts[i]) - 1 for i in some])
            inputs, targets = (
                reading.padded(part, self.chunk) for part in ([r[:-1] for r in rows], [r[1:] for r in rows])
            )
            caches = self._caches(*inputs.shape)
            nats, likeliest = map(np.asarray, _scored(self.decoder, caches, inputs, targets, counts, self.chunk))
            for i, own, greedy in zip(some, nats, likeliest, strict=True):
                count = min(len(requests[i][2]), len(texts[i]) - 1)
                found[i] = float(own[len(own) - count :].sum()), bool(greedy[len(own) - count :].all())
        return found

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
        found, wanted = [""] * len(requests), [dict(request.args[1]) for request in requests]
        if any(one.get("do_sample") for one in wanted):
            raise ValueError("expected tasks that take the likeliest tokens, got do_sample: true")
        limits = [check_int("max_gen_toks", one.get("max_gen_toks", MADE), 1, self.max_length - 1) for one in wanted]
        contexts = [
            (self.tok_encode(request.args[0]) or [self.prefix_token_id])[count - self.max_length :]
            for request, count in zip(requests, limits, strict=True)
        ]
        for some in self._batches(contexts):
            stops = [wanted[i].get("until") or [] for i in some]
            stops = [[stop] if isinstance(stop, str) else stop for stop in stops]
            for i, text in zip(
                some, self._made([contexts[i] for i in some], [limits[i] for i in some], stops), strict=True
            ):
                found[i] = text
        return found

    def _made(self, contexts: list[list[int]], limits: list[int], stops: list[list[str]]) -> list[str]:
        tokens, counts = reading.padded(contexts, self.chunk), np.array([len(context) for context in contexts])
        caches = self._caches(tokens.shape[0], tokens.shape[1] + max(limits))
        token, caches = reading.read(self.decoder, caches, tokens, counts, self.chunk)
        made: list[list[int]] = [[] for _ in contexts]
        texts, ended = [""] * len(contexts), [False] * len(contexts)
        while True:
            for row, new in enumerate(np.asarray(token)[:, 0].tolist()):
                if not ended[row]:
                    ended[row] = new in self.decoder.config.eos_token_ids
                    made[row] += [] if ended[row] else [new]
                    texts[row] = self.tokens.decode(made[row])
                    place = min((texts[row].find(stop) for stop in stops[row] if stop in texts[row]), default=-1)
                    if place >= 0:
                        texts[row] = texts[row][:place]
                    ended[row] |= place >= 0 or len(made[row]) == limits[row]
            if all(ended):
                return texts
            token, caches = reading.follow(self.decoder, caches, token)

    def _batches(self, texts: list[list[int]]) -> list[list[int]]:
        """Groups texts of about one length, so many at a time, as indices."""
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        return [order[i : i + self.batch] for i in range(0, len(order), self.batch)]

    def _caches(self, batch: int, time: int) -> tuple[rqjax.KVCache, ...]:
        return self.decoder.caches(self.strategy, self.key, batch, time, **self.options)


@functools.partial(jax.jit, static_argnames="chunk")
def _scored(
    decoder: Decoder,
    caches: tuple[rqjax.KVCache, ...],
    tokens: Int[Array | np.ndarray, "batch time"],
    targets: Int[Array | np.ndarray, "batch time"],
    counts: Int[Array | np.ndarray, "batch"],
    chunk: int,
) -> tuple[Float[Array, "batch time"], Bool[Array, "batch time"]]:
    """Returns the log-probability of each target, and whether it is the likeliest token."""

    def step(caches: Any, inputs: Any) -> Any:
        tokens, valid, targets = inputs
        logits, caches = decoder(tokens, caches, valid=valid)
        nats = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]
        return caches, (nats, logits.argmax(-1) == targets)

    parts = (
        *reading.chunked(jnp.asarray(tokens), counts, chunk),
        reading.chunked(jnp.asarray(targets), counts, chunk)[0],
    )
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(tokens.shape), jax.lax.scan(step, caches, parts)[1])
