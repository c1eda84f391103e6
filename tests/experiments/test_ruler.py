"""Long-context tasks: answers found again in the texts by other means, scores of replies, and what is refused."""

import re
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flax import nnx

from experiments.data import ruler as tasks, text
from experiments.language import needle_model, ruler
from experiments.models import models, reading
from rqjax.nn import Decoder, DecoderConfig, save_decoder
from tests.nn.test_decoder import fields
from tests.tools.shallow import shallow

pytestmark = pytest.mark.full

PAIRS = text.make_tokenizer(["The secret number of bafuru is 1234567.\n"], 280)
ENCODERS: dict[str, Any] = {"bytes": str.encode, "byte pairs": lambda part: PAIRS.encode(part).ids, "words": str.split}
POINT = {"corpus": "", "tasks": (), "examples": 1, "seeds": 2, "chunk": 16, "keep": "0+0"}


def solved(texts):
    """Returns the answer to the last turn's question, read out of all turns."""
    whole, asked = "".join(texts), texts[-1].rpartition("\n")[2]
    if match := re.fullmatch(r"The secret numbers? of (\w+) (?:is|are)", asked):
        needles = re.findall(r"^The secret number of (\w+) is (\d{7})\.$", whole, re.M)
        return [number for name, number in needles if name == match[1]]
    if match := re.fullmatch(r"The variables whose value is (\d{7}) are", asked):
        values = {}
        for name, value in re.findall(r"^(\w+) is set to (\w+)\.$", whole, re.M):
            values[name] = values.get(value, value)
        assert len(set(values.values())) > 1
        return [name for name, value in values.items() if value == match[1]]
    if match := re.fullmatch(r"The (\d) most common words are", asked):
        *found, (_, next_often) = Counter(whole.splitlines()[1].split()).most_common(int(match[1]) + 1)
        assert found[-1][1] > next_often
        return [word for word, _ in found]
    said = r"^(\w+) lives in (\w+), works in (\w+) and is a friend of (\w+)\.$"
    people = {name: rest for name, *rest in re.findall(said, whole, re.M)}
    match = re.fullmatch(r"(The friend of )?(\w+) (lives|works) in", asked)
    assert match
    home, office, friend = people[match[2]]
    home, office, _ = people[friend] if match[1] else (home, office, None)
    return [home if match[3] == "lives" else office]


@pytest.mark.parametrize("encode", ENCODERS)
@pytest.mark.parametrize("task", tasks.TASKS)
def test_answers_are_in_the_text_and_it_is_as_long_as_fits(task, encode):
    encode = ENCODERS[encode]
    for seed in range(20):
        rng = np.random.default_rng(seed)
        tokens = int(rng.integers(400, 3000))
        example = tasks.make(task, encode, tokens, rng)
        texts = [turn.text for turn in example.turns]
        for i, turn in enumerate(example.turns):
            assert sorted(turn.answers) == sorted(solved(texts[: i + 1]))
            assert 2 * len(encode(", ".join(turn.answers))) <= example.room
        used = sum(len(encode(part)) + example.room for part in texts)
        assert tokens - 160 < used <= tokens  # a line of the corpus more does not fit


def test_examples_are_drawn_anew_and_needles_are_at_any_depth():
    made = [tasks.make("niah_single", str.encode, 4000, np.random.default_rng(i)) for i in (*range(30), 0)]
    assert made[0] == made[-1]
    assert len({example.turns[0].answers for example in made}) == 30
    depths = [example.turns[0].text.index("The secret number") / 4000 for example in made]
    assert min(depths) < 0.2
    assert max(depths) > 0.8


def test_text_of_an_own_corpus(tmp_path):
    (tmp_path / "one.txt").write_text("hay\n\nmore hay\n")
    example = tasks.make("niah_multiquery", ENCODERS["words"], 200, np.random.default_rng(0), str(tmp_path))
    lines = [line for line in example.turns[0].text.splitlines()[1:-1] if "secret" not in line]
    assert set(lines) == {"hay", "more hay"}
    assert len(example.turns) == 4


@pytest.mark.parametrize("task", tasks.TASKS)
def test_too_short_a_length_is_one_line(task):
    rng = lambda: np.random.default_rng(0)  # noqa: E731
    with pytest.raises(ValueError, match=rf"^expected at least (\d+) tokens for {task}, got 20$") as raised:
        tasks.make(task, str.encode, 20, rng())
    least = int(re.findall(r"\d+", str(raised.value))[0])
    tasks.make(task, str.encode, least, rng())
    with pytest.raises(ValueError, match=f"got {least - 1}$"):
        tasks.make(task, str.encode, least - 1, rng())


