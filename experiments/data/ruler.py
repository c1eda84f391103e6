"""Tasks over long texts, for any tokenizer, in the manner of RULER (Hsieh et al., 2024, arXiv:2404.06654).

The needles, what is asked for, are made up. They are hidden in text of a corpus, or among more of the same kind, as
much as fits. The wording is not RULER's: a text ends with the words that an answer begins with. So a model that was
never taught to answer can go on. Scores are therefore not to be compared with published ones.
"""

import bisect
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from experiments.data import text
from rqjax.core import Registry, check_int

SYLLABLES = [consonant + vowel for consonant in "bcdfghjklmnprstvwz" for vowel in "aeiou"]
WORDS = len(SYLLABLES) ** 3
NEEDLES = 4
"""Numbers of one name, or names, that are asked for where there are several."""
CHAINS, LINKS = 2, 5
"""Chains of variables, one of which is asked for, and the variables of each."""
COMMON, OFTEN, SELDOM = 5, 6, 2
"""Common words, how often each is there, and how often each of the others."""
FREQUENT = 3
"""Most frequent words that are asked for, of words whose frequency falls with the square of their rank."""


class Turn(NamedTuple):
    text: str
    """Text that is read after all that was read and replied before."""
    answers: tuple[str, ...]
    """Answers that the reply is to contain."""


class Example(NamedTuple):
    turns: tuple[Turn, ...]
    room: int
    """Tokens of each reply."""


Lines = Callable[[int], list[str]]
"""Function that returns so many lines to hide something in."""
Build = Callable[[int], tuple[Turn, ...]]
"""Function that returns the turns with so much around what is asked for."""


