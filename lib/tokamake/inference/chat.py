"""Prompts of conversations: messages in the chat template of a tokenizer.

Templates are Jinja, with the functions that transformers gives them.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tokamake.data.tokenizers import Tokenizer
from tokamake.errors import UserError


def chat_prompt(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
) -> str:
    """The text that the model continues as the assistant.

    Args:
        tokenizer: a tokenizer with a chat template.
        messages: `role` and `content` of each, the oldest one first.
        add_generation_prompt: whether the text ends where the answer of the assistant begins.

    Raises:
        UserError: there is no template, or it refuses the messages.
    """
    if not tokenizer.chat_template:
        raise UserError(
            "chat: the tokenizer has no chat_template; continue plain text, or give the tokenizer "
            "of a chat model"
        )
    try:
        return _compiled(tokenizer.chat_template).render(
            messages=messages,
            add_generation_prompt=add_generation_prompt,
            **tokenizer.special_texts,
        )
    except Exception as error:  # templates are programs: any error can come
        reason = getattr(error, "message", None) or error
        raise UserError(f"messages: the chat template refuses them: {reason}") from None


@cache
def _compiled(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda text: datetime.now().strftime(text)
    return environment.from_string(template)


def _tojson(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
