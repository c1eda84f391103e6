"""A family of decoders of somebody else's, through codes and files: entries of three tables."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from rqjax.nn import generate, load_calibration, load_decoder, save_calibration
from rqjax.nn.families import FAMILIES, Family
from rqjax.nn.fields import OTHERS, SIZES

LLAMA = Path(__file__).parent.parent / "checkpoints" / "llama"
KEY, TOKENS = jax.random.key(0), np.random.default_rng(0).integers(3, 96, (4, 60))


def parrot(folder):
    """Writes the checkpoint of llama as one whose norms multiply by 1 + w, with another name for the output's map."""
    FAMILIES["parrot"] = Family(unit_offset=True, names={"o_proj": "out"})
    SIZES["parrot"], OTHERS["parrot"] = SIZES["llama"], OTHERS["llama"]
    folder.mkdir()
    fields = json.loads((LLAMA / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "model_type": "parrot"}))
    tensors = load_file(LLAMA / "model.safetensors")
    tensors = {name.replace("o_proj", "out"): x - ("norm" in name) for name, x in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.full
def test_a_family_from_outside_works_wherever_others_do(tmp_path, monkeypatch):
    for table in (FAMILIES, SIZES, OTHERS):
        monkeypatch.setitem(table, "parrot", None)
    decoder, llama = load_decoder(parrot(tmp_path / "parrot")), load_decoder(LLAMA)
    np.testing.assert_allclose(decoder(TOKENS)[0], llama(TOKENS)[0], atol=1e-4)
    options = {"window": 16, "sinks": 2}
    for name in ("eden_8", "eden_8+pre_rope"):
        text = generate(decoder, decoder.caches(name, KEY, 1, 96, **options), TOKENS[0], key=KEY, temperature=0)
        plain = generate(llama, llama.caches("float32", KEY, 1, 96, **options), TOKENS[0], key=KEY, temperature=0)
        assert [next(text)[0] for _ in range(8)] == [next(plain)[0] for _ in range(8)]
    strategies = decoder.calibrate(TOKENS, "klt_trellis_4+pre_rope", KEY)
    save_calibration(strategies, decoder, tmp_path / "parrot", "klt_trellis_4+pre_rope")
    again = load_calibration(decoder, tmp_path / "parrot", "klt_trellis_4+pre_rope")
    assert [str(strategy) for strategy in again] == ["klt_trellis_4+pre_rope"] * 2
