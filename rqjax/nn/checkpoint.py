"""Decoders in Hugging Face's folders, `config.json` and `.safetensors` files, and what is calibrated to them."""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array

from rqjax.cache.strategy import Strategy
from rqjax.core import extras, treefile
from rqjax.core.treefile import Stored, replacing
from rqjax.nn import compat, gguf, heads, tensors
from rqjax.nn.config import DecoderConfig
from rqjax.nn.decoder import Decoder
from rqjax.nn.fields import token_ids
from rqjax.nn.weights import digest


def find_checkpoint(source: str | os.PathLike[str]) -> Path:
    """Returns the folder of a checkpoint: `source`, or where `huggingface_hub` keeps the repository of that name. A
    GGUF file is returned as it is.

    Raises:
      FileNotFoundError: there is neither.
    """
    folder = Path(source)
    if folder.is_dir() or (folder.suffix == ".gguf" and folder.is_file()):
        return folder
    if str(source).count("/") != 1 or str(source).startswith((".", "/", "~")):
        raise FileNotFoundError(f"there is no {'file' if folder.suffix == '.gguf' else 'folder'} {source}")
    with extras.explained():
        from huggingface_hub import snapshot_download
    try:
        return Path(snapshot_download(str(source), allow_patterns=["*.json", "*.jinja", "*.safetensors"]))
    except Exception as error:  # of many kinds: no network, no such repository, no permission
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise FileNotFoundError(f"{source} is neither a folder nor can it be had from Hugging Face: {reason}") from None


def load_decoder(
    source: str | os.PathLike[str],
    *,
    dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
    axis: str | None = None,
    context: int | None = None,
) -> Decoder:
    """A decoder with the weights of a checkpoint: Hugging Face's folders, or a GGUF file (extra `real`).

    Files are memory-mapped. Tensors are copied only after the names and shapes of all have been found right. They are
    copied piece by piece, so that at most some pieces are in memory beside the weights. Experts of a layer lie in one
    array, and those in MXFP4 become bfloat16.

    Fields, files and tensors are read as transformers reads them. Missing fields have the values of its classes, but
    for tokens that end a text. Fields that a class does not read are ignored. `model.safetensors` comes before shards
    with an index, and other files are not read. Tensors that the decoder has no use for are named in a warning. Token
    ids that end a text are those of `generation_config.json`, if there is one.

    A GGUF file is of an architecture among `rqjax.nn.gguf.ARCHITECTURES`. Its tensors are dequantized piece by piece,
    to float32 if no dtype is given, unless all matrices are float16 or bfloat16. If it is the first of several parts,
    all are read.

    On a mesh heads, columns of the MLP and the vocabulary (if it divides) lie along an axis. So do heads in caches
    that the decoder makes. Norms and other small parameters are on all devices. Each process reads what its own
    devices hold. With several processes (`jax.distributed`) all make the same calls: `caches`, `generate` and `Engine`
    are used as on one device.

    Args:
      source: folder with `config.json` and `.safetensors` files, a GGUF file, or a name on Hugging Face.
      dtype: of the weights; as in the files, if not given, but bfloat16 for numbers of 8 bits.
      mesh: of the devices; the first device, if not given.
      axis: of the mesh; its only one, if not given. Along others there are copies.
      context: tokens of the longest text that the decoder is for; as many as the checkpoint takes, if not given. Those
        with `longrope` (Phi-3.5 mini, Phi-4 mini) turn texts up to their original length by other frequencies than
        longer ones; here it is `context` that decides, from the first token on.

    Raises:
      FileNotFoundError: there is no such folder or file.
      MissingExtra: a GGUF file needs the package `gguf`.
      TypeError: it is no mesh.
      UnknownName: an architecture that is not supported.
      ValueError: a field of the config, a file or a tensor is missing or wrong; it is named. Or the mesh
        has no such axis, or more devices along it than divide the heads of keys and values, or the MLP's columns.

    Example:
      >>> import jax, jax.numpy as jnp, numpy as np
      >>> from rqjax.nn import load_decoder
      >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), "heads")
      >>> decoder = load_decoder("results/models/qwen2-d64", mesh=mesh)
      >>> caches = decoder.caches("eden_4", jax.random.key(0), 1, 256)
      >>> tuple(caches[0].exact_keys.sharding.spec)
      (None, 'heads')
    """
    folder = find_checkpoint(source)
    packed, usual = folder.is_file(), folder / "generation_config.json"
    fields = gguf.fields(folder) if packed else read_json(folder / "config.json")
    config = DecoderConfig.parse(fields, context)
    if usual.exists():  # chat models have tokens that end a turn beside those that end a text
        config = dataclasses.replace(config, eos_token_ids=token_ids(read_json(usual).get("eos_token_id")))
    sharding = None if mesh is None else heads.checked(config, mesh, axis)
    files = gguf.tensors(folder) if packed else _files(folder, fields)
    if config.tie_word_embeddings and tensors.untied(files):
        config = dataclasses.replace(config, tie_word_embeddings=False)
    graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    leaves = list(nnx.to_flat_state(state))
    shapes = {tuple(path): compat.value(leaf).shape for path, leaf in leaves}
    places = tensors.found(config, shapes, files, folder)

    def read(path: tuple[Any, ...]) -> Array:
        shape = shapes[path]
        part = lambda index: tensors.read(places[path], files, shape, index, dtype)  # noqa: E731
        if sharding is None:
            return jax.device_put(part(()))
        return jax.make_array_from_callback(shape, heads.of_weight(path, shape, sharding), part)

    flat = [(path, leaf.replace(read(tuple(path)))) for path, leaf in leaves]
    decoder = nnx.merge(graph, nnx.from_flat_state(flat))
    decoder.sharding = sharding
    return decoder


