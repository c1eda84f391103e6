"""Tokenizers of checkpoints: in `tokenizer.json`, or in the metadata of a GGUF file."""

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rqjax.core import Registry, UnknownName, extras
from rqjax.nn import gguf
from rqjax.nn.checkpoint import find_checkpoint

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONTROL, OWN = 3, 4
"""Kinds of tokens in `tokenizer.ggml.token_type`: special ones, and words that are always one token."""
TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n%s]*|\s*[\r\n]+|\s+(?!\S)|\s+"
ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
BEFORE = r"[^\r\n\p{L}\p{N}]?"
GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA_3 = rf"{ENDINGS}|{BEFORE}\p{{L}}+|\p{{N}}{{1,3}}" + TAIL % ""
QWEN_2 = rf"{ENDINGS}|{BEFORE}\p{{L}}+|\p{{N}}" + TAIL % ""
TEKKEN = rf"{BEFORE}{UPPER}*{LOWER}+|{BEFORE}{UPPER}+{LOWER}*|\p{{N}}" + TAIL % "/"
GPT_4O = rf"{BEFORE}{UPPER}*{LOWER}+{ENDINGS}?|{BEFORE}{UPPER}+{LOWER}*{ENDINGS}?|\p{{N}}{{1,3}}" + TAIL % "/"
SPLITS: Registry = Registry(
    "splitting of words (tokenizer.ggml.pre of a GGUF file)",
    {
        **dict.fromkeys(("default", "gpt-2"), (GPT_2,)),
        **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), (r"\p{N}", GPT_2)),
        **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "smaug-bpe", "dbrx"), (LLAMA_3,)),
        **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), (QWEN_2,)),
        "tekken": (TEKKEN,),
        "gpt-4o": (GPT_4O,),
    },
)
"""Regular expressions of the parts of a text that merges stay within, each for the parts that those before it left."""
WHOLE = {"llama3", "llama-v3", "llama-bpe", "falcon3", "tekken"}
"""Splittings after which a part that is a token is taken without merging; their texts begin with a special token."""
NFC = {"qwen2", "deepseek-r1-qwen"}
"""Splittings of texts in Unicode's normal form C."""


def load_tokenizer(source: str | os.PathLike[str]) -> "Tokenizer":
    """Loads the tokenizer of a checkpoint.

    A GGUF file has the vocabulary, merges or scores, kinds of tokens, and the name of a regular expression. A file that
    names none is read as GPT-2's, with a warning. Files of SentencePiece's models have scores and no merges: the merges
    are found again from the vocabulary, and bytes that no token has become tokens of their own.

    Args:
      source: folder with `tokenizer.json`, a GGUF file, or a name on Hugging Face.

    Raises:
      FileNotFoundError: there is no such file.
      UnknownName: a regular expression, or a model of tokenizers, that is not known.
      ValueError: the file is damaged.

    Example:
      >>> from rqjax.nn import load_tokenizer
      >>> tokenizer = load_tokenizer("results/models/qwen2-d64")
      >>> tokenizer.decode(tokenizer.encode("def main(").ids)
      'def main('
    """
    with extras.explained():
        from tokenizers import Tokenizer

    checkpoint = find_checkpoint(source)
    path = checkpoint if checkpoint.is_file() else checkpoint / "tokenizer.json"
    if not path.exists():
        raise FileNotFoundError(f"there is no tokenizer.json in {checkpoint}; copy the model's there")
    try:
        if checkpoint.is_file():
            return _of_gguf(path, gguf.read(path).metadata)
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.no_truncation()  # a file keeps what it was trained with
        tokenizer.no_padding()
        return tokenizer
    except (UnknownName, OSError):
        raise
    except Exception as error:  # the package raises nothing narrower
        raise ValueError(f"{path} is not a tokenizer: {' '.join(str(error).split())}") from None


def decoded(tokenizer: Any, tokens: Sequence[int], prompt: Any) -> str:
    """Decodes tokens that come behind a prompt: some decoders drop the space of a text's first token."""
    last = [int(token) for token in prompt[-1:]]
    return tokenizer.decode([*last, *tokens])[len(tokenizer.decode(last)) :]


