"""Writes the texts that experiments share: `python -m experiments.pin [KIND FOLDER]`.

Without arguments they come from the standard library of the running Python. `corpus/text.tar.xz` has the files that are
held out from training and as many training files, `corpus/words.xz` the words of every file, a line each. The committed
files are of Python 3.11.7, because the models of `results/models` were trained on its library. They have seen most of
the files that would be held out of another version's. The license is Python's, in `corpus/LICENSE.txt`.

`python -m experiments.pin prose FOLDER` writes `corpus/prose.tar.xz` from the files in `FOLDER/held_out` and
`FOLDER/seen`; code and dialogue are written likewise. `tar -xf` takes such a file apart into a folder again.
`corpus/README.md` says where these texts come from, and what licenses they have.
"""

import io
import lzma
import sys
import tarfile
from pathlib import Path

from experiments.data import words
from experiments.data.text import HELD_OUT, KINDS

PARTS = ("held_out", "seen")


def main() -> None:
    match sys.argv[1:]:
        case []:
            _library()
        case [kind, folder] if kind in KINDS and kind:
            files = [path for part in PARTS for path in sorted((Path(folder) / part).iterdir())]
            _write(kind, {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in files})
        case _:
            sys.exit(f"error: expected no arguments, or one of {', '.join(filter(None, KINDS))} and a folder")


def _library() -> None:
    texts = words.corpus()
    names = list(texts)
    _write("text", {f"{part}/{n}": texts[n] for start, part in enumerate(PARTS) for n in names[start::HELD_OUT]})
    lines = "\n".join(" ".join(words.words_of(text)) for text in texts.values())
    words.PINNED_WORDS.write_bytes(lzma.compress(lines.encode(), preset=9 | lzma.PRESET_EXTREME))


def _write(kind: str, texts: dict[str, str]) -> None:
    with tarfile.open(words.PINNED / f"{kind}.tar.xz", "w:xz", preset=9) as tar:
        for name, text in texts.items():
            content = text.encode()
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


if __name__ == "__main__":
    main()
