"""Chat templates, in the style of those of common checkpoints, and what is refused."""

import json

import pytest

from experiments.models import chat

CHATML = """{%- for message in messages -%}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""
HEADERS = """{{ bos_token }}
{% for message in messages %}
    {% if loop.index0 > 9 %}{% break %}{% endif %}
    {{- '[' ~ message['role'] ~ ']' ~ message['content'] | trim ~ eos_token -}}
{% endfor %}
{{- '[assistant]' -}}"""
TURNS = """{%- if messages[0]['role'] == 'system' -%}{{ raise_exception('no system role here') }}{%- endif -%}
{%- for m in messages -%}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('roles must alternate') }}{%- endif -%}
<turn>{{ 'model' if m.role == 'assistant' else m.role }}
{{ m.content }}</turn>
{% endfor %}<turn>model
"""
TALK = [
    {"role": "user", "content": " Hi <b> é "},
    {"role": "assistant", "content": "Yes?"},
    {"role": "user", "content": "Why?"},
]


def folder(tmp_path, template, **fields):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, **fields}))
    return tmp_path


def test_messages_between_marks(tmp_path):
    assert chat.rendered(folder(tmp_path, CHATML), TALK[:1]) == (
        "<|im_start|>user\n Hi <b> é <|im_end|>\n<|im_start|>assistant\n"
    )


def test_special_tokens_and_blocks(tmp_path):
    """Lines of blocks leave nothing behind; tokens are words or objects."""
    where = folder(tmp_path, HEADERS, bos_token={"content": "<s>", "lstrip": False}, eos_token="</s>")
    assert chat.rendered(where, TALK) == "<s>\n[user]Hi <b> é</s>[assistant]Yes?</s>[user]Why?</s>[assistant]"


def test_turns(tmp_path):
    where = folder(tmp_path, [{"name": "tools", "template": "no"}, {"name": "default", "template": TURNS}])
    assert chat.rendered(where, TALK) == (
        "<turn>user\n Hi <b> é </turn>\n<turn>model\nYes?</turn>\n<turn>user\nWhy?</turn>\n<turn>model"
    )
    for said, message in ((TALK[1:], "roles must alternate"), ([{"role": "system", "content": "x"}], "no system role")):
        with pytest.raises(ValueError, match=f"the chat template of .*: {message}"):
            chat.rendered(where, said)


def test_a_file_of_its_own_comes_first(tmp_path):
    folder(tmp_path, "no")
    text = "{% generation %}{{ messages | tojson }}{% endgeneration %}{{ strftime_now('%Y')[:2] }}"
    (tmp_path / "chat_template.jinja").write_text(text)
    assert chat.rendered(tmp_path, TALK[1:2]) == '[{"role": "assistant", "content": "Yes?"}]20'


@pytest.mark.full
@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for i in %}", "Expected an expression"),
        ("{{ messages[0].missing.more }}", "has no attribute 'missing'"),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' of 'str' object is unsafe"),
        ("{% include '/etc/passwd' %}", "no loader for this environment specified"),
        ("{{ range(10 ** 6) | length }}", "Range too big"),
        ("{{ 'x' * 10 ** 10 }}", "MemoryError"),
    ],
)
def test_invalid_and_unsafe_templates_are_rejected(tmp_path, template, message):
    with pytest.raises(ValueError, match=f"the chat template of {tmp_path}: .*{message}"):
        chat.rendered(folder(tmp_path, template), TALK)


def test_loops_end(tmp_path, monkeypatch):
    monkeypatch.setattr(chat, "SECONDS", 1)
    loops = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(ValueError, match=r"the chat template of .* takes more than 1 seconds"):
        chat.rendered(folder(tmp_path, loops), TALK)


def test_no_template_and_damaged_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="has no chat template: leave out --chat"):
        chat.rendered(tmp_path, TALK)
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    with pytest.raises(FileNotFoundError, match="has no chat template: leave out --chat"):
        chat.rendered(tmp_path, TALK)
    for text, message in (("{", "is not JSON"), ("[" * 100_000, "is not JSON"), ("[]", "expected an object in")):
        (tmp_path / "tokenizer_config.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            chat.rendered(tmp_path, TALK)