def tokenizer_config(path: Path) -> dict[str, str]:
    """Returns the fields of `tokenizer_config.json` that a GGUF file has: its chat template and special tokens."""
    metadata = gguf.read(path).metadata
    fields = {f"{name}_token": metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    named = {name: tokens[id] for name, id in fields.items() if id is not None and id < len(tokens)}
    template = metadata.get("tokenizer.chat_template")
    return named if template is None else {**named, "chat_template": template}


def _of_gguf(path: Path, metadata: Mapping[str, Any]) -> "Tokenizer":
    from tokenizers import AddedToken, processors

    def of(name: str, default: Any = None) -> Any:
        found = metadata.get(f"tokenizer.ggml.{name}", default)
        if found is None:
            raise ValueError(f"it has no tokenizer.ggml.{name}")
        return found

    kind, tokens, family = of("model"), of("tokens"), metadata["general.architecture"]
    split = of("pre", "") if kind == "gpt2" else ""
    if kind == "gpt2":
        if not split:
            warnings.warn(f"{path} has no tokenizer.ggml.pre: words are split as GPT-2 splits them", stacklevel=3)
        tokenizer = _bytes(tokens, of("merges"), split or "default")
    elif kind == "llama":
        if family == "gemma3":  # spaces are stored as they are in a text, and scores do not follow the merges
            tokens = ["\u2581" * len(token) if token.strip(" ") == "" else token for token in tokens]
        scores = [-float(id) for id in range(len(tokens))] if family == "gemma3" else of("scores")
        unknown = metadata.get("tokenizer.ggml.unknown_token_id")
        tokenizer = _sentencepiece(
            tokens,
            scores,
            family,
            of("add_space_prefix", family != "gemma3"),
            None if unknown is None else tokens[unknown],
        )
    else:
        raise ValueError(f"expected a tokenizer.ggml.model gpt2 or llama, got {kind!r}")
    kinds = list(zip(tokens, of("token_type", [1] * len(tokens)), strict=True))
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t, k in kinds if k == CONTROL])
    tokenizer.add_tokens([AddedToken(t, normalized=False, special=False) for t, k in kinds if k == OWN])
    around = {"bos": kind == "llama" or split in WHOLE, "eos": False}
    first, last = ([tokens[of(f"{n}_token_id")]] if of(f"add_{n}_token", usual) else [] for n, usual in around.items())
    if first or last:
        special = [(token, tokenizer.token_to_id(token)) for token in first + last]
        tokenizer.post_processor = processors.TemplateProcessing(single=[*first, "$A", *last], special_tokens=special)
    return tokenizer


def _bytes(tokens: Sequence[str], merges: Sequence[str], split: str) -> "Tokenizer":
    """Makes a tokenizer that merges bytes (Radford et al., 2019), as GPT-2 has it."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocabulary = {token: id for id, token in enumerate(tokens)}
    parts = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in SPLITS[split]]
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=split in WHOLE))
    if split in NFC:
        tokenizer.normalizer = normalizers.NFC()
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*parts, level])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(
    tokens: Sequence[str], scores: Sequence[float], family: str, space: bool, unknown: str | None
) -> "Tokenizer":
    """Makes a tokenizer that merges characters (Kudo and Richardson, 2018, arXiv:1808.06226), as Llama 2 has it."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocabulary = {token: id for id, token in enumerate(tokens)}
    model = models.BPE(vocabulary, _merges(vocabulary, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    spaces = normalizers.Replace(" ", "\u2581")
    if family == "llama":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first" if space else "never", split=False)
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), spaces] if space else [spaces])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * space)
    return tokenizer


def _merges(vocabulary: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """Finds the pairs of tokens that make a token, those of the best tokens first."""
    found = []
    for token, id in vocabulary.items():
        pairs = [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in vocabulary]
        pairs = sorted((p for p in pairs if p[1] in vocabulary), key=lambda pair: [vocabulary[part] for part in pair])
        found += [((scores[id], len(left), len(right)), (left, right)) for left, right in pairs]
    return [pair for _, pair in sorted(found, key=lambda entry: entry[0], reverse=True)]
