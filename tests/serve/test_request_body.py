"""The first error of a body names the field, also one within a value."""

from typing import Any

import pytest
from pydantic import ValidationError

from tokamake.serve.openai_requests import ChatRequest
from tokamake.serve.request_body import RequestError, descriptions, of_validation

MESSAGES = 'give a list of {"role": "user", "content": "a text"}'


@pytest.mark.parametrize(
    ("changes", "field", "message"),
    [
        ({"n": 0}, "n", "0: give an integer from 1 to 128"),
        ({"stop": ["a", 1]}, "stop", "['a', 1]: give a text, or a list of at most 16"),
        ({"messages": []}, "messages", f"[]: {MESSAGES}"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", f"missing; {MESSAGES}"),
        (
            {"messages": [{"role": "user", "content": "a", "tool": 1}]},
            "messages.0.tool",
            f"unknown field; {MESSAGES}",
        ),
        # The unknown field explains the missing one.
        ({"messages": ..., "message": []}, "message", "unknown field; the fields are model"),
        ({"messages": ...}, "messages", "missing; add it"),
    ],
)
def test_a_wrong_value_is_named(changes: dict[str, Any], field: str, message: str) -> None:
    body = {"messages": [{"role": "user", "content": "a"}], **changes}
    body = {key: value for key, value in body.items() if value is not ...}
    with pytest.raises(ValidationError) as caught:
        ChatRequest.model_validate(body)
    error = of_validation(caught.value.errors(), descriptions(ChatRequest))
    assert error.field == field
    assert error.message.startswith(f"{field}: {message}")
    assert error.body["error"]["param"] == field


def test_a_body_has_the_message_for_clients_of_both_kinds() -> None:
    body = RequestError("is busy", status=503).body
    assert body["message"] == body["error"]["message"] == "is busy"
    assert body["error"]["type"] == "server_error"
    assert RequestError("wrong").body["error"]["type"] == "invalid_request_error"
