"""Each request has its token, a body of bounded size, and is counted."""

import http.client
import socket
from pathlib import Path

import pytest

from tests.support.served import Served, served


@pytest.fixture(scope="module")
def guarded(tiny: Path, sampled: Path):
    """A server with a token, for small bodies."""
    with served({"tiny": tiny}, sampled / "tokenizer", token="secret", max_body=200) as running:
        yield running


def test_only_the_page_and_the_health_check_need_no_token(guarded: Served) -> None:
    for value in ("", "Bearer", "Bearer other", "bearer secret", "secret"):
        for method, path in (
            ("GET", "/v1/models"),
            ("GET", "/metrics"),
            ("POST", "/v1/completions"),
            ("PUT", "/api"),
            ("GET", "/unknown"),
        ):
            reply = guarded.ask(method, path, headers={"Authorization": value})
            assert reply.status == 401, path
            assert reply.headers["www-authenticate"] == "Bearer"
            assert reply.json["error"]["code"] == "invalid_api_key"
    assert guarded.ask("GET", "/v1/models").status == 200
    for path in ("/", "/healthz"):
        assert guarded.ask("GET", path, headers={"Authorization": ""}).status == 200


@pytest.mark.parametrize("is_chunked", [False, True])
def test_a_large_body_is_refused(guarded: Served, *, is_chunked: bool) -> None:
    body = b'{"prompt": "' + b"a" * 200 + b'"}'
    connection = guarded.connection()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer secret"}
    connection.request(
        "POST",
        "/v1/completions",
        iter([body[:50], body[50:]]) if is_chunked else body,
        headers,
        encode_chunked=is_chunked,
    )
    reply = connection.getresponse()
    assert reply.status == 413
    assert b"the body has more than 200 bytes" in reply.read()
    connection.close()
    small = {"prompt": "a", "max_tokens": 1}
    assert guarded.ask("POST", "/v1/completions", small).status == 200


def test_a_client_that_leaves_within_its_body_does_no_harm(guarded: Served) -> None:
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        "Authorization: Bearer secret\r\nContent-Length: 100\r\n\r\n{"
    )
    with socket.create_connection(("127.0.0.1", guarded.port)) as client:
        client.sendall(head.encode())
    assert guarded.ask("GET", "/healthz").status == 200


def test_requests_and_tokens_are_counted(tiny: Path, sampled: Path) -> None:
    with served({"tiny": tiny}, sampled / "tokenizer") as running:
        running.complete(prompt=[[5, 6, 7], [8]], max_tokens=4, top_k=1, seed=1)
        running.refusal("/v1/completions", {})
        running.ask("GET", "/nowhere")
        text = running.ask("GET", "/metrics").content.decode()
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    ok = 'tokamake_requests_total{method="POST",path="/v1/completions",status="200"}'
    assert lines[ok] == lines[ok.replace("200", "400")] == "1.0"
    assert lines['tokamake_requests_total{method="GET",path="other",status="404"}'] == "1.0"
    assert lines["tokamake_prompt_tokens_total"] == "4.0"
    new = float(lines["tokamake_new_tokens_total"])
    assert 0 < new <= 8
    first = float(lines["tokamake_time_to_first_token_seconds_count"])
    assert first + float(lines["tokamake_time_between_tokens_seconds_count"]) == new
    assert lines["tokamake_sequences"] == "0.0"


def test_a_request_that_is_not_http_does_no_harm(guarded: Served) -> None:
    with socket.create_connection(("127.0.0.1", guarded.port)) as client:
        client.sendall(b"\x16\x03\x01 not HTTP\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 400")
    with pytest.raises(http.client.HTTPException):
        connection = guarded.connection()
        connection.putrequest("GET", "/v1/\x00")
