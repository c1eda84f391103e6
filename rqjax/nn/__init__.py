"""flax nnx modules (extra `flax`)."""

from rqjax.core import extras

with extras.explained():
    import flax as _flax  # noqa: F401

from rqjax.nn.advise import advise as advise
from rqjax.nn.attention import CachedAttention as CachedAttention, exact_attention as exact_attention
from rqjax.nn.checkpoint import (
    find_checkpoint as find_checkpoint,
    load_calibration as load_calibration,
    load_decoder as load_decoder,
    save_calibration as save_calibration,
    save_decoder as save_decoder,
)
from rqjax.nn.compress import compress as compress
from rqjax.nn.config import DecoderConfig as DecoderConfig
from rqjax.nn.decoder import Decoder as Decoder
from rqjax.nn.engine import Engine as Engine, Event as Event
from rqjax.nn.generate import generate as generate
from rqjax.nn.latent import LatentAttention as LatentAttention
from rqjax.nn.tokenizer import load_tokenizer as load_tokenizer
