"""Requests over TLS, and addresses that are private."""

import shutil
import ssl
import subprocess
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tokamake.data.urls import pages
from tokamake.data.urls.pages import HttpAnswer, PageError, RequestLimits, request


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "5")
        self.end_headers()
        self.wfile.write(b"hello")

    def log_message(self, *_: object) -> None:
        """Write no log."""


@pytest.mark.skipif(not shutil.which("openssl"), reason="makes a certificate by openssl")
def test_a_certificate_must_be_valid_for_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ["-keyout", tmp_path / "key.pem", "-out", tmp_path / "cert.pem"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *files, *names],
        check=True,
        capture_output=True,
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    server = HTTPServer(("127.0.0.1", 0), _Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()

    def answer(host: str) -> HttpAnswer:
        limits = RequestLimits("tokamake", 100, 5, allow_private=True)
        return request(f"https://{host}:{server.server_port}/", limits, wants=lambda _: True)

    try:
        with pytest.raises(PageError, match="invalid certificate"):
            answer("localhost")
        trusting = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
        monkeypatch.setattr(pages, "_tls", lambda: trusting)
        assert answer("localhost").body == b"hello"
        with pytest.raises(PageError, match="invalid certificate"):
            answer("127.0.0.1")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize(
    ("address", "is_private"),
    [
        ("93.184.216.34", False),
        ("2606:2800:220:1::1", False),
        ("127.0.0.1", True),
        ("10.1.2.3", True),
        ("169.254.169.254", True),
        ("224.0.0.1", True),
        ("0.0.0.0", True),
        ("::1", True),
        ("fe80::1%eth0", True),
        ("fd00::1", True),
        ("::ffff:10.0.0.1", True),
        ("2002:7f00:1::", True),
        ("64:ff9b::a00:1", True),
    ],
)
def test_addresses_of_this_machine_and_of_private_networks(address: str, is_private: bool) -> None:
    assert pages._is_private(address) == is_private


def test_time_may_end_before_there_is_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    server = HTTPServer(("127.0.0.1", 0), _Handler)
    connect = pages.socket.create_connection

    def late(*place: object) -> object:
        made.expire()  # as the timer does
        return connect(*place)

    made = pages._Connection("127.0.0.1", server.server_port, timeout=5)
    made.allow_private = True
    monkeypatch.setattr(pages.socket, "create_connection", late)
    with pytest.raises(TimeoutError):
        made.connect()
    made.close()
    server.server_close()
