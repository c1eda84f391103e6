"""Tasks of lm_eval (lm-evaluation-harness) on a decoder whose keys and values go through a compressed cache.

python -m experiments.lm_eval --model=llama-d128 --strategy=eden_3 --tasks=TASK,TASK --include_path=FOLDER

lm_eval downloads tasks that are not in `include_path`. Needs the extra `eval`; torch is not needed.
"""

import json
import sys
from pathlib import Path
from typing import Any

from absl import app, flags

import experiments
from experiments.models import models
from rqjax.core import PAGE, extras, unknown_name
from rqjax.paging import pages

with extras.explained():
    from lm_eval import simple_evaluate, utils
    from lm_eval.tasks import TaskManager

    from experiments.models.cached_lm import CachedLM

MODEL = flags.DEFINE_string(
    "model", "llama-d128", "Of results/models, smollm2-135m, a folder, a GGUF file, or a name on Hugging Face."
)
STRATEGY = flags.DEFINE_string("strategy", "eden_4", "Of the cache, as in experiments.generate.")
TASKS = flags.DEFINE_list("tasks", None, "Names of lm_eval's tasks, or of those in --include_path.")
INCLUDE = flags.DEFINE_string("include_path", None, "Folder of tasks of your own (YAML); others are not known then.")
LIMIT = flags.DEFINE_integer("limit", None, "Only so many documents of each task.", lower_bound=1)
FEWSHOT = flags.DEFINE_integer("num_fewshot", None, "Examples before each question, if not the task's own number.")
BATCH = flags.DEFINE_integer("batch", 8, "Sequences at a time.", lower_bound=1)
CHUNK = flags.DEFINE_integer("chunk", pages.CHUNK, "Tokens that are read at once: a multiple of 128.", lower_bound=128)
LENGTH = flags.DEFINE_integer("max_length", 2048, "Newest tokens of a text that are looked at.", lower_bound=2)
WINDOW = flags.DEFINE_integer("window", 128, "Newest tokens in full precision.")
SINKS = flags.DEFINE_integer("sinks", 4, "First tokens in full precision.")
DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "Of the weights.")
SEED = flags.DEFINE_integer("seed", 0, "Of the quantizers.")
OUTPUT = flags.DEFINE_string("output", None, "File for the results, as JSON.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected argument {argv[1]!r}; flags begin with --")
    try:
        if OUTPUT.value:
            Path(OUTPUT.value).parent.mkdir(parents=True, exist_ok=True)
        results = _run()
    except (ValueError, TypeError, LookupError, OSError) as error:
        sys.exit(f"error: {experiments.one_line(error)}")
    print(utils.make_table(results))
    if OUTPUT.value:
        Path(OUTPUT.value).write_text(json.dumps(results["results"], indent=1, default=str))


def _run() -> dict[str, Any]:
    names: list[Any] = TASKS.value or []
    tasks = TaskManager(include_path=INCLUDE.value, include_defaults=INCLUDE.value is None)
    if unknown := [name for name in names if name not in tasks.all_tasks]:
        raise unknown_name("task", unknown[0], tasks.all_tasks)
    decoder, tokenizer = models.load(MODEL.value, DTYPE.value)
    model = CachedLM(
        decoder,
        tokenizer,
        models.strategies(decoder, MODEL.value, STRATEGY.value),
        batch=BATCH.value,
        chunk=max(CHUNK.value, -(-max(WINDOW.value, SINKS.value) // PAGE) * PAGE),
        max_length=LENGTH.value,
        seed=SEED.value,
        window=WINDOW.value,
        sinks=SINKS.value,
        dtype=DTYPE.value,
    )
    evaluate: Any = simple_evaluate
    options = {"num_fewshot": FEWSHOT.value, "limit": LIMIT.value, "bootstrap_iters": 0}
    return evaluate(model, tasks=names, task_manager=tasks, **options)


if __name__ == "__main__":
    flags.mark_flag_as_required("tasks")
    app.run(main, flags_parser=experiments.flags_parser)
