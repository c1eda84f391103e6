"""Values of points that are short texts: shapes, splits, numbers of exact tokens."""

import re


def numbers(text: str, example: str, what: str) -> tuple[int, ...]:
    """Returns the whole numbers in a text that else is like an example: (128, 4) of "128+4" for "3+1".

    Raises:
      ValueError: it is not; the message says `what` was expected.
    """
    match = re.fullmatch(re.sub(r"\d+", r"(\\d+)", re.escape(example)), text)
    if match is None:
        raise ValueError(f"expected {what} like {example!r}, got {text!r}")
    return tuple(map(int, match.groups()))
