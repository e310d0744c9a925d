"""Each request has its token, a body of bounded size, and is counted."""

import http.client
import socket
from pathlib import Path

import pytest

from tests.support.served import Served, served
from tokamake.serve import gate


@pytest.fixture(scope="module")
def guarded(tiny: Path, sampled: Path):
    """A server with a token, for small bodies."""
    with served({"tiny": tiny}, sampled / "tokenizer", token="secret", max_body=200) as running:
        yield running


def test_only_the_page_and_the_health_check_need_no_token(guarded: Served) -> None:
    for value in ("", "Bearer", "Bearer other", "Basic secret", "secret"):
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
    headers = {"Authorization": "bearer secret"}  # names of schemes ignore case
    assert guarded.ask("GET", "/v1/models", headers=headers).status == 200
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


OPEN = (
    ("GET", "/"), ("GET", "/healthz"), ("GET", "/metrics"), ("GET", "/v1/models"),
    ("POST", "/v1/completions"), ("PUT", "/api"), ("OPTIONS", "/v1/completions"), ("GET", "/none"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("headers", "is_own"),
    [
        ("Host: localhost", True),
        ("Host: LOCALHOST:5000", True),
        ("Host: 127.0.0.1:80", True),
        ("Host: 127.1.2.3", True),
        ("Host: [::1]:5000", True),
        ("Host: localhost:5000\r\nOrigin: http://Localhost:5000", True),
        ("Host: [::1]:5000\r\nOrigin: http://[::1]:5000", True),
        ("Host: evil.example", False),
        ("Host: localhost.evil.example", False),
        ("Host: evil.example:5000\r\nOrigin: http://evil.example:5000", False),
        ("Host: 127.0.0.1.evil.example", False),
        ("Host: localhost@evil.example", False),
        ("Host: localhost:5000/evil.example", False),
        ("Host: 10.1.2.3", False),
        ("Host: [::2]", False),
        ("Host: ::1", False),
        ("Host:", False),
        ("Host: localhost\r\nHost: evil.example", False),
        ("Host: localhost\r\nHost: localhost", False),
        ("X: missing", False),
        ("Host: localhost:5000\r\nOrigin: null", False),
        ("Host: localhost:5000\r\nOrigin: http://localhost:3000", False),
        ("Host: localhost:5000\r\nOrigin: http://localhost:5000.evil.example", False),
        ("Host: localhost\r\nOrigin: http://localhost\r\nOrigin: https://evil.example", False),
        ("Host: localhost\r\nOrigin: http://evil.example\r\n"
         "Access-Control-Request-Method: POST", False),
    ],
)  # fmt: skip
def test_pages_of_other_sites_are_refused(server: Served, headers: str, *, is_own: bool) -> None:
    for method, path in OPEN:
        lines = f"{method} {path} HTTP/1.1\r\n{headers}\r\nConnection: close\r\n\r\n"
        reply = server.send(lines.encode())
        assert reply.startswith(b"HTTP/1.1 403") != is_own, (path, reply)
        assert b"access-control-allow" not in reply.lower()
    refusal = reply.partition(b"\r\n\r\n")[2]
    assert is_own or b"start it with --token-file" in refusal


END = "Connection: close\r\n\r\n"


def test_the_host_in_an_absolute_target_counts(server: Served) -> None:
    for target in ("http://evil.example/v1/models", "//evil.example/v1/models"):
        reply = server.send(f"GET {target} HTTP/1.1\r\nHost: localhost\r\n{END}".encode())
        assert reply[:12] in (b"HTTP/1.1 403", b"HTTP/1.1 404")


@pytest.mark.parametrize(
    ("own", "name", "is_own"),
    [
        ({"0.0.0.0", "node7.site"}, "10.1.2.3:5000", True),
        ({"0.0.0.0", "node7.site"}, "node7.site:5000", True),
        ({"0.0.0.0", "node7.site"}, "evil.example:5000", False),
        ({"::"}, "[fe80::1]", True),
        ({"node7.site", "10.1.2.3"}, "node7.site", True),
        ({"node7.site", "10.1.2.3"}, "10.1.2.3:1", True),
        ({"node7.site", "10.1.2.3"}, "10.1.2.4", False),
        ({"node7.site", "10.1.2.3"}, "localhost", True),
    ],
)
def test_a_server_has_the_names_that_the_user_gave(
    own: set[str], name: str, *, is_own: bool
) -> None:
    assert gate.is_own(name, own) == is_own
