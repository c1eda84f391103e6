"""Checkpoints: written, read, and refused with one line that names what is wrong."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from rqjax.core import treefile
from rqjax.nn import Decoder, DecoderConfig, load_decoder, save_decoder, tensors
from tests.nn.test_decoder import CHECKPOINTS, FORWARD, fields


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(CHECKPOINTS / "llama", tmp_path / "llama"))


def change(folder, **tensors):
    """Replaces tensors of a checkpoint; None removes one."""
    file = folder / "model.safetensors"
    save_file({k: v for k, v in {**load_file(file), **tensors}.items() if v is not None}, file)


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}])
def test_what_was_written_is_read(changes, tmp_path):
    config = fields(num_hidden_layers=2, **changes)
    model = Decoder(DecoderConfig.parse(config), rngs=nnx.Rngs(0))
    save_decoder(model, config, tmp_path / "new" / "model", dtype=jnp.float32)
    loaded = load_decoder(tmp_path / "new" / "model")
    assert jax.tree.all(jax.tree.map(np.array_equal, nnx.state(model), nnx.state(loaded)))
    half = load_decoder(tmp_path / "new" / "model", dtype=jnp.bfloat16)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(nnx.state(half))} == {"bfloat16"}
    logits, expected = (FORWARD(decoder, np.arange(5)[None]) for decoder in (half, model))
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, expected, atol=0.01)


@pytest.mark.parametrize("family", ["phi3", "glm4", "mixtral", "qwen3_moe", "gpt_oss"])
def test_tensors_of_many_parameters_are_written_as_they_were_read(family, tmp_path):
    """Rows of queries, keys and values in one, in the order of the file; experts apart or in one."""
    folder = CHECKPOINTS / family
    save_decoder(load_decoder(folder), json.loads((folder / "config.json").read_text()), tmp_path, dtype=jnp.float32)
    written, expected = (load_file(path / "model.safetensors") for path in (tmp_path, folder))
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_array_equal(written[name], tensor)


def test_experts_in_mxfp4(tmp_path):
    """Blocks of 32 numbers, two a byte, the first one in the low bits; against a loop over them."""
    folder = Path(shutil.copytree(CHECKPOINTS / "gpt_oss", tmp_path / "gpt_oss"))
    fields = json.loads((folder / "config.json").read_text())
    config = {**fields, "quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(config))
    rng, changes, expected = np.random.default_rng(0), {}, {}
    for layer in range(2):
        for module in ("gate_up_proj", "down_proj"):
            name = f"model.layers.{layer}.mlp.experts.{module}"
            experts, inner, outer = load_file(CHECKPOINTS / "gpt_oss/model.safetensors")[name].shape
            blocks = rng.integers(0, 256, (experts, outer, inner // 32, 16)).astype(np.uint8)
            scales = rng.integers(120, 128, (experts, outer, inner // 32)).astype(np.uint8)
            changes |= {name: None, f"{name}_blocks": blocks, f"{name}_scales": scales}
            numbers = np.zeros((experts, inner, outer), np.float32)
            for i, j, block, byte in np.ndindex(blocks.shape):
                for k, nibble in enumerate(divmod(int(blocks[i, j, block, byte]), 16)[::-1]):
                    number = [0, 0.5, 1, 1.5, 2, 3, 4, 6][nibble % 8] * (-1) ** (nibble // 8)
                    numbers[i, 32 * block + 2 * byte + k, j] = number * 2.0 ** (int(scales[i, j, block]) - 127)
            expected[name] = numbers
    change(folder, **changes)
    decoder = load_decoder(folder)
    assert decoder.layers[0].mlp.experts.up_proj.weight.dtype == jnp.bfloat16
    save_decoder(decoder, config, tmp_path / "again", dtype=jnp.float32)
    assert "quantization_config" not in json.loads((tmp_path / "again/config.json").read_text())
    written = load_file(tmp_path / "again/model.safetensors")
    for name, numbers in expected.items():
        np.testing.assert_array_equal(written[name], numbers)
    np.testing.assert_array_equal(
        load_decoder(folder, dtype=jnp.float32).layers[1].mlp.experts.up_proj.weight,
        load_decoder(tmp_path / "again").layers[1].mlp.experts.up_proj.weight,
    )


def test_parts_of_tensors(monkeypatch):
    """Few rows are read at once, and begin where JAX copies none of them."""
    expected = load_decoder(CHECKPOINTS / "glm4")
    monkeypatch.setattr(tensors, "BLOCK_BYTES", 1000)
    found = load_decoder(CHECKPOINTS / "glm4")
    assert jax.tree.all(jax.tree.map(np.array_equal, nnx.state(found), nnx.state(expected)))


def equal(one, other):
    return jax.tree.all(jax.tree.map(np.array_equal, nnx.state(one), nnx.state(other)))


def test_prefixes_of_tensors(folder):
    """Gemma 3's and those of wrappers; none in base models, as Qwen3-Embedding's; parts that see are passed over."""
    expected = load_decoder(folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({name.removeprefix("model."): array for name, array in tensors.items()}, folder / "model.safetensors")
    assert equal(expected, load_decoder(folder))
    for prefix in ("language_model.model.", "model.language_model.", "_orig_mod.model."):
        renamed = {prefix + name.removeprefix("model."): array for name, array in tensors.items()}
        save_file({**renamed, "vision_tower.x": np.zeros(2, np.float32)}, folder / "model.safetensors")
        assert equal(expected, load_decoder(folder))


@pytest.mark.parametrize("prefix", ["model.", "language_model.model.", "_orig_mod.model."])
def test_heads_beside_embeddings(prefix, folder):
    """Equal ones are one; a config that ties others is wrong; embeddings that are missing are the head."""
    tensors = load_file(folder / "model.safetensors")
    renamed = {prefix + name.removeprefix("model."): array for name, array in tensors.items()}
    embeddings, head = f"{prefix}embed_tokens.weight", f"{prefix.removesuffix('model.')}lm_head.weight"
    for other, tied in ((renamed[embeddings], True), (renamed[embeddings] * 2, False), (renamed[embeddings][:9], None)):
        save_file({**renamed, head: other}, folder / "model.safetensors")
        if tied is None:
            with pytest.raises(ValueError, match=rf"expected tensor '{head}' of shape \(96, 32\), got \(9, 32\)"):
                load_decoder(folder)
            continue
        decoder = load_decoder(folder)
        assert (decoder.lm_head is None, decoder.config.tie_word_embeddings) == (tied, tied)
        if not tied:
            np.testing.assert_array_equal(decoder.lm_head.weight, other)
    renamed[head] = renamed.pop(embeddings)
    save_file(renamed, folder / "model.safetensors")
    np.testing.assert_array_equal(load_decoder(folder).embed_tokens.weight, renamed[head])


def test_tensors_of_no_module_are_named(folder):
    change(folder, **{"model.extra": np.zeros(2, np.float32), "model.layers.0.self_attn.k_proj.k_scale": np.ones(1)})
    with pytest.warns(UserWarning, match=r"tensor 'model\.extra', and 1 others are not read: no module has them"):
        load_decoder(folder)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float64", "float16", "int8", "int32"])
def test_dtypes_of_tensors(dtype, folder):
    """All dtypes are converted to one to compute in, with the same numbers; bfloat16 holds all 8-bit numbers."""
    numbers = (np.random.default_rng(0).normal(size=(48, 32)) * 30).astype(jnp.dtype(dtype))
    from safetensors.flax import save_file as save_any  # NumPy's does not know those of 8 bits

    tensors = load_file(folder / "model.safetensors")
    if jnp.dtype(dtype).itemsize == 8:
        save_file({**tensors, UP: numbers}, folder / "model.safetensors")
    else:
        save_any({name: jnp.asarray(x) for name, x in {**tensors, UP: numbers}.items()}, folder / "model.safetensors")
    weight = load_decoder(folder).layers[0].mlp.up_proj.weight[...]
    wide = {"float64": "float32", "int32": "float32", "float16": "float16"}
    assert weight.dtype == wide.get(dtype, "bfloat16")
    np.testing.assert_array_equal(np.asarray(weight, np.float64), numbers.astype(np.float32).astype(np.float64))
    assert load_decoder(folder, dtype="float32").layers[0].mlp.up_proj.weight[...].dtype == jnp.float32


def test_dtypes_unknown_to_numpy_are_rejected(folder):
    data = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header[NORM].update(dtype="F4", shape=[256])
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    with pytest.raises(ValueError, match=r"expected tensor 'model.norm.weight' of shape \(32,\), got \(256,\)"):
        load_decoder(folder)
    with pytest.raises(ValueError, match="expected numbers of whole bytes that NumPy has, got dtype 'F4'"):
        treefile.dtype_of("F4")


def test_files_that_are_read(folder):
    """`model.safetensors` comes before an index that is left of shards, and others are left alone."""
    expected = load_decoder(folder)
    zeros = {name: np.zeros_like(x) for name, x in load_file(folder / "model.safetensors").items()}
    for name in (FIRST, "consolidated.safetensors", "adapter_model.safetensors", "optimizer.safetensors"):
        save_file(zeros, folder / name)
    write_index(folder, dict.fromkeys(zeros, FIRST))
    assert equal(expected, load_decoder(folder))
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "transformers_weights": "optimizer.safetensors"}))
    assert not load_decoder(folder).norm.weight[...].any()
    (folder / "config.json").write_text(json.dumps({**fields, "transformers_weights": "../model.safetensors"}))
    with pytest.raises(ValueError, match=r"config.json names '\.\./model.safetensors', which is no file beside it"):
        load_decoder(folder)
    (folder / "config.json").write_text(json.dumps({**fields, "transformers_weights": "lost.safetensors"}))
    with pytest.raises(FileNotFoundError, match=r"there is no lost.safetensors in .*, which config.json names"):
        load_decoder(folder)


NORM, UP = "model.norm.weight", "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({UP: None}, f"has no tensor '{UP}'$"),
        ({UP: None, NORM: None}, f"has no tensor '{UP}', and 1 others"),
        ({NORM: np.zeros(31, np.float32)}, rf"expected tensor '{NORM}' of shape \(32,\), got \(31,\)"),
    ],
)
def test_wrong_tensors(tensors, message, folder):
    change(folder, **tensors)
    with pytest.raises(ValueError, match=message):
        load_decoder(folder)


def test_wrong_files(folder, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no folder \./nowhere"):
        load_decoder("./nowhere")
    (folder / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(ValueError, match=r"model.safetensors is not a whole safetensors file"):
        load_decoder(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"there is no model.safetensors or model.safetensors.index.json in"):
        load_decoder(folder)
    index = {"weight_map": {NORM: "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FileNotFoundError, match=r"there is no model-00001-of-00002.safetensors in .* names"):
        load_decoder(folder)
    (folder / "config.json").write_text("{torn")
    with pytest.raises(ValueError, match=r"config.json is not JSON"):
        load_decoder(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"expected an object in .*config.json, got list"):
        load_decoder(folder)
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"there is no config.json in"):
        load_decoder(folder)


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def sharded(folder):
    """The checkpoint in two files, and what their index says."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    places = {name: FIRST if k % 2 else SECOND for k, name in enumerate(sorted(tensors))}
    for part in (FIRST, SECOND):
        save_file({name: tensors[name] for name, place in places.items() if place == part}, folder / part)
    return places


