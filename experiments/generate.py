"""Text from a language model with a compressed cache, token by token.

python -m experiments.generate --prompt="def main(" --strategy=eden_4 --tokens=300
"""

import sys
import time

import jax
import numpy as np
from absl import app, flags

import experiments
import rqjax
from experiments.language import models
from rqjax.core import check_int
from rqjax.nn import generate

MODEL = flags.DEFINE_string("model", "llama-d128", "Of results/models, a folder, or a name on Hugging Face.")
STRATEGY = flags.DEFINE_string(
    "strategy",
    "eden_4",
    f"Of the cache: {', '.join(rqjax.STRATEGIES)}; or, with _BITS behind it, {', '.join(rqjax.METHODS)}; KEYS/VALUES "
    "for one each; +centered subtracts the mean key, +turned the mean key turned with the positions; +pre_rope makes "
    "codes of keys before rotary positions. What learns is made by experiments.calibrate; FAMILY@BUDGET, bits of each "
    "layer's own, by experiments.advise.",
)
PROMPT = flags.DEFINE_string("prompt", "def main(", "Text to go on from.")
TOKENS = flags.DEFINE_integer("tokens", 300, "How many tokens to make.")
TEMPERATURE = flags.DEFINE_float("temperature", 0.7, "0: always the likeliest token.", lower_bound=0.0)
WINDOW = flags.DEFINE_integer("window", 128, "Newest tokens in full precision.")
SINKS = flags.DEFINE_integer("sinks", 4, "First tokens in full precision.")
BOUNDARY = flags.DEFINE_integer("boundary", 0, "First and last layers in full precision.")
DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Of the weights.")
SEED = flags.DEFINE_integer("seed", 0, "Of the sampling and of the quantizers.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}; flags begin with --")
    try:
        _stream()
    except (ValueError, TypeError, LookupError, OSError) as error:
        sys.exit(f"error: {experiments.one_line(error)}")


def _stream() -> None:
    decoder, tokenizer = models.load(MODEL.value, DTYPE.value)
    prompt = np.asarray(tokenizer.encode(PROMPT.value).ids)
    count = check_int("tokens", TOKENS.value, 1, 2**20)
    keys = jax.random.split(jax.random.key(SEED.value))
    options = {"window": WINDOW.value, "sinks": SINKS.value, "boundary": BOUNDARY.value, "dtype": DTYPE.value}
    strategy = models.strategies(decoder, MODEL.value, STRATEGY.value)
    caches = decoder.caches(strategy, keys[0], 1, len(prompt) + count, **options)
    made: list[int] = []
    shown, start = "", 0.0
    print(PROMPT.value, end="", flush=True)
    for token, after in generate(decoder, caches, prompt, key=keys[1], temperature=TEMPERATURE.value):
        caches = after
        made.append(token)
        text = tokenizer.decode(made)
        if not text.endswith("\ufffd"):  # a character whose other bytes are still to come
            print(text[len(shown) :], end="", flush=True)
            shown = text
        if len(made) == 2:  # both shapes are compiled
            start = time.perf_counter()
        if len(made) == count:
            break
    speed = f"{(len(made) - 2) / (time.perf_counter() - start):.1f} tokens/s, " if len(made) > 2 else ""
    print(f"\n\n{speed}megabytes of the cache, and in float16:")
    shape = decoder.config
    for tokens in (len(prompt) + count, 8192, 32_768):
        held = decoder.cache_nbytes(strategy, 1, tokens, **options)
        float16 = 2 * 2 * tokens * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim
        print(f"  {tokens:6,} tokens {held / 1e6:8.2f} {float16 / 1e6:8.2f}")


if __name__ == "__main__":
    app.run(main, flags_parser=experiments.flags_parser)
