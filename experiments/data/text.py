"""Text as tokens: the corpus, its split, and vocabularies of bytes or of byte pairs."""

import functools
import hashlib
import tarfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from experiments.data import words
from experiments.harness.cache import cached

BYTES = 256
END = "Ā"
"""The token of byte 0, which stands between documents if the vocabulary has none of `ENDS`."""
ENDS = ("<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>", "<|im_end|>")
"""Tokens that pretrained models put between documents."""
KINDS = ("prose", "code", "dialogue", "")
"""Pinned texts; "" is Python's standard library."""
MIXED = "mixed"
"""All `KINDS` together."""
HELD_OUT = 50
"""One file in so many is for validation."""


class Text(NamedTuple):
    tokenizer: Tokenizer
    train: np.ndarray
    valid: np.ndarray
    trained_on: list[str]
    """The digest of each training file."""


def kinds(corpus: str) -> tuple[str, ...]:
    """Returns the corpora that a corpus is made of: all `KINDS` for "mixed", else the corpus alone."""
    return KINDS if corpus == MIXED else (corpus,)


def corpus(folder: str) -> dict[str, str]:
    """Reads the texts of a folder's files (or of one file), of one of `KINDS`, or of "mixed".

    The standard library ("") is that of the running Python.
    """
    if not folder:
        return words.corpus()
    if folder in (*KINDS, MIXED):
        return documents(folder, "held_out") | documents(folder, "seen")
    root = Path(folder)
    files = [root] if root.is_file() else sorted(p for p in root.rglob("*") if p.is_file())
    texts = {str(p): text for p in files if (text := p.read_text(encoding="utf-8", errors="ignore"))}
    if not texts:
        raise ValueError(f"expected text in {folder}, found none")
    return texts


def documents(folder: str, part: str) -> dict[str, str]:
    """Returns the files of a corpus that are held out, or as many training files: `part` is "held_out" or "seen".

    Files of Python's standard library are of Python 3.11.7, whichever is running. The models of `results/models` were
    trained on its other files. `experiments/corpus/README.md` says where the texts of the other `KINDS` come from.
    """
    if folder == MIXED:
        return {f"{kind}/{name}": text for kind in KINDS for name, text in _pinned(kind, part).items()}
    if folder in KINDS:
        return _pinned(folder, part)
    texts = list(corpus(folder).items())
    return dict(texts[::HELD_OUT] if part == "held_out" else texts[1::HELD_OUT] or texts)


@functools.cache
def _pinned(kind: str, part: str) -> dict[str, str]:
    with tarfile.open(words.PINNED / f"{kind or 'text'}.tar.xz") as tar:
        files = {member.name: tar.extractfile(member) for member in tar if member.name.startswith(f"{part}/")}
        return {name.removeprefix(f"{part}/"): file.read().decode() for name, file in files.items() if file}


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def training(folder: str) -> list[str]:
    """Returns the files that share neither name nor content with one that is held out; a single file is kept."""
    held, texts = documents(folder, "held_out"), corpus(folder)
    contents = set(map(digest, held.values()))
    kept = [text for name, text in texts.items() if name not in held and digest(text) not in contents]
    return kept or list(texts.values())


def load(folder: str, vocabulary: int) -> Text:
    """The corpus in tokens, split into training and validation files."""
    kept = training(folder)
    tokenizer = make_tokenizer(kept, vocabulary)
    version = hashlib.sha256("\0".join(kept).encode()).hexdigest()[:16]
    train = cached(f"tokens-{version}-{vocabulary}.npy", lambda: encode(tokenizer, kept))
    return Text(tokenizer, train, held_out(folder, tokenizer), list(map(digest, kept)))


def held_out(folder: str, tokenizer: Tokenizer) -> np.ndarray:
    """The corpus's validation files in tokens."""
    return encode(tokenizer, documents(folder, "held_out").values())


def seen(folder: str, tokenizer: Tokenizer) -> np.ndarray:
    """Training files in tokens, as many as are held out: to fit quantizers on."""
    return encode(tokenizer, documents(folder, "seen").values())


def windows(tokens: np.ndarray, context: int, count: int) -> np.ndarray:
    """Evenly spaced windows (count, context + 1)."""
    if len(tokens) <= context:
        raise ValueError(f"expected held-out text of more than {context} tokens, got {len(tokens)}")
    starts = np.linspace(0, len(tokens) - context - 1, count).astype(int)
    return tokens[starts[:, None] + np.arange(context + 1)].astype(np.int32)


def sources(corpus: str, count: int) -> list[str]:
    """Returns the kind of each of `count` windows, kind after kind; equally many of each if `count` allows it."""
    parts = kinds(corpus)
    return [parts[i * len(parts) // count] for i in range(count)]


def sample(corpus: str, part: str, tokenizer: Tokenizer, context: int, count: int) -> np.ndarray:
    """Returns windows (count, context + 1) of the documents of a part, each of the kind that `sources` gives.

    Windows of one kind are evenly spaced. No window reaches from one kind into another.

    Args:
      corpus: folder, file, one of `KINDS` or "mixed".
      part: "held_out" or "seen".

    Raises:
      ValueError: a kind has no more than `context` tokens.
    """
    return np.concatenate(
        [
            windows(encode(tokenizer, documents(kind, part).values()), context, n)
            for kind, n in Counter(sources(corpus, count)).items()
        ]
    )


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


def encode(tokenizer: Tokenizer, texts: Iterable[str]) -> np.ndarray:
    """Encodes all texts one after the other, each with the first of `ENDS` and `END` that there is behind it."""
    ends = [end for end in map(tokenizer.token_to_id, (*ENDS, END)) if end is not None][:1]
    return np.concatenate([np.asarray(part.ids + ends, np.int32) for part in tokenizer.encode_batch_fast(list(texts))])
