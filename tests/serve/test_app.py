"""The whole application against requests that a program makes from its OpenAPI schema."""

import itertools

import hypothesis
import pytest

from tests.support.served import Served
from tokamake.serve.megatron_api import MegatronRequest
from tokamake.serve.openai_requests import ChatRequest, CompletionRequest


def test_pages_load_nothing_from_other_hosts(server: Served) -> None:
    page = server.ask("GET", "/").content.decode()
    assert "http" not in page.replace("http-equiv", "")
    for path in ("/docs", "/redoc"):
        assert server.ask("GET", path).status == 404


def test_all_paths_are_in_the_schema(server: Served) -> None:
    schema = server.ask("GET", "/openapi.json").json
    assert {"/api", "/v1/completions", "/v1/chat/completions", "/v1/models", "/healthz"} <= {
        *schema["paths"]
    }
    assert server.ask("GET", "/healthz").json == {"status": "ok"}


def test_an_error_of_the_server_is_json_too(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(server.server, "model", fail)
    message = server.refusal("/v1/completions", {"prompt": "a"}, status=500)
    assert message == "POST /v1/completions: the server has failed; its log says why"


_VALUES = [
    None, True, 0, -1, 1, 2**31, 2**31 + 1, 2**63, 2**64, -(2**63) - 1, 10**400, 0.5, -0.0, 1e308,
    5e-324, "", "\0", "a" * 3000, "\N{PILE OF POO}", [], [[]], [""], [0], [-1], [2**64], [[0], []],
    {}, {"": 0}, [{"role": "user", "content": ""}],
]  # fmt: skip
"""Values at bounds of types and of settings."""
_BODIES = {
    ("POST", "/v1/completions"): (CompletionRequest, {"prompt": "The", "max_tokens": 1}),
    ("POST", "/v1/chat/completions"): (
        ChatRequest,
        {"messages": [{"role": "user", "content": ""}], "max_tokens": 1},
    ),
    ("PUT", "/api"): (MegatronRequest, {"prompts": ["The"], "tokens_to_generate": 1}),
}


@pytest.mark.parametrize(("method", "path"), _BODIES)
def test_a_value_at_a_bound_is_answered_or_its_field_named(
    server: Served, method: str, path: str
) -> None:
    """Each field in turn has each value; the rest of the request is right."""
    kind, least = _BODIES[method, path]
    statuses = set()
    for field, value in itertools.product(kind.model_fields, _VALUES):
        reply = server.ask(method, path, {**least, field: value})
        assert reply.status in (200, 400, 404), (field, value, reply.content)
        statuses.add(reply.status)
        if reply.status == 400:
            assert reply.json["message"], (field, value)
    assert {200, 400} <= statuses


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[" * 100_000, b"\xff", b'{"prompt": "\\ud800"}', b'{"prompt": NaN}', b"null",
     b"7", b'{"prompt": "a", "temperature": Infinity}', b'{"prompt": "a", "max_tokens": 1e400}'],
    ids=lambda content: ascii(content[:30]),
)  # fmt: skip
def test_a_body_that_is_no_request_is_refused(server: Served, content: bytes) -> None:
    for method, path in _BODIES:
        reply = server.ask(method, path, content)
        assert reply.status == 400, reply.content
        assert reply.json["message"] == reply.json["error"]["message"]


@pytest.mark.extra("oracles", "schemathesis")
def test_no_request_makes_the_server_fail(server: Served) -> None:
    import schemathesis

    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    statuses: list[int] = []

    # Valid requests, and those that break the schema: other types, values out of range, no field.
    modes = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)
    operations = [result.ok() for result in schema.get_all_operations()]
    for operation, mode in itertools.product(operations, modes):
        if mode == schemathesis.GenerationMode.NEGATIVE and not operation.body:
            continue

        @hypothesis.settings(max_examples=15, deadline=None, derandomize=True, database=None)
        @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
        def ask(case: object) -> None:
            reply = case.call(base_url=server.url)
            statuses.append(reply.status_code)
            assert reply.status_code < 500, reply.text

        ask()
    assert {200, 400} <= {*statuses}
    assert server.ask("GET", "/healthz").status == 200