def write_index(folder, places):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def test_shards(folder):
    expected = load_decoder(folder)
    write_index(folder, sharded(folder))
    loaded = load_decoder(folder)
    assert jax.tree.all(jax.tree.map(np.array_equal, nnx.state(expected), nnx.state(loaded)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({NORM: "../model.safetensors"}, r"index.json names '../model.safetensors', which is no file beside it"),
        ({NORM: "/etc/passwd"}, "index.json names '/etc/passwd', which is no file beside it"),
        ({NORM: ".."}, r"index.json names '\.\.', which is no file beside it"),
        ({NORM: 3}, "expected weight_map in .*index.json to be an object of file names"),
        ({"model.more": FIRST}, f"index.json says that tensor 'model.more' is in {FIRST}, where it is not"),
    ],
)
def test_inconsistent_shard_index_is_rejected(folder, changes, message):
    write_index(folder, sharded(folder) | changes)
    with pytest.raises(ValueError, match=message):
        load_decoder(folder)


def test_a_tensor_in_two_files(folder):
    write_index(folder, sharded(folder))
    save_file({NORM: np.zeros(32, np.float32), UP: np.zeros((48, 32), np.float32)}, folder / FIRST)
    save_file({NORM: np.zeros(32, np.float32)}, folder / SECOND)
    with pytest.raises(ValueError, match=f"tensor '{NORM}' is in {FIRST} and in {SECOND}"):
        load_decoder(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header[NORM].update(data_offsets=[0, 4]),  # a size that its shape does not have
        lambda header: header[NORM].update(data_offsets=header[UP]["data_offsets"]),  # over another
        lambda header: header[NORM].update(data_offsets=[2**40, 2**40 + 128]),  # out of the file
        lambda header: header[NORM].update(shape=[-32]),
        lambda header: header[NORM].update(dtype="F99"),
        lambda header: header.pop(NORM),  # bytes of nothing
    ],
)
def test_inconsistent_headers_are_rejected(folder, change):
    data = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    with pytest.raises(ValueError, match=r"model.safetensors is not a whole safetensors file|has no tensor"):
        load_decoder(folder)


