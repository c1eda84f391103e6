"""Text as tokens: the corpus, its split, and vocabularies of bytes or of byte pairs."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from experiments import data
from experiments.cache import cached

BYTES = 256
END = "Ā"
"""The token of byte 0, which stands between documents."""
HELD_OUT = 50
"""One file in so many is for validation."""


class Text(NamedTuple):
    tokenizer: Tokenizer
    train: np.ndarray
    valid: np.ndarray


def corpus(folder: str) -> list[str]:
    """The texts of a folder's files (or of one file); of Python's standard library, if `folder` is empty."""
    if not folder:
        return data.corpus()
    root = Path(folder)
    files = [root] if root.is_file() else sorted(p for p in root.rglob("*") if p.is_file())
    texts = [text for p in files if (text := p.read_text(encoding="utf-8", errors="ignore"))]
    if not texts:
        raise ValueError(f"expected text in {folder}, found none")
    return texts


def load(folder: str, vocabulary: int) -> Text:
    """The corpus in tokens, split into training and validation files."""
    texts = corpus(folder)
    kept = [text for i, text in enumerate(texts) if i % HELD_OUT or len(texts) == 1]
    tokenizer = make_tokenizer(kept, vocabulary)
    version = hashlib.sha256("\0".join(kept).encode()).hexdigest()[:16]
    train = cached(f"tokens-{version}-{vocabulary}.npy", lambda: encode(tokenizer, kept))
    return Text(tokenizer, train, held_out(folder, tokenizer))


def held_out(folder: str, tokenizer: Tokenizer) -> np.ndarray:
    """The corpus's validation files in tokens."""
    return encode(tokenizer, corpus(folder)[::HELD_OUT])


def seen(folder: str, tokenizer: Tokenizer) -> np.ndarray:
    """Training files in tokens, as many as are held out: to fit quantizers on."""
    return encode(tokenizer, corpus(folder)[1::HELD_OUT])


def windows(tokens: np.ndarray, context: int, count: int) -> np.ndarray:
    """Evenly spaced windows (count, context + 1)."""
    if len(tokens) <= context:
        raise ValueError(f"expected held-out text of more than {context} tokens, got {len(tokens)}")
    starts = np.linspace(0, len(tokens) - context - 1, count).astype(int)
    return tokens[starts[:, None] + np.arange(context + 1)].astype(np.int32)


def make_tokenizer(texts: Sequence[str], vocabulary: int) -> Tokenizer:
    """Byte pairs (Sennrich et al., 2016) up to a vocabulary of that size; 256 are the bytes alone."""
    if vocabulary < BYTES:
        raise ValueError(f"expected a vocabulary of at least {BYTES}, got {vocabulary}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts if vocabulary > BYTES else [], trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: Sequence[str]) -> np.ndarray:
    """All texts one after the other, each with `END` behind it."""
    end = [tokenizer.token_to_id(END)]
    return np.concatenate([np.asarray(part.ids + end, np.uint16) for part in tokenizer.encode_batch_fast(texts)])
