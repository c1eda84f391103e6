"""What an engine is asked for, and what it says."""

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple, SupportsIndex

import numpy as np

from rqjax.core import check_int


class Event(NamedTuple):
    """What a step has brought to a request."""

    id: int
    token: int
    done: bool


@dataclasses.dataclass(eq=False)
class Request:
    """A text that is being made."""

    id: int
    prompt: np.ndarray
    max_tokens: int
    temperature: float
    top_p: float
    stop: frozenset[int]
    seed: int
    made: list[int] = dataclasses.field(default_factory=list)
    slot: int = -1
    fed: int = 0
    """Tokens in the cache, of the prompt and of what was made."""

    @classmethod
    def checked(
        cls,
        id: int,
        vocabulary: int,
        prompt: Iterable[SupportsIndex],
        max_tokens: int,
        temperature: float | int,
        top_p: float | int,
        stop: frozenset[int],
        seed: int,
    ) -> "Request":
        """Of arguments of `Engine.submit`, or a ValueError."""
        text = np.asarray(list(prompt), np.int32)
        if not len(text):
            raise ValueError("expected a prompt of at least one token, got none")
        if not 0 <= text.min() <= text.max() < vocabulary:
            raise ValueError(f"expected tokens from 0 to {vocabulary - 1}, got {text.min()} to {text.max()}")
        if not (temperature >= 0 and 0 < top_p <= 1):
            raise ValueError(f"expected temperature >= 0 and 0 < top_p <= 1, got {temperature} and {top_p}")
        check_int("max_tokens", max_tokens, 1, 2**30)
        return cls(id, text, max_tokens, float(temperature), float(top_p), stop, seed)

    @property
    def length(self) -> int:
        """Tokens of the text in all, if none ends it before."""
        return len(self.prompt) + self.max_tokens

    @property
    def after(self) -> int:
        """Which of the made tokens comes after those in the cache."""
        return self.fed - len(self.prompt)