@pytest.mark.parametrize("length", [2**62, 10**8 + 1, 3])
def test_headers_of_another_length(folder, length):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(length.to_bytes(8, "little") + data[8:])
    with pytest.raises(ValueError, match=r"model.safetensors is not a whole safetensors file"):
        load_decoder(folder)


def test_a_config_that_is_too_deep(folder):
    (folder / "config.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"config.json is not JSON"):
        load_decoder(folder)


def test_turns_end_by_other_tokens_than_texts(folder):
    """Tokens of generation_config.json end a turn, if the file is there, even if it has none, as in transformers."""
    assert load_decoder(folder).config.eos_token_ids == (2,)
    for text, ids in (('{"eos_token_id": [7, 2]}', (7, 2)), ('{"eos_token_id": null}', ()), ('{"top_p": 0.9}', ())):
        (folder / "generation_config.json").write_text(text)
        assert load_decoder(folder).config.eos_token_ids == ids
    (folder / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(ValueError, match=r"expected eos_token_id to be a whole number from .*, got '</s>'"):
        load_decoder(folder)


def test_names_on_hugging_face_without_the_hub(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(
        FileNotFoundError, match="nobody/nothing is neither a folder nor can it be had from Hugging Face"
    ):
        load_decoder("nobody/nothing")
