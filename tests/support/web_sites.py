"""A web server whose pages misbehave: for tests that fetch lists of URLs."""

import gzip
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Lock, Thread
from typing import Any

from tests.support.warc_files import TEXT

ROBOTS = """User-agent: *
Disallow: /private/
Allow: /private/open

User-agent: otherbot
Disallow: /
"""


def page(name: str) -> bytes:
    """An HTML page whose main text names it."""
    return f"<html><body><main><p>{name}. {TEXT}</p></main></body></html>".encode()


class WebSite:
    """State of the server."""

    def __init__(self) -> None:
        self.url = ""
        self.robots: str | None = ROBOTS
        self.requests: list[tuple[str, float]] = []
        """Path and time of each request."""
        self.user_agents: set[str] = set()
        self.refusals: dict[str, list[tuple[int, str]]] = {}
        """Statuses, and values of Retry-After, that a path answers with first."""
        self.pages_until_outage = -1
        """Requests of pages until the network is down; negative: it stays up."""
        self.num_lost = 0
        """Further requests that get no answer, as in a short outage."""
        self.hangs = Event()
        """Set: requests of /hang/... end; until then, they get no answer."""
        self.running = self.most_running = 0
        self.lock = Lock()

    def loses(self, path: str) -> bool:
        """Whether a request gets no answer."""
        with self.lock:
            if self.pages_until_outage == 0:
                return True
            if path != "/robots.txt":
                if self.num_lost:
                    self.num_lost -= 1
                    return True
                self.pages_until_outage -= 1
        return False

    def on(self, number: int, path: str) -> str:
        """URL of a path on one of many hosts: `serving(all_hosts=True)`."""
        return f"{self.url.replace('127.0.0.1', f'127.0.0.{number}')}{path}"

    def paths(self) -> list[str]:
        return [path for path, _ in self.requests if path != "/robots.txt"]


@contextmanager
def serving(*, all_hosts: bool = False) -> Iterator[WebSite]:
    """Run a server on a free port until the block ends; `all_hosts`: at 127.0.0.2, ..., too."""
    site = WebSite()
    handler = type("Handler", (_Handler,), {"site": site})
    server = _Server(("" if all_hosts else "127.0.0.1", 0), handler)
    server.daemon_threads = True
    site.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield site
    finally:
        site.hangs.set()
        server.shutdown()
        thread.join()
        server.server_close()


class _Server(ThreadingHTTPServer):
    request_queue_size = 128


class _Handler(BaseHTTPRequestHandler):
    site: WebSite
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Write no log."""

    def do_GET(self) -> None:
        site = self.site
        with site.lock:
            site.requests.append((self.path, time.monotonic()))
            site.user_agents.add(self.headers.get("User-Agent", ""))
            site.running += 1
            site.most_running = max(site.most_running, site.running)
        time.sleep(0.01)  # so that requests at the same time meet
        with site.lock:  # before the answer, after which a client may send the next request
            site.running -= 1
        if site.loses(self.path):
            self.close_connection = True
            return
        if self.path.startswith("/hang/"):
            site.hangs.wait(60)
        with suppress(OSError):  # a client may leave
            self._answer(self.path)

    def _answer(self, path: str) -> None:
        if refusals := self.site.refusals.get(path):
            status, wait = refusals.pop(0)
            self._send(status, b"later", **({"Retry-After": wait} if wait else {}))
        elif path == "/robots.txt":
            robots = self.site.robots
            self._send(404 if robots is None else 200, (robots or "").encode())
        elif path.startswith("/loop"):
            self._send(302, b"", Location="/loop2" if path == "/loop" else "/loop")
        elif path.startswith("/to/"):
            self._send(301, b"", Location=path.removeprefix("/to"))
        elif path == "/missing":
            self._send(404, b"none")
        elif path == "/picture":
            self._send(200, bytes(100), **{"Content-Type": "image/png"})
        elif path == "/packed":
            self._send(200, gzip.compress(page("packed")), **{"Content-Encoding": "gzip"})
        elif path == "/cut":
            self._send(200, page("cut"), **{"Content-Length": "100000"})
            self.close_connection = True
        elif path in ("/slow", "/chunked", "/endless"):
            self._send_chunks(path)
        else:
            self._send(200, page(path))

    def _send_chunks(self, path: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        parts = {"/slow": [b"a"] * 100, "/endless": [bytes(1 << 16)] * 10_000}
        for part in parts.get(path, [page(path)[:20], page(path)[20:]]):
            self.wfile.write(b"%x\r\n%b\r\n" % (len(part), part))
            time.sleep(0.2 if path == "/slow" else 0)
        self.wfile.write(b"0\r\n\r\n")

    def _send(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        stated = {"Content-Type": "text/html; charset=utf-8", "Content-Length": str(len(body))}
        for name, value in {**stated, **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)
