"""Requests to an engine, and its events."""

import dataclasses
import math
from typing import Any, NamedTuple, SupportsFloat

import numpy as np

from rqjax.core import check_ints, check_text


class Event(NamedTuple):
    """A token that a step has made for a request."""

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

    failed: bool = False
    """True if the decoder failed while it read the prompt."""

    @property
    def length(self) -> int:
        """Tokens of the text in all, if none ends it before."""
        return len(self.prompt) + self.max_tokens

    @property
    def after(self) -> int:
        """Index of the made token that comes after those in the cache."""
        return self.fed - len(self.prompt)


def checked_prompt(prompt: Any, vocabulary: int) -> np.ndarray:
    """Returns the tokens (time,) of a prompt.

    Raises:
      ValueError: it is not one text of whole numbers below the vocabulary's size, or empty.
    """
    text = check_ints("tokens", check_text(prompt), vocabulary - 1)
    if not len(text):
        raise ValueError("expected a prompt of at least one token, got none")
    return np.asarray(text)


def checked_sampling(temperature: Any, top_p: Any) -> tuple[float, float]:
    """Returns both as floats.

    Raises:
      ValueError: they are no numbers, or out of range.
    """
    numbers = [float(x) if isinstance(x, SupportsFloat) else math.nan for x in (temperature, top_p)]
    if not (0 <= numbers[0] <= 1e6 and 0 < numbers[1] <= 1):
        raise ValueError(f"expected 1e6 >= temperature >= 0 and 0 < top_p <= 1, got {temperature} and {top_p}")
    return numbers[0], numbers[1]
