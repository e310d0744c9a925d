"""Connections end if clients send or read too slowly, or too much."""

import socket
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.served import Served, served
from tokamake.serve import gate, uvicorn_internals

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def test_slow_clients_are_left(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uvicorn_internals, "HEAD_SECONDS", 0.3)
    monkeypatch.setattr(gate, "BODY_SECONDS", 0.3)
    assert server.send() == server.send(HEAD) == b""
    again = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\nGET /he"
    assert server.send(again).startswith(b"HTTP/1.1 200")
    late = server.send(HEAD + b"Content-Length: 9\r\n\r\n{")
    assert late.startswith(b"HTTP/1.1 408")
    assert b"the body has not come within 0.3 s" in late


@pytest.mark.parametrize(
    "parts",
    [
        (b"GET /", b"a" * 600_000),
        (HEAD, b"X: " + b"a" * 600_000),
        (HEAD, b"X: a\r\n" * 100_000),
        (HEAD, b"Transfer-Encoding: chunked\r\n\r\n", b"1;" + b"x" * 600_000),
        (HEAD, b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"X: a\r\n" * 100_000),
    ],
    ids=["target", "header", "headers", "chunk", "trailers"],
)
def test_endless_heads_are_refused(server: Served, parts: tuple[bytes, ...]) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
        try:
            for part in parts:
                client.sendall(part)
            reply = client.recv(1000)
        except ConnectionError:  # it is closed before all is sent
            reply = b""
    assert reply[:12] in (b"", b"HTTP/1.1 400")
    assert server.ask("GET", "/healthz").status == 200


def test_connections_beyond_the_limit_end(
    tiny: Path, sampled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uvicorn_internals, "HEAD_SECONDS", 60.0)
    with (
        served({"tiny": tiny}, sampled / "tokenizer", batch_size=1, max_queue=0) as running,
        ExitStack() as stack,
    ):
        for number in range(257):
            if number == 256:
                assert running.ask("GET", "/healthz").status == 200
            stack.enter_context(socket.create_connection(("127.0.0.1", running.port)))
        assert running.send() == b""


def test_a_client_that_reads_nothing_is_left(
    tiny: Path, sampled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokamake.serve.app.BODY_SECONDS", 0.0)
    aborted = threading.Event()
    lost = uvicorn_internals.BoundedProtocol.connection_lost
    monkeypatch.setattr(
        uvicorn_internals.BoundedProtocol,
        "connection_lost",
        lambda self, error: (lost(self, error), aborted.set())[0],
    )
    with (
        served({"tiny": tiny}, sampled / "tokenizer", max_seconds=1) as running,
        socket.create_connection(("127.0.0.1", running.port)) as client,
    ):
        # Replies fill the buffers of the connection, which nobody empties.
        client.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 2000)
        assert aborted.wait(30)
