"""Writes the text that experiments share, from the standard library of the running Python: `python -m experiments.pin`.

`corpus/text.tar.xz` has the files that are held out from training and as many training files, `corpus/words.xz` the
words of every file, a line each. The committed files are of Python 3.11.7, because the models of `results/models` were
trained on its library. They have seen most of the files that would be held out of another version's. The license is
Python's, in `corpus/LICENSE.txt`.
"""

import io
import lzma
import tarfile

from experiments.data import words
from experiments.data.text import HELD_OUT


def main() -> None:
    texts = words.corpus()
    with tarfile.open(words.PINNED / "text.tar.xz", "w:xz", preset=9) as tar:
        for start, part in enumerate(("held_out", "seen")):
            for name in list(texts)[start::HELD_OUT]:
                content = texts[name].encode()
                member = tarfile.TarInfo(f"{part}/{name}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    lines = "\n".join(" ".join(words.words_of(text)) for text in texts.values())
    words.PINNED_WORDS.write_bytes(lzma.compress(lines.encode(), preset=9 | lzma.PRESET_EXTREME))


if __name__ == "__main__":
    main()
