"""Prompts of conversations against those of transformers."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers

from tokamake.data.tokenizers import open_tokenizer
from tokamake.errors import UserError
from tokamake.inference.chat import chat_prompt

CHATML = """\
{% for message in messages %}
<|im_start|>{{ message['role'] }}
{{ message['content'] | trim }}<|im_end|>
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}"""
STRICT = """\
{{ bos_token }}{%- for message in messages -%}
{%- if message.role == 'system' and not loop.first -%}
{{ raise_exception('a system message comes first') }}
{%- endif -%}
{%- if message.role == 'tool' -%}{%- continue -%}{%- endif -%}
[{{ message.role }}] {{ message.content | tojson }}{{ eos_token }}
{%- endfor -%}"""
GENERATION = """\
{%- for m in messages -%}{%- if m['role']=='assistant' -%}
{% generation %}{{m['content']}}{% endgeneration %}{%- else -%}
<|{{m['role']}}|>{{m['content']}}
{%- endif -%}{%- endfor -%}{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"""
JSON = """\
{%- for m in messages -%}
{{ m | tojson(ensure_ascii=True, indent=1, separators=(',', ': '), sort_keys=true) }}
{{ m['content'] | tojson(ensure_ascii=False, separators=(',', ':')) }}{{ m | tojson(indent=2) }}
{%- endfor -%}"""
THINKING = """\
{%- if tools %}{{ tools | tojson }}{% endif -%}{%- if documents is none %}none{% endif -%}
{%- for m in messages %}{{ m.role }}: {{ m.content }};{% endfor -%}
{%- if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif -%}
{{ strftime_now('%Y') }}{{ pad_token is defined }}{%- if add_generation_prompt %}>{% endif -%}"""
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " what is „ü“? "},
    {"role": "tool", "content": "unused"},
]


def with_template(sampled: Path, folder: Path, template: object, name: str) -> Path:
    """The tokenizer with a template, in a file of its own or in the config."""
    shutil.copytree(sampled / "tokenizer", folder)
    if name == "chat_template.jinja":
        (folder / name).write_text(str(template))
        return folder
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    return folder


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json"])
@pytest.mark.parametrize("template", [CHATML, STRICT, GENERATION, JSON, THINKING])
def test_prompts_equal_those_of_transformers(
    sampled: Path, tmp_path: Path, template: str, name: str
) -> None:
    folder = with_template(sampled, tmp_path / "tokenizer", template, name)
    oracle = transformers.AutoTokenizer.from_pretrained(folder)
    expected = oracle.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
    assert chat_prompt(open_tokenizer(folder), TALK) == expected


def test_of_several_templates_the_default_counts(sampled: Path, tmp_path: Path) -> None:
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    folder = with_template(sampled, tmp_path / "tokenizer", several, "tokenizer_config.json")
    assert chat_prompt(open_tokenizer(folder), TALK) == "yes"


def test_refused_messages_and_broken_templates_are_explained(sampled: Path, tmp_path: Path) -> None:
    folder = with_template(sampled, tmp_path / "strict", STRICT, "chat_template.jinja")
    with pytest.raises(UserError, match="messages: the chat template refuses them: a system"):
        chat_prompt(open_tokenizer(folder), [*TALK, TALK[0]])
    folder = with_template(sampled, tmp_path / "broken", "{% if %}", "chat_template.jinja")
    with pytest.raises(UserError, match="messages: the chat template refuses them: "):
        chat_prompt(open_tokenizer(folder), TALK)
    with pytest.raises(UserError, match="chat: the tokenizer has no chat_template"):
        chat_prompt(open_tokenizer(sampled / "tokenizer"), TALK)


@pytest.mark.parametrize(
    "variables",
    [
        {"enable_thinking": False},
        {"enable_thinking": True, "tools": [{"type": "function", "function": {"name": "f"}}]},
        {"documents": [{"title": "a", "text": "b"}], "add_generation_prompt": False},
    ],
)
def test_variables_reach_the_template(
    sampled: Path, tmp_path: Path, variables: dict[str, Any]
) -> None:
    folder = with_template(sampled, tmp_path / "tokenizer", THINKING, "chat_template.jinja")
    oracle = transformers.AutoTokenizer.from_pretrained(folder)
    options = {"add_generation_prompt": True, **variables}
    expected = oracle.apply_chat_template(TALK, tokenize=False, **options)
    assert chat_prompt(open_tokenizer(folder), TALK, variables=variables) == expected


@pytest.mark.parametrize("template", [CHATML, STRICT, GENERATION])
@pytest.mark.parametrize("content", ["It is", "It is "])
def test_a_final_message_goes_on(
    sampled: Path, tmp_path: Path, template: str, content: str
) -> None:
    talk = [*TALK[:2], {"role": "assistant", "content": content}]
    folder = with_template(sampled, tmp_path / "tokenizer", template, "chat_template.jinja")
    oracle = transformers.AutoTokenizer.from_pretrained(folder)
    expected = oracle.apply_chat_template(talk, tokenize=False, continue_final_message=True)
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert chat_prompt(open_tokenizer(folder), talk, **options) == expected
