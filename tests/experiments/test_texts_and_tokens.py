"""Texts that become tokens and tokens that become texts again, by tokenizers of other kinds than the models' here."""

import json
import os

import numpy as np
import pytest

pytest.importorskip("tokenizers")

from tokenizers import Tokenizer, decoders, models

from experiments.harness.rows import Rows
from experiments.models import chat
from rqjax.nn import load_tokenizer
from rqjax.nn.requests import Request
from rqjax.nn.sampling import Sampling
from rqjax.nn.tokenizer import decoded

QWEN2 = "results/models/qwen2-d64/tokenizer.json"


def test_a_file_of_a_tokenizer_neither_cuts_nor_pads(tmp_path):
    tokenizer, text = Tokenizer.from_file(QWEN2), "def main(): return 1234567890"
    wanted = tokenizer.encode(text).ids
    tokenizer.enable_truncation(8)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).encode(text).ids == wanted


@pytest.mark.parametrize("behind", ["🙂", "a"])
def test_stop_texts_behind_a_character_of_several_tokens(behind):
    vocabulary = {"<unk>": 0, **{f"<0x{i:02X}>": i + 1 for i in range(256)}}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    request = Request(np.array([1]), 99, Sampling(0, 1, 0, 0), 0, frozenset(), ("\n\n",), -1, 1)
    ended = []
    for byte in f"🙂\n\n{behind}".encode():
        ended.append(request.ends(byte + 1, tokenizer.decode))
        request.made.append(byte + 1)
    assert ended.index(True) == 5


def test_an_answer_keeps_its_first_space():
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "▁is": 1, "▁Paris": 2}, unk_token="<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(content=" ", left=1, right=0)]
    )
    assert tokenizer.decode([1, 2]) == "is Paris"
    assert decoded(tokenizer, [2], np.array([1])) == " Paris"
    assert decoded(tokenizer, [1, 2], []) == "is Paris"


def test_templates_keep_line_ends(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}"}))
    assert chat.rendered(tmp_path, [{"role": "user", "content": "a\r\nb\rc é"}]) == "a\r\nb\rc é"


def test_the_newest_of_rows_counts(tmp_path):
    point = {"experiment": "x"}
    names = ("rows.jsonl", "rows-0-of-2.jsonl")
    for time, name in enumerate(names):
        Rows(tmp_path / name).append(point, {"made": name}, {})
        os.utime(tmp_path / name, ns=(time, time))
    for name in (*names, "rows-1-of-2.jsonl"):
        assert Rows(tmp_path / name).find(point)["metrics"] == {"made": names[1]}
