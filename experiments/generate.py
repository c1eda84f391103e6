"""Text from a language model with a compressed cache: token by token, or of many prompts at a time.

python -m experiments.generate --prompt="def main(" --strategy=eden_4 --tokens=300
python -m experiments.generate --prompts=prompts.jsonl --out=texts.jsonl --slots=8 --pages=400 --degrade=eden_3,eden_2
python -m experiments.generate --model=smollm2-135m --chat --prompt="Why is the sky blue?"
python -m experiments.generate --model=smollm2-135m --chat

A line of the file is {"prompt": "def main("}, if need be with max_tokens, temperature, top_p, top_k, min_p and seed.
Prompts that begin alike share their pages of the cache. With --chat a prompt is what a user says, put in the words of
the checkpoint's own template, and a line may have a whole conversation, {"messages": [{"role": "user", "content":
"..."}]}. With --chat alone each line that is typed is answered, until an empty one.
"""

import itertools
import json
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tqdm
from absl import app, flags
from tokenizers import Tokenizer

import experiments
import rqjax
from experiments.models import chat, models
from rqjax.core import PAGE, check_int
from rqjax.nn import Decoder, Engine, generate
from rqjax.nn.tokenizer import decoded
from rqjax.paging.pages import CHUNK

MODEL = flags.DEFINE_string(
    "model", "llama-d128", "Of results/models, smollm2-135m, a folder, a GGUF file, or a name on Hugging Face."
)
STRATEGY = flags.DEFINE_string(
    "strategy",
    "eden_4",
    f"Of the cache: {', '.join(rqjax.STRATEGIES)}; or, with _BITS behind it, {', '.join(rqjax.METHODS)}; KEYS/VALUES "
    "for one each; +centered subtracts the mean key, +turned the mean key turned with the positions; +pre_rope makes "
    "codes of keys before rotary positions. What learns is made by experiments.calibrate; FAMILY@BUDGET, bits of each "
    "layer's own, by experiments.advise.",
)
PROMPT = flags.DEFINE_string("prompt", "def main(", "Text to go on from.")
CHAT = flags.DEFINE_bool("chat", False, "Prompts are messages to a model that was trained to answer.")
SYSTEM = flags.DEFINE_string("system", "", "With --chat: what the model is told before.")
PROMPTS = flags.DEFINE_string("prompts", "", "Texts to go on from: a file of lines of JSON.")
OUT = flags.DEFINE_string("out", "", "With --prompts: where the texts go, lines of JSON; printed, if not given.")
SLOTS = flags.DEFINE_integer("slots", 8, "With --prompts: texts at a time.", lower_bound=1)
PAGES = flags.DEFINE_integer(
    "pages", 0, "Of 128 tokens; 0: with --prompts enough for all slots, in a conversation 64.", lower_bound=0
)
DEGRADE = flags.DEFINE_list(
    "degrade", [], "With --prompts: strategies of fewer bits, which codes are made anew by where pages run out."
)
TOKENS = flags.DEFINE_integer("tokens", 300, "How many tokens to make.")
TEMPERATURE = flags.DEFINE_float("temperature", 0.7, "0: always the likeliest token.", lower_bound=0.0)
TOP_P = flags.DEFINE_float("top_p", 1.0, "Only the likeliest tokens that add up to this.", 0.0, 1.0)
TOP_K = flags.DEFINE_integer("top_k", 0, "Only so many of the likeliest tokens; 0: all.", lower_bound=0)
MIN_P = flags.DEFINE_float("min_p", 0.0, "Only tokens of this part of the likeliest one's probability.", 0.0, 1.0)
WINDOW = flags.DEFINE_integer("window", 128, "Newest tokens in full precision.")
SINKS = flags.DEFINE_integer("sinks", 4, "First tokens in full precision.")
BOUNDARY = flags.DEFINE_integer("boundary", 0, "First and last layers in full precision.")
DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Of the weights.")
SEED = flags.DEFINE_integer("seed", 0, "Of the sampling and of the quantizers.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}; flags begin with --")
    try:
        if PROMPTS.value:
            _many()
        elif CHAT.value and not flags.FLAGS["prompt"].present:
            _talk()
        else:
            _stream()
    except (ValueError, TypeError, LookupError, OSError) as error:
        sys.exit(f"error: {experiments.one_line(error)}")


