"""The command that makes texts of many prompts."""

import json
import shutil
import subprocess
import sys

import pytest

from experiments.readme import ROOT
from tests.tools.shallow import shallow

PROMPTS = ('{"prompt": "import os", "max_tokens": 6, "temperature": 0}', '{"prompt": "import os, sys", "seed": 3}')


def run(tmp_path, lines, *flags):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(lines))
    command = [sys.executable, "-m", "experiments.generate", f"--prompts={path}", "--tokens=4", *flags]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.mark.full
def test_texts_of_many_prompts(tmp_path):
    made = run(tmp_path, PROMPTS, "--slots=1", f"--out={tmp_path / 'out.jsonl'}")
    assert made.returncode == 0, made.stderr
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["tokens"] for line in lines] == [6, 4]
    assert all(line["text"] for line in lines)


@pytest.fixture
def talking(tmp_path):
    """A checkpoint that has a template."""
    folder = tmp_path / "model"
    shutil.copytree(ROOT / "results" / "models" / "qwen2-d64", folder)
    template = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}a:"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


@pytest.mark.full
def test_chat(tmp_path, talking):
    """A message, and a conversation that equals it, get the same answers."""
    talk = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "import os"}]
    lines = [json.dumps({name: said, "temperature": 0}) for name, said in (("prompt", "import os"), ("messages", talk))]
    made = run(tmp_path, lines[:1], "--chat", f"--model={talking}", "--system=be brief")
    again = run(tmp_path, lines[1:], "--chat", f"--model={talking}")
    plain = run(tmp_path, ['{"prompt": "s:be brief;u:import os;a:", "temperature": 0}'], f"--model={talking}")
    assert made.returncode == again.returncode == plain.returncode == 0, made.stderr + again.stderr
    assert made.stdout == again.stdout == plain.stdout
    none = run(tmp_path, lines[:1], "--chat")
    assert none.returncode == 1
    assert none.stderr.splitlines()[-1].endswith("llama-d128 has no chat template: leave out --chat")


@pytest.mark.full
def test_a_conversation(tmp_path, talking):
    """Each answer is that to all that was said; the second turn finds the first two pages of the one before."""
    asked, again = "import os, sys  # " * 24, "more"
    options = ["--chat", f"--model={talking}", "--strategy=float32", "--tokens=6", "--temperature=0"]
    command = [sys.executable, "-m", "experiments.generate", *options]
    talk = subprocess.run(command, input=f"{asked}\n{again}\n", capture_output=True, text=True)
    assert talk.returncode == 0, talk.stderr
    answers = [part.rstrip("\n") for part in talk.stdout.split("> ")[1:3]]
    said = [{"role": "user", "content": asked.strip()}]
    more = [*said, {"role": "assistant", "content": answers[0]}, {"role": "user", "content": again}]
    found = run(tmp_path, [json.dumps({"messages": messages}) for messages in (said, more)], *options)
    assert [json.loads(line)["text"] for line in found.stdout.splitlines()] == answers
    counts = [line for line in talk.stderr.splitlines() if "were read now" in line]
    whole = len(f"u:{asked.strip()};a:"), len(f"u:{asked.strip()};a:{answers[0]};u:{again};a:")
    assert counts == [
        f"({n} tokens, of which {n - known} were read now)" for n, known in zip(whole, (0, 260), strict=True)
    ]


@pytest.mark.full
def test_pages_run_out(tmp_path):
    lines = [json.dumps({"prompt": f"import os  # {i}", "max_tokens": 200, "temperature": 0}) for i in range(2)]
    model = shallow(ROOT / "results" / "models" / "llama-d128", tmp_path / "model")
    options = f"--model={model}", "--slots=2", "--pages=2", "--strategy=eden_4", "--degrade=eden_2", "--window=16"
    made = run(tmp_path, lines, *options)
    assert made.returncode == 0, made.stderr
    assert made.stderr.splitlines()[-1] == "pages ran out: codes were made anew by eden_2, 3 pages"
    assert len(made.stdout.splitlines()) == 2


@pytest.mark.full
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: Expecting property name"),
        ('{"text": "a"}', 'line 2: expected {"prompt": "..."}'),
        ('{"prompt": "a", "top": 1}', "line 2: unknown 'top', expected one of max_tokens"),
    ],
)
def test_wrong_lines(tmp_path, line, message):
    made = run(tmp_path, [PROMPTS[0], line])
    assert (made.returncode, made.stdout) == (1, "")
    assert message in made.stderr.splitlines()[-1]
