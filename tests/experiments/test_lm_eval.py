"""Tasks of lm_eval, without the network, against what is computed directly."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.models import models
from experiments.models.cached_lm import CachedLM

pytestmark = pytest.mark.full

CHOICES = [
    {"question": "import numpy as", "choices": [" np", " zebra", " 7"], "answer": 0},
    {"question": "for i in", "choices": [" while:", " range(10):"], "answer": 1},
    {"question": "def __init__(self", "choices": ["):\n", " == 3"], "answer": 0},
]
TEXTS = [{"text": "The quick brown fox jumps over the lazy dog. " * 12}, {"text": "x"}]
TASKS = {
    "choices": """
output_type: multiple_choice
doc_to_text: question
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
metric_list:
  - metric: acc
""",
    "texts": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: text
metric_list:
  - metric: byte_perplexity
""",
    "stories": """
output_type: generate_until
doc_to_text: question
doc_to_target: "{{choices[0]}}"
generation_kwargs:
  until: ["\\n"]
  max_gen_toks: 12
metric_list:
  - metric: exact_match
""",
}


@pytest.fixture(scope="module")
def model():
    decoder, tokenizer = models.load("llama-d128")
    options = {"batch": 2, "chunk": 128, "max_length": 512, "window": 16, "sinks": 1, "dtype": jnp.float32}
    return CachedLM(decoder, tokenizer, "float32", **options)


FORWARD = jax.jit(lambda decoder, tokens: decoder(tokens)[0])


def logits(model, tokens):
    """Texts padded to a multiple of 128 tokens, so that few programs serve all lengths."""
    return FORWARD(model.engine.decoder, np.pad(tokens, (0, -len(tokens) % 128))[None])[0, : len(tokens)]


def direct(model, tokens):
    """Log-probabilities of all tokens but the first."""
    found = jax.nn.log_softmax(logits(model, tokens[:-1]))
    return np.asarray(found)[np.arange(len(tokens) - 1), tokens[1:]], np.asarray(found.argmax(-1)) == tokens[1:]


def test_log_likelihoods_are_those_of_the_decoder(model):
    parts = [("import numpy", " as np"), ("x", "y"), ("class A:\n    def f(self):\n        return", " self" * 9)]
    requests = [(part, model.tok_encode(part[0]), model.tok_encode(part[1])) for part in parts]
    for (_, context, rest), (nats, greedy) in zip(requests, model._loglikelihood_tokens(requests), strict=True):
        expected, likeliest = direct(model, [*context, *rest])
        assert nats == pytest.approx(expected[-len(rest) :].sum(), abs=1e-4)
        assert greedy == likeliest[-len(rest) :].all()


def test_a_context_is_read_once_for_all_choices(model):
    """The second and third find a page of the context; what is scored is that of each alone."""
    context, before = model.tok_encode("def f(self):\n    return self.x\n" * 12), model.engine.read
    assert 257 < len(context) < 385  # the page is whole once the next piece has come
    requests = [(None, context, model.tok_encode(rest)) for rest in ("class A:", "x = 3", "\n")]
    for (_, _, rest), (nats, _) in zip(requests, model._loglikelihood_tokens(requests), strict=True):
        assert nats == pytest.approx(direct(model, [*context, *rest])[0][-len(rest) :].sum(), abs=1e-4)
    assert model.engine.read - before == sum(len(context) + len(rest) for _, _, rest in requests) - 2 * 129


def test_only_the_newest_tokens_of_a_long_text_are_looked_at(model):
    context, rest = model.tok_encode("a = 1\n" * 100), model.tok_encode("b = 2")
    ((nats, _),) = model._loglikelihood_tokens([(None, context, rest)])
    expected, _ = direct(model, [*context, *rest][-513:])
    assert nats == pytest.approx(expected[-len(rest) :].sum(), abs=1e-4)


def test_texts_are_the_likeliest_tokens_up_to_a_stop(model):
    prompts = ["def main(", "import", "for i in range("]
    options = {"until": ["\n"], "max_gen_toks": 12}
    texts = model.generate_until([SimpleNamespace(args=(prompt, options)) for prompt in prompts])
    for prompt, text in zip(prompts, texts, strict=True):
        tokens = model.tok_encode(prompt)
        for _ in range(12):
            tokens.append(int(logits(model, tokens)[-1].argmax()))
        made = model.tokens.decode(tokens[len(model.tok_encode(prompt)) :])
        assert text == made.partition("\n")[0]


def command(folder, *arguments):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(folder / "cache")}
    options = {"env": environment, "capture_output": True, "text": True, "cwd": Path(__file__).parents[2]}
    return subprocess.run([sys.executable, "-m", "experiments.lm_eval", *arguments], check=False, **options)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    for name, text in TASKS.items():
        rows = TEXTS if name == "texts" else CHOICES
        (folder / f"{name}.json").write_text("\n".join(map(json.dumps, rows)))
        head = f"task: own_{name}\ndataset_path: json\ntest_split: test\n"
        head += f"dataset_kwargs:\n  data_files:\n    test: {folder / name}.json\n"
        (folder / f"{name}.yaml").write_text(head + text)
    return folder


def test_a_command_runs_tasks_of_one_s_own_offline(model, tasks):
    out = tasks / "results.json"
    names = "own_choices,own_texts,own_stories"
    done = command(tasks, f"--tasks={names}", f"--include_path={tasks}", "--strategy=float32", f"--output={out}")
    assert done.returncode == 0, done.stderr
    assert "own_choices" in done.stdout
    results = json.loads(out.read_text())
    right = 0
    for row in CHOICES:
        nats = []
        for choice in row["choices"]:
            whole, context = model.tok_encode(row["question"] + choice), model.tok_encode(row["question"])
            nats.append(direct(model, whole)[0][len(context) - 1 :].sum())
        right += int(np.argmax(nats) == row["answer"])
    assert results["own_choices"]["acc,none"] == pytest.approx(right / 3)
    nats = [direct(model, [model.prefix_token_id, *model.tok_encode(row["text"])])[0].sum() for row in TEXTS]
    size = sum(len(row["text"].encode()) for row in TEXTS)
    assert results["own_texts"]["byte_perplexity,none"] == pytest.approx(math.exp(-sum(nats) / size), rel=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks=own_choices", "--strategy=edn_3"], "unknown strategy 'edn_3'"),
        (["--tasks=own_choices", "--strategy=klt_trellis_2"], "experiments.calibrate"),
    ],
)
def test_one_line_says_what_is_wrong(tasks, arguments, message):
    done = command(tasks, f"--include_path={tasks}", *arguments)
    assert done.returncode == 1
    assert message in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
