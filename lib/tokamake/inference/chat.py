"""Prompts of conversations: messages in the chat template of a tokenizer.

Templates are Jinja, with the functions and tags that transformers 5.23 gives them.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tokamake.data.tokenizers import Tokenizer
from tokamake.errors import UserError


def chat_prompt(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The text that the model continues as the assistant; the oldest message comes first.

    `variables`: further variables of the template, such as enable_thinking or tools.
    """
    if not tokenizer.chat_template:
        raise UserError(
            "chat: the tokenizer has no chat_template; continue plain text, or give the tokenizer "
            "of a chat model"
        )
    if continue_final_message:
        *before, final = messages
        messages = [*before, {**final, "content": final["content"] + _END}]
    given: dict[str, Any] = {key: text for key, text in tokenizer.special_texts.items() if text}
    given |= {"tools": None, "documents": None, "add_generation_prompt": add_generation_prompt}
    try:
        text = _compiled(tokenizer.chat_template).render(
            given | {**(variables or {}), "messages": messages}
        )
        if not continue_final_message:
            return text
        place = text.rindex(_END.strip())
        # A template that trims messages removes the space after the mark, too.
        return text[:place] if text.startswith(_END, place) else text[:place].rstrip()
    except Exception as error:  # templates are programs: any error can come
        reason = getattr(error, "message", None) or error
        raise UserError(f"messages: the chat template refuses them: {reason}") from None


_END = "<end of the final message> "


@cache
def _compiled(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _TrainedParts]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda text: datetime.now().strftime(text)
    return environment.from_string(template)


class _TrainedParts(Extension):
    """The tags `generation` and `endgeneration`: training masks the text outside of them."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[Node]:
        """The statements between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