def make(
    task: str, encode: Callable[[str], Sequence[int]], tokens: int, rng: np.random.Generator, corpus: str = ""
) -> Example:
    """Makes an example that is as long as fits.

    Args:
      task: a name of `TASKS`.
      encode: a text's tokens.
      tokens: most tokens of the texts and the replies of all turns; a reply has room for its answers twice.
      rng: draws what is asked for, where it stands, and what is around.
      corpus: the text that needles are hidden in, as `text.documents` takes it.

    Raises:
      UnknownName: there is no such task; the nearest names are given.
      ValueError: `tokens` are too few for the task, or more than 2^20.
    """
    check_int("tokens", tokens, 1, 2**20)  # there are words for as many
    build, least = TASKS[task](rng, _lines(rng, corpus))
    room = 2 * max(len(encode(", ".join(turn.answers))) for turn in build(least))

    def size(n: int) -> int:
        return sum(len(encode(turn.text)) + room for turn in build(n))

    if size(least) > tokens:
        raise ValueError(f"expected at least {size(least):,} tokens for {task}, got {tokens:,}")
    more = 1
    while size(least + more) <= tokens:
        more *= 2
    fitting = bisect.bisect_right(range(least + more), tokens, least + more // 2, key=size) - 1
    return Example(build(fitting), room)


def _niah(
    rng: np.random.Generator, lines: Lines, names: int = 1, numbers: int = 1, alone: bool = True
) -> tuple[Build, int]:
    """Hides so many numbers of each of so many names, which are asked for one after the other. If the needles are not
    alone, only other needles are around them."""
    words, seed = rng.permutation(WORDS), int(rng.integers(2**32))
    of = {_word(word): _numbers(rng, numbers) for word in words[:names]}
    needles = rng.permutation([_needle(name, number) for name in of for number in of[name]]).tolist()
    depths = rng.random(len(needles))
    number, verb = ("number", "is") if numbers == 1 else ("numbers", "are")

    def others(n: int) -> list[str]:
        drawn = _numbers(np.random.default_rng(seed), n)
        return [_needle(_word(word), number) for word, number in zip(words[names : names + n], drawn, strict=True)]

    def build(n: int) -> tuple[Turn, ...]:
        hidden = _hidden(needles, depths, lines(n) if alone else others(n))
        asked = [f"\nThe secret {number} of {name} {verb}" for name in of]
        asked[0] = "\n".join(["Remember the secret numbers.", *hidden]) + asked[0]
        return tuple(Turn(text, tuple(answers)) for text, answers in zip(asked, of.values(), strict=True))

    return build, 0


def _variables(rng: np.random.Generator, lines: Lines) -> tuple[Build, int]:
    """Hides chains of variables, each with the value of the one before; asks for all that have one value."""
    names = [_word(word).upper() for word in rng.permutation(WORDS)[: CHAINS * LINKS]]
    numbers, needles, depths = _numbers(rng, CHAINS), [], []
    for chain, number in enumerate(numbers):
        own = names[chain::CHAINS]
        needles += [f"{name} is set to {value}." for name, value in zip(own, [number, *own], strict=False)]
        depths += sorted(rng.random(LINKS))

    def build(n: int) -> tuple[Turn, ...]:
        hidden = _hidden(needles, depths, lines(n))
        question = f"The variables whose value is {numbers[0]} are"
        return (Turn("\n".join(["Follow the variables.", *hidden, question]), tuple(names[::CHAINS])),)

    return build, 0


def _counted(
    rng: np.random.Generator, lines: Lines, counts: Callable[[int], list[int]], asked: int, least: int
) -> tuple[Build, int]:
    """Writes each word so many times, in any order; asks for the first words, which are the most frequent."""
    words, seed = rng.permutation(WORDS), int(rng.integers(2**32))

    def build(n: int) -> tuple[Turn, ...]:
        times = counts(n)
        drawn = [_word(word) for word in words[: len(times)]]
        shuffled = " ".join(np.random.default_rng(seed).permutation(np.repeat(drawn, times)))
        question = f"The {asked} most common words are"
        return (Turn("\n".join(["Count the words.", shuffled, question]), tuple(drawn[:asked])),)

    return build, least


def _common(n: int) -> list[int]:
    """Returns how often each word is there: some more often than all others."""
    return [OFTEN] * COMMON + [SELDOM] * n


def _frequent(n: int) -> list[int]:
    """Returns how often each word is there by a zeta distribution."""
    first = n * 6 / math.pi**2  # over zeta(2)
    return [int(first / k**2) for k in range(1, 1 + int(first**0.5))]


def _questions(rng: np.random.Generator, lines: Lines) -> tuple[Build, int]:
    """Asks where somebody, or somebody's friend, lives or works, among others of whom the same is said."""
    (verb, place), of_friend = [("live", 0), ("work", 1)][rng.integers(2)], bool(rng.integers(2))
    drawn, depths = rng.permutation(WORDS), rng.random(2)

    def build(n: int) -> tuple[Turn, ...]:
        words = [_word(word).capitalize() for word in drawn[: 3 * (n + 2)]]
        people = list(zip(words[::3], words[1::3], words[2::3], strict=True))  # a name, and two towns
        said = [
            f"{name} lives in {home}, works in {office} and is a friend of {friend[0]}."
            for (name, home, office), friend in zip(people, [*people[1:], people[0]], strict=True)
        ]
        hidden = _hidden(said[:2], depths, said[2:])
        who = f"The friend of {people[0][0]}" if of_friend else people[0][0]
        answer = people[int(of_friend)][1 + place]
        return (Turn("\n".join(["Remember the people.", *hidden, f"{who} {verb}s in"]), (answer,)),)

    return build, 0


TASKS: Registry = Registry(
    "task",
    {
        "niah_single": _niah,
        "niah_multikey": functools.partial(_niah, alone=False),
        "niah_multivalue": functools.partial(_niah, numbers=NEEDLES),
        "niah_multiquery": functools.partial(_niah, names=NEEDLES),
        "variable_tracking": _variables,
        "common_words": functools.partial(_counted, counts=_common, asked=COMMON, least=0),
        "frequent_words": functools.partial(_counted, counts=_frequent, asked=FREQUENT, least=30),
        "questions": _questions,
    },
)
"""Tasks: each takes a generator and lines to hide something in, and returns a `Build` and the least that it takes."""


def _needle(name: str, number: str) -> str:
    return f"The secret number of {name} is {number}."


def _word(number: int) -> str:
    """Returns the word of three syllables with this number."""
    base = len(SYLLABLES)
    return SYLLABLES[number // base**2] + SYLLABLES[number // base % base] + SYLLABLES[number % base]


def _numbers(rng: np.random.Generator, count: int) -> list[str]:
    """Draws numbers of seven digits, all different."""
    return [str(number) for number in 10**6 + rng.choice(9 * 10**6, count, replace=False)]


def _hidden(needles: Sequence[str], depths: Any, lines: Sequence[str]) -> list[str]:
    """Returns the lines with each needle at its depth, 0 before the first line and 1 after the last one."""
    made = list(lines)
    for depth, needle in sorted(zip(depths, needles, strict=True), reverse=True):
        made.insert(int(depth * (len(lines) + 1)), needle)
    return made


def _lines(rng: np.random.Generator, corpus: str) -> Lines:
    """Returns the lines of held-out text from a random one on, and again from the first one."""
    lines = _corpus(corpus)
    first = int(rng.integers(len(lines)))
    return lambda n: [lines[(first + i) % len(lines)] for i in range(n)]


@functools.cache
def _corpus(folder: str) -> list[str]:
    lines = [line.rstrip() for part in text.documents(folder, "held_out").values() for line in part.splitlines()]
    return [line for line in lines if line]
