"""Chat templates: messages as the text that a checkpoint's makers meant, in Jinja, as in `tokenizer_config.json`.

A template is a program that others wrote. It is rendered by a process of its own, in Jinja's sandbox, with little time
and memory. The process runs this file as a script, which therefore imports nothing of this project.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SECONDS, BYTES = 10, 2**30
"""Limits of a template's time and memory."""
Message = Mapping[str, Any]
"""A message: {"role": "user", "content": "..."}, and other fields that a template knows."""


def rendered(folder: Path, messages: Sequence[Message]) -> str:
    """Renders messages as the text that an answer goes on from, with all special tokens.

    Args:
      folder: of the checkpoint; `chat_template.jinja`, or `chat_template` in `tokenizer_config.json`. Or a GGUF file.
      messages: the conversation.

    Raises:
      FileNotFoundError: there is no template.
      ValueError: a file is damaged, the template refuses the messages, or takes too long; the message says which.
    """
    fields = _fields(folder)
    tokens = {
        name: token["content"] if isinstance(token, dict) else token
        for name, token in fields.items()
        if name.endswith("_token") and isinstance(token, str | dict)
    }
    job = {
        "template": _template(folder, fields),
        "variables": {
            **tokens,
            "messages": list(messages),
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
        },
    }
    try:
        done = subprocess.run(
            [sys.executable, "-I", __file__],
            input=json.dumps(job).encode(),
            capture_output=True,
            check=False,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"the chat template of {folder} takes more than {SECONDS} seconds") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip() or f"its process ended with {done.returncode}"
        reason = said.splitlines()[-1]
        raise ValueError(f"the chat template of {folder}: {reason}")
    return done.stdout.decode()  # as it is: a text's own line ends stay


def _fields(folder: Path) -> dict[str, Any]:
    if folder.is_dir():
        return _json(folder / "tokenizer_config.json")
    from rqjax.nn.tokenizer import tokenizer_config  # not for the process that renders

    return tokenizer_config(folder)


def _template(folder: Path, fields: Mapping[str, Any]) -> str:
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    found = fields.get("chat_template")
    if isinstance(found, list):  # by name
        found = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}.get("default")
    if not isinstance(found, str):
        raise FileNotFoundError(f"{folder} has no chat template: leave out --chat")
    return found


def _json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"expected an object in {path}, got {type(fields).__name__}")
    return fields


def main() -> None:
    """Renders the template on standard input."""
    import datetime

    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks what an assistant wrote, for training: it stays as it is."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    except (ImportError, ValueError, OSError):
        pass  # not on all systems; the limit of time remains
    job = json.loads(sys.stdin.read())
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
    )
    environment.filters["tojson"] = lambda x, indent=None: json.dumps(x, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        sys.stdout.buffer.write(environment.from_string(job["template"]).render(**job["variables"]).encode())
    except (TemplateError, MemoryError, ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as error:
        sys.exit(" ".join(str(error).split()) or type(error).__name__)


if __name__ == "__main__":
    main()