def _many() -> None:
    decoder, tokenizer = models.load(MODEL.value, DTYPE.value)
    lines = [line for line in Path(PROMPTS.value).read_text(encoding="utf-8").split("\n") if line.strip()]
    if OUT.value:  # or all is computed before the folder is missed
        Path(OUT.value).parent.mkdir(parents=True, exist_ok=True)
    asked = [_request(number, line) for number, line in enumerate(lines, 1)]
    prompts = [_ids(tokenizer, request.pop("prompt", ""), request.pop("messages", None)) for request in asked]
    longest = max((len(p) + request["max_tokens"] for p, request in zip(prompts, asked, strict=True)), default=1)
    engine = _engine(decoder, PAGES.value or SLOTS.value * -(-longest // PAGE), SLOTS.value, longest)
    ids = [engine.submit(prompt, **request) for prompt, request in zip(prompts, asked, strict=True)]
    made: dict[int, list[int]] = {id: [] for id in ids}
    with tqdm.tqdm(total=len(ids), unit="text") as bar:
        while engine.waiting or engine.running:
            for event in engine.step():
                made[event.id].append(event.token)
                bar.update(event.done)
    for name, (_, pages) in zip(DEGRADE.value, engine.degraded, strict=False):  # only those that were needed
        print(f"pages ran out: codes were made anew by {name}, {pages} pages", file=sys.stderr)
    texts = [
        json.dumps({"text": decoded(tokenizer, made[id], prompt), "tokens": len(made[id])}) + "\n"
        for id, prompt in zip(ids, prompts, strict=True)
    ]
    if OUT.value:
        Path(OUT.value).write_text("".join(texts), encoding="utf-8")
    else:
        print("".join(texts), end="")


def _engine(decoder: Decoder, pages: int, slots: int, room: int) -> Engine:
    return Engine(
        decoder,
        models.strategies(decoder, MODEL.value, STRATEGY.value),
        jax.random.key(SEED.value),
        pages=pages,
        slots=slots,
        max_len=room,
        chunk=max(CHUNK, -(-max(WINDOW.value, SINKS.value) // PAGE) * PAGE),
        degrade=[models.strategies(decoder, MODEL.value, name) for name in DEGRADE.value],
        window=WINDOW.value,
        sinks=SINKS.value,
        boundary=BOUNDARY.value,
        dtype=DTYPE.value,
    )


def _talk() -> None:
    """Answers each line after all that was said before. Pages of what was read for a line are found for the next."""
    decoder, tokenizer = models.load(MODEL.value, DTYPE.value)
    pages = PAGES.value or 64
    engine, said = _engine(decoder, pages, 1, PAGE * pages), list[chat.Message]()
    while line := _line():
        said.append({"role": "user", "content": line})
        prompt, before = _ids(tokenizer, "", said), engine.read
        engine.submit(prompt, max_tokens=TOKENS.value, **_sampling(), seed=SEED.value)
        said.append({"role": "assistant", "content": _shown(tokenizer, prompt, _answer(engine))})
        print(f"\n({len(prompt)} tokens, of which {engine.read - before} were read now)", file=sys.stderr)


def _line() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""


def _answer(engine: Engine) -> Iterator[int]:
    """Tokens of the only request, but those that end a text."""
    while engine.waiting or engine.running:
        yield from (event.token for event in engine.step() if event.token not in engine.decoder.config.eos_token_ids)


def _shown(tokenizer: Tokenizer, prompt: Any, tokens: Iterable[int]) -> str:
    """Prints a text behind a prompt while its tokens come, and returns it."""
    made: list[int] = []
    shown = ""
    for token in tokens:
        made.append(token)
        text = decoded(tokenizer, made, prompt)
        if not text.endswith("\ufffd"):  # a character whose other bytes are still to come
            print(text[len(shown) :], end="", flush=True)
            shown = text
    return shown


def _request(number: int, line: str) -> dict[str, Any]:
    """Parses a line into arguments of `Engine.submit`."""
    usual = {"max_tokens": TOKENS.value, **_sampling(), "seed": SEED.value}
    try:
        request = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{PROMPTS.value}, line {number}: {error}") from None
    talk = CHAT.value and isinstance(request, dict) and isinstance(request.get("messages"), list)
    if not isinstance(request, dict) or not (talk or isinstance(request.get("prompt"), str)):
        raise ValueError(f'{PROMPTS.value}, line {number}: expected {{"prompt": "..."}}, got {line[:60]}')
    if more := [name for name in request if name not in ("messages" if talk else "prompt", *usual)]:
        raise ValueError(f"{PROMPTS.value}, line {number}: unknown {more[0]!r}, expected one of {', '.join(usual)}")
    request = usual | request
    try:
        check_int("max_tokens", request["max_tokens"], 1, 2**30)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{PROMPTS.value}, line {number}: {error}") from None
    return request


def _sampling() -> dict[str, Any]:
    """Options of the sampling, as `Engine.submit` and `generate` take them."""
    flags = {"temperature": TEMPERATURE, "top_p": TOP_P, "top_k": TOP_K, "min_p": MIN_P}
    return {name: flag.value for name, flag in flags.items()}


def _ids(tokenizer: Tokenizer, prompt: str, messages: list[chat.Message] | None = None) -> list[int]:
    """The tokens of a prompt, or of messages in the words of the checkpoint's template."""
    if not CHAT.value:
        return tokenizer.encode(prompt).ids
    system = [{"role": "system", "content": SYSTEM.value}] if SYSTEM.value else []
    said = [*system, *(messages or [{"role": "user", "content": prompt}])]
    return tokenizer.encode(chat.rendered(models.folder(MODEL.value), said), add_special_tokens=False).ids


def _stream() -> None:
    decoder, tokenizer = models.load(MODEL.value, DTYPE.value)
    prompt = np.asarray(_ids(tokenizer, PROMPT.value))
    count = check_int("tokens", TOKENS.value, 1, 2**20)
    keys = jax.random.split(jax.random.key(SEED.value))
    options = {"window": WINDOW.value, "sinks": SINKS.value, "boundary": BOUNDARY.value, "dtype": DTYPE.value}
    strategy = models.strategies(decoder, MODEL.value, STRATEGY.value)
    caches = decoder.caches(strategy, keys[0], 1, len(prompt) + count, **options)
    times: list[float] = []

    def made() -> Iterator[int]:
        for token, _ in itertools.islice(generate(decoder, caches, prompt, key=keys[1], **_sampling()), count):
            times.append(time.perf_counter())
            yield token

    if not CHAT.value:
        print(PROMPT.value, end="", flush=True)
    _shown(tokenizer, prompt, made())
    speed = f"{(len(times) - 2) / (times[-1] - times[1]):.1f} tokens/s, " if len(times) > 2 else ""  # all is compiled
    print(f"\n\n{speed}megabytes of the cache, and in float16:")
    for tokens in (len(prompt) + count, 8192, 32_768):
        held = decoder.cache_nbytes(strategy, 1, tokens, **options)
        print(f"  {tokens:6,} tokens {held / 1e6:8.2f} {2 * tokens * decoder.config.cached / 1e6:8.2f}")


if __name__ == "__main__":
    app.run(main, flags_parser=experiments.flags_parser)