def test_what_cannot_be_run_is_one_line(tmp_path):
    point = {**POINT, "model": "qwen2-d64", "tokens": 400, "strategy": "eden_3"}
    ruler.check(point)
    with pytest.raises(KeyError, match="unknown task of qwen2-d64 'niah_singel'; did you mean 'niah_single'"):
        ruler.check({**point, "tasks": ("niah_singel",)})
    with pytest.raises(ValueError, match="expected at least 368 tokens for niah_multiquery, got 300"):
        ruler.check({**point, "tokens": 300})
    with pytest.raises(KeyError, match="unknown task of recall 'variable_tracking'; known: niah_multikey, niah_multi"):
        ruler.check({**point, "model": "recall", "tasks": ("variable_tracking",)})
    with pytest.raises(ValueError, match="expected at least 6 tokens for niah_multikey, got 5"):
        ruler.check({**point, "model": "recall", "tokens": 5})
    save_decoder(Decoder(DecoderConfig.parse(fields()), rngs=nnx.Rngs(0)), fields(), tmp_path)
    with pytest.raises(FileNotFoundError, match=r"^there is no tokenizer.json in [^\n]*$"):
        ruler.check({**point, "model": str(tmp_path)})


@pytest.mark.parametrize(("tokens", "told", "asked"), [(384, (127, 64), (1, 64)), (10**6, (128, 128), (1, 128))])
def test_pairs_of_the_model_trained_for_recall(tokens, told, asked):
    for i, task in enumerate(("niah_multikey", "niah_multiquery")):
        example = ruler._pairs(task, tokens, np.random.default_rng(0))
        first, *rest = [turn.text.split() for turn in example.turns]
        pairs = dict(zip(first[1:-2:3], first[2:-2:3], strict=True))
        assert first[:-2:3] == [*pairs.values()]
        assert len(pairs) == told[i]
        questions = [first[-2:], *rest]
        assert [(mark, pairs[key]) for mark, key in questions] == [("?", *turn.answers) for turn in example.turns]
        assert len({key for _, key in questions}) == asked[i]
        encoded = needle_model.tokenizer().encode(example.turns[0].text).ids
        assert needle_model.words(np.array(encoded)) == first


def test_scores_count_the_answers_in_the_replies(monkeypatch):
    """Replies are made up here, of two sequences and two turns."""
    tokenizer = text.make_tokenizer([], 256)
    replies = [["ab, CD.", "x5-----"], ["cd-abzz", "--y---6"]]  # of each turn
    read = []

    def reader(decoder, caches, tokens, counts, chunk):
        read.append([tokenizer.decode(row[-count:].tolist()) for row, count in zip(tokens, counts, strict=True)])
        return follow(decoder, (), None)

    def follow(decoder, caches, token):
        column = [reply[len(read) - 1][len(caches)] for reply in replies]
        return np.array([tokenizer.encode(new).ids for new in column]), (*caches, None)

    monkeypatch.setattr(ruler, "reading", SimpleNamespace(read=reader, follow=follow, padded=reading.padded))
    examples = [
        tasks.Example((tasks.Turn("ask", ("AB", "cd")), tasks.Turn("more", ("x5",))), room=7),
        tasks.Example((tasks.Turn("you", ("ab", "cd", "zz")), tasks.Turn("too", ("6",))), room=6),
    ]
    assert ruler._scores(None, tokenizer, (), examples, 4) == [1.0, 2 / 4]  # a reply ends where its room does
    assert read == [["ask", "you"], [".more", "ztoo"]]  # what the last token of a reply is has not been read before


RECALL = {**POINT, "model": "recall", "tokens": 384, "tasks": ("niah_multiquery",)}


def test_recall_is_exact_at_64_pairs():
    exact = ruler.run({**RECALL, "strategy": "float32"})
    assert exact == {"score": 1, "score_sd": 0, "niah_multiquery": 1, "niah_multiquery_sd": 0}


@pytest.mark.full
def test_recall_by_bits():
    four, two = (ruler.run({**RECALL, "examples": 4, "strategy": name})["score"] for name in ("eden_4", "eden_2"))
    assert four > 0.97
    assert two < 0.5


@pytest.mark.full
def test_all_tasks_run_on_a_decoder_of_text(tmp_path):
    model = str(shallow(models.TRAINED / "qwen2-d64", tmp_path / "model"))
    row = ruler.run({**POINT, "model": model, "tokens": 400, "strategy": "eden_2+turned", "chunk": 128})
    assert set(row) == {name + end for name in ("score", *tasks.TASKS) for end in ("", "_sd")}
    assert 0 <= row["score"] <= 1
