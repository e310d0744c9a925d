"""An HTTP proxy that sends all requests to one server, whatever their host: names need no DNS."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import urlsplit


class Proxy:
    """State of the proxy."""

    def __init__(self, port: int) -> None:
        self.port = port
        """Port of the server, at 127.0.0.1."""
        self.address = ""
        self.status = 0
        """Status of all answers; 0: what the server answers."""
        self.requests: list[tuple[str, str]] = []
        """Target of each request, and its Proxy-Authorization."""


@contextmanager
def proxy_to(port: int) -> Iterator[Proxy]:
    """Run a proxy on a free port until the block ends."""
    proxy = Proxy(port)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"proxy": proxy}))
    server.daemon_threads = True
    proxy.address = f"127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield proxy
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    proxy: Proxy

    def log_message(self, *_: Any) -> None:
        """Write no log."""

    def _note(self) -> bool:
        """Note a request; whether the proxy refuses it."""
        self.proxy.requests.append((self.path, self.headers.get("Proxy-Authorization", "")))
        if self.proxy.status:
            self.send_error(self.proxy.status)
        return bool(self.proxy.status)

    def do_GET(self) -> None:
        if self._note():
            return
        connection = HTTPConnection("127.0.0.1", self.proxy.port)
        connection.request("GET", urlsplit(self.path).path, headers=dict(self.headers))
        answer = connection.getresponse()
        body = answer.read()
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.getheader("Content-Type", ""))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        connection.close()

    def do_CONNECT(self) -> None:
        if self._note():
            return
        self.send_response(200)
        self.end_headers()
        self.close_connection = True
        with socket.create_connection(("127.0.0.1", self.proxy.port)) as server:
            back = Thread(target=_copy, args=(server, self.connection))
            back.start()
            _copy(self.connection, server)
            back.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while block := source.recv(1 << 16):
            target.sendall(block)
        target.shutdown(socket.SHUT_WR)
