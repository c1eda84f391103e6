"""Packages that only extras of rqjax install: where one is missing, one line says how to get it."""

import contextlib
from collections.abc import Iterator

EXTRAS = {
    "experiments": ("absl", "ml_collections", "matplotlib", "tqdm"),
    "flax": ("flax", "huggingface_hub", "jinja2", "tokenizers"),
    "real": ("gguf", "wordllama"),
    "bench": ("faiss", "h5py", "turbovec"),
    "eval": ("lm_eval",),
}
"""Modules that each extra installs, by the names of their imports."""


class MissingExtra(ImportError):
    """Error where a package that an extra of rqjax installs is missing."""


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Explains imports that fail: where a package of an extra is missing, the error names the extra and the command
    that installs it.

    Raises:
      MissingExtra: in the place of ModuleNotFoundError.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        for extra, packages in EXTRAS.items():
            if package in packages:
                raise MissingExtra(
                    f"{package} is not installed, it comes with the extra {extra}: pip install -e '.[{extra}]'"
                ) from None
        raise
