"""Decoders with the first of their layers: compiling takes as long as there are layers."""

import json
import shutil
import warnings
from pathlib import Path

from rqjax.nn import load_decoder, save_decoder


def shallow(source: Path | str, folder: Path, layers: int = 1) -> Path:
    """Writes a checkpoint of the first layers of another; returns its folder."""
    shutil.copytree(source, folder)
    fields = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": layers}
    if "layer_types" in fields:
        fields["layer_types"] = fields["layer_types"][:layers]
    (folder / "config.json").write_text(json.dumps(fields))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # tensors of other layers are not read
        decoder = load_decoder(folder)
    save_decoder(decoder, fields, folder)
    return folder
