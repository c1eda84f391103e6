"""Pinned texts of several kinds, windows of each, and tokens of any vocabulary."""

import hashlib

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from experiments.data import text, words

DIGESTS = {
    ("prose", "held_out"): "b68dda0f5e85800f9158d2f4e56dae6633cb8524c53f52627f5eb659956ec9f4",
    ("prose", "seen"): "9356dbd11270ba4530999398c364665e35d4a767aa9d18b2a24a47caed222205",
    ("code", "held_out"): "c101b4bebc91f3ee27bb27eb8ef198dc79ff251cbaa817a02a23eea7428cbb2e",
    ("code", "seen"): "5f302971c1868f0f40a4d9e60977791b0ecc9e1defa8e491c102da71eb1e554f",
    ("dialogue", "held_out"): "5f7c0b58697736a98f413af35d35dc3e83d042e44ea773944b6bd5dc6f9d9c24",
    ("dialogue", "seen"): "86d790d488b975f65b452fba9645f5263f9da44b2814895524c7f3a8efe4b9d9",
}
BYTES = text.make_tokenizer([], text.BYTES)


@pytest.mark.parametrize(("kind", "part"), DIGESTS)
def test_texts_are_pinned(kind, part):
    texts = text.documents(kind, part).values()
    assert hashlib.sha256("\0".join(texts).encode()).hexdigest() == DIGESTS[kind, part]
    assert abs(len("".join(texts).encode()) - 2**16) <= 1024
    assert "\r" not in "".join(texts)


@pytest.mark.parametrize("kind", text.KINDS[:3])
def test_parts_share_no_line(kind):
    held, seen = (
        {line.strip() for whole in text.documents(kind, part).values() for line in whole.split("\n")}
        for part in ("held_out", "seen")
    )
    assert [line for line in held & seen if len(line) > 40] == []
    assert text.training(kind) == list(text.documents(kind, "seen").values())


def test_a_mixed_corpus_has_as_many_windows_of_each_kind(monkeypatch):
    monkeypatch.setattr(words, "corpus", lambda: pytest.fail("the running Python's library was read"))
    assert text.kinds("mixed") == text.KINDS == ("prose", "code", "dialogue", "")
    assert text.kinds("code") == ("code",)
    assert text.sources("mixed", 8) == ["prose", "prose", "code", "code", "dialogue", "dialogue", "", ""]
    assert text.sources("mixed", 3) == ["prose", "code", "dialogue"]
    windows = text.sample("mixed", "held_out", BYTES, 256, 8)
    assert windows.shape == (8, 257)
    decoded = [BYTES.decode(window.tolist()) for window in windows[:, 8:-8]]  # no character cut in two
    for kind, window in zip(text.sources("mixed", 8), decoded, strict=True):
        assert window in "\0".join(text.documents(kind, "held_out").values()) + "\0"
    assert len(set(decoded)) == 8
    held, seen = (text.documents("mixed", part) for part in ("held_out", "seen"))
    assert len(held) == sum(len(text.documents(kind, "held_out")) for kind in text.KINDS)
    assert text.corpus("mixed") == held | seen


def test_a_corpus_of_one_kind_is_sampled_evenly(tmp_path):
    (tmp_path / "one.txt").write_text("some text of one's own\n" * 40)
    folder = str(tmp_path)
    expected = text.windows(text.seen(folder, BYTES), 64, 3)
    assert np.array_equal(text.sample(folder, "seen", BYTES, 64, 3), expected)
    with pytest.raises(ValueError, match="expected held-out text of more than 4096 tokens"):
        text.sample(folder, "seen", BYTES, 4096, 1)


def test_documents_end_with_the_end_of_text_of_a_vocabulary():
    """A vocabulary of more than 2^16 tokens has all of its tokens, and one without an end has none added."""
    large = text.make_tokenizer([], text.BYTES)
    large.add_special_tokens(["<|endoftext|>"])
    large.add_tokens([f"<{i}>" for i in range(2**16)])
    last = large.token_to_id("<65535>")
    assert last is not None
    assert last > 2**16
    assert text.encode(large, ["<65535>", "a"]).tolist() == [last, 256, *BYTES.encode("a").ids, 256]
    assert text.encode(BYTES, ["a", ""]).tolist() == [*BYTES.encode("a\0").ids, *BYTES.encode("\0").ids]
    assert text.encode(Tokenizer(WordLevel({"a": 7})), ["a", "a"]).tolist() == [7, 7]