def save_decoder(model: Decoder, fields: Mapping[str, Any], folder: Path, *, dtype: DTypeLike = jnp.bfloat16) -> None:
    """Writes a checkpoint that `load_decoder` and transformers read; a file that is there is replaced at once.

    Args:
      model: the decoder.
      fields: its `config.json`.
      folder: where to; made, if there is none.
      dtype: of the weights.
    """
    from safetensors.flax import save_file

    folder.mkdir(parents=True, exist_ok=True)
    leaves = nnx.to_flat_state(nnx.state(model))
    weights = {tuple(path): compat.value(leaf).astype(dtype) for path, leaf in leaves}
    with replacing(folder / "model.safetensors") as file:
        save_file(tensors.joined(weights, model.config), file, {"format": "pt"})
    plain = {name: field for name, field in fields.items() if name != "quantization_config"}
    with replacing(folder / "config.json") as file:
        file.write_text(json.dumps({**plain, "dtype": jnp.dtype(dtype).name}, indent=2) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Reads the object in a JSON file."""
    try:
        fields = json.loads(path.read_text())
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no {path.name} in {path.parent}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"expected an object in {path}, got {type(fields).__name__}")
    return fields


def save_calibration(
    strategies: Sequence[Strategy], decoder: Decoder, source: str | os.PathLike[str], name: str
) -> Path:
    """Writes what `Decoder.calibrate` has found to one file in the folder `rqjax` of a checkpoint.

    Args:
      strategies: one for each layer.
      decoder: whose keys and values they were fitted to; the file knows its weights.
      source: the checkpoint, as in `load_decoder`; it need not hold the weights.
      name: of the strategy.

    Returns:
      The file's path.

    Example:
      >>> import tempfile, jax, jax.numpy as jnp, rqjax
      >>> from rqjax.nn import load_calibration, load_decoder, save_calibration
      >>> decoder, name = load_decoder("results/models/qwen2-d64"), "eden_2+turned"
      >>> strategies = decoder.calibrate(jnp.arange(64)[None], name, jax.random.key(0))
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = save_calibration(strategies, decoder, folder, name)
      ...     again = load_calibration(decoder, folder, name)
      >>> len(again), path.name
      (4, 'eden_2+turned.safetensors')
    """
    path = _path(source, name)
    path.parent.mkdir(parents=True, exist_ok=True)
    treefile.save(list(strategies), path, decoder=_digest(decoder))
    return path


def load_calibration(decoder: Decoder, source: str | os.PathLike[str], name: str) -> list[Strategy]:
    """Loads the strategies that `save_calibration` wrote; `Decoder.caches` takes them in the place of a name.

    Args:
      decoder: of the checkpoint that the strategies were fitted to, in any dtype.
      source: as in `save_calibration`.
      name: of the strategy.

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: it is damaged, or was fitted to other weights.
    """
    path = _path(source, name)
    strategies, metadata = treefile.load(path)
    if metadata.get("decoder") != _digest(decoder):
        raise ValueError(f"{path} was fitted to another checkpoint: its keys and values are made by other weights")
    return strategies


def _path(source: str | os.PathLike[str], name: str) -> Path:
    """Returns a file in a folder of its own: all `.safetensors` files beside the checkpoint's are weights. Of several
    GGUF files in one folder each has its own."""
    found = find_checkpoint(source)
    folder = found.parent / "rqjax" / found.stem if found.is_file() else found / "rqjax"
    return folder / f"{name.replace('/', '_over_')}.safetensors"


def _digest(decoder: Decoder) -> str:
    """Hashes the weights that make keys and values, in bfloat16, whatever dtype they were loaded in."""
    projections = (projection for block in decoder.layers for projection in block.self_attn.to_cache)
    return digest("", (projection.weight[...].astype(jnp.bfloat16) for projection in projections))


def _files(folder: Path, fields: Mapping[str, Any]) -> dict[str, Stored]:
    """Finds the tensors of a folder, in the file that the config names or else the first that is there."""
    usual = ["model.safetensors", "model.safetensors.index.json"]
    named = fields.get("transformers_weights")
    present = [name for name in usual if (folder / name).exists()] if named is None else [_beside(named, "config.json")]
    if not present:
        raise FileNotFoundError(f"there is no {' or '.join(usual)} in {folder}")
    index = folder / present[0]
    places = _weight_map(index) if index.suffix == ".json" else {}
    tensors: dict[str, Stored] = {}
    for name in sorted(set(places.values())) or present[:1]:
        path = folder / name
        if not path.exists():
            by = index.name if places else "config.json"
            raise FileNotFoundError(f"there is no {name} in {folder}, which {by} names")
        with treefile.whole(path):
            own = treefile.stored(path)[1]
        if twice := sorted(own.keys() & tensors.keys()):
            raise ValueError(f"{folder}: tensor {twice[0]!r} is in {tensors[twice[0]].path.name} and in {name}")
        tensors |= own
    if lost := [name for name, place in places.items() if name not in tensors or tensors[name].path.name != place]:
        raise ValueError(f"{index} says that tensor {lost[0]!r} is in {places[lost[0]]}, where it is not")
    return tensors


def _weight_map(index: Path) -> dict[str, str]:
    """Reads the file of each tensor, beside the index; a name that leads elsewhere is refused."""
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise ValueError(f"expected weight_map in {index} to be an object of file names")
    return {tensor: _beside(name, index) for tensor, name in places.items()}


def _beside(name: Any, index: Any) -> str:
    if not isinstance(name, str) or Path(name).name != name or name == "..":
        raise ValueError(f"{index} names {name!r}, which is no file beside it")
    return name
