"""Bad requests to `/v1` are refused with the name of the field."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tests.support.served import Served, served
from tokamake.serve.openai_requests import CompletionRequest

BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "prompt: missing; add it"),
    ({"prompt": "a", "stream_options": {"usage": True}}, "stream_options.usage: unknown field; "),
    ({"prompt": "a", "stop": ["a", 1]}, "stop: ['a', 1]: give a text, or a list of at most 16"),
    ({"promt": "a"}, "promt: unknown field; the fields are model, temperature"),
    ({"prompt": "a", "temprature": 1}, "temprature: unknown field; the fields are model, tempera"),
    ({"prompt": "a", "temperature": -1}, "temperature: -1: give a number from 0 to 100"),
    ({"prompt": "a", "temperature": "1"}, "temperature: '1': give a number from 0 to 100"),
    ({"prompt": "a", "top_p": 0}, "top_p: 0: give a number above 0, at most 1"),
    ({"prompt": "a", "top_k": 2.5}, "top_k: 2.5: give an integer: 0 or -1 for all tokens"),
    ({"prompt": "a", "n": 0}, "n: 0: give an integer from 1 to 128"),
    ({"prompt": "a", "n": True}, "n: True: give an integer from 1 to 128"),
    ({"prompt": "a", "max_tokens": -1}, "max_tokens: -1: give an integer from 0 to 2^31"),
    (
        {"prompt": "a", "max_tokens": 2**31 + 1},
        "max_tokens: 2147483649: give an integer from 0 to 2^31",
    ),
    ({"prompt": "a", "x" * 100_000: 1}, f"{'x' * 57}...: unknown field; the fields are"),
    ({"prompt": "a", "logprobs": 21}, "logprobs: 21: give an integer from 0 to 20"),
    ({"prompt": "a", "stop": "a" * 1001}, "stop: 'aaa"),
    ({"prompt": "a", "stop": ""}, "stop: '': give a text, or a list of at most 16"),
    ({"prompt": "a", "seed": 1.5}, "seed: 1.5: give an integer"),
    ({"prompt": "a", "suffix": "b"}, "suffix: 'b': give nothing: the model only continues"),
    ({"prompt": "a", "best_of": 2}, "best_of: 2: give the value of n, or nothing"),
    ({"prompt": "a", "top_k": -2}, "top_k: -2: give an integer: 0 or -1 for all tokens"),
    ({"prompt": "a", "presence_penalty": 3}, "presence_penalty: 3: give a number from -2 to 2"),
    ({"prompt": "a", "logit_bias": {"a": 1}}, "logit_bias"),
    ({"prompt": "a", "logit_bias": {"400": 1}}, "logit_bias: token 400: not in the vocabulary"),
    ({"prompt": "a", "min_tokens": 17}, "min_tokens: 17: more than the most new tokens, 16"),
    ({"prompt": "a", "response_format": {"type": "json_object"}}, "response_format.type: 'json_ob"),
    ({"prompt": "a", "use_beam_search": True}, "use_beam_search: True: give false or nothing"),
    ({"prompt": "a" * 100_000}, "prompt: 100000 bytes, but the model sees only 64 tokens of"),
    ({"prompt": "a", "stream_options": 1}, "stream_options: 1: give an object such as"),
    ({"prompt": []}, "prompt: []: give a text, token ids, or a list of these that is not empty"),
    ({"prompt": [[]]}, "prompt: holds no token; give at least one"),
    ({"prompt": [400]}, "prompt: token 400: not in the vocabulary; give 0 to 399"),
    ({"prompt": [-1]}, "prompt: [-1]: give a text, token ids"),
    ({"prompt": {"a": 1}}, "prompt: {'a': 1}: give a text, token ids"),
    ({"prompt": "\ud800"}, "prompt: "),
    ({"prompt": [1] * 65}, "prompt: 65 tokens, but the model sees only 64; shorten it"),
]


@pytest.mark.parametrize(("body", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_requests_name_the_field(server: Served, body: dict[str, Any], message: str) -> None:
    assert server.refusal("/v1/completions", body).startswith(message)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "the body is not JSON: "),
        (b"{", "the body is not JSON: "),
        (b"[1]", "the body is not a JSON object"),
        (b'{"prompt": "a", "temperature": NaN}', "temperature: nan: give a number"),
        (b"\xff", "the body is not JSON: "),
        (b"[" * 100_000, "the body is not JSON: "),
    ],
    ids=["digits", "broken", "list", "NaN", "not UTF-8", "deep"],
)
def test_bodies_that_are_no_objects_are_refused(server: Served, body: bytes, message: str) -> None:
    assert server.refusal("/v1/completions", body).startswith(message)


@pytest.mark.parametrize(
    ("message", "start"),
    [
        ({"role": "user"}, "messages.0.content: missing; give a list of"),
        (
            {"role": "user", "content": "a", "tool_calls": []},
            "messages.0.tool_calls: unknown field",
        ),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": "a"}]},
            "messages.0.content: [{'type': 'image_url'",
        ),
    ],
)
def test_a_wrong_value_within_a_field_is_named(
    server: Served, message: dict[str, Any], start: str
) -> None:
    body = {"messages": [message]}
    assert server.refusal("/v1/chat/completions", body).startswith(start)


def test_a_large_wrong_prompt_is_refused_at_its_first_error() -> None:
    """An error for each of its lists would hold the HTTP thread for seconds."""
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate({"prompt": [["a"]] * 100_000})
    assert caught.value.error_count() < 10


def test_bad_conversations_are_refused(server: Served) -> None:
    path, user = "/v1/chat/completions", {"role": "user", "content": "a"}
    assert "messages: []: give a list" in server.refusal(path, {"messages": []})
    message = server.refusal(path, {"messages": [{**user, "content": 1}]})
    assert message.startswith("messages.0.content: 1: give a list")
    message = server.refusal(path, {"messages": [user], "top_logprobs": 1})
    assert message == "top_logprobs: set logprobs to true, too"
    message = server.refusal(path, {"messages": [user], "stream_options": {}})
    assert message == "stream_options: set stream to true, too"


def test_an_unknown_model_is_named(server: Served) -> None:
    body = {"prompt": "a", "model": "other"}
    message = server.refusal("/v1/completions", body, status=404)
    assert message == "model: 'other': not served here; give one of tiny"
    assert server.ask("GET", "/v1/models/other").status == 404
    assert server.ask("GET", "/v1/models/tiny").json["id"] == "tiny"
    (model,) = server.ask("GET", "/v1/models").json["data"]
    assert (model["id"], model["has_chat_template"]) == ("tiny", True)


def test_without_a_template_there_is_no_chat(tiny: Path, sampled: Path) -> None:
    with served({"tiny": tiny}, sampled / "tokenizer") as plain:
        body = {"messages": [{"role": "user", "content": "a"}]}
        message = plain.refusal("/v1/chat/completions", body)
        assert message.startswith("messages: chat: the tokenizer has no chat_template")
