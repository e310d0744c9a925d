"""Servers of tokamake in this process, for tests."""

import http.client
import json
import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokamake.inference.layout import WHOLE_MODEL, peers
from tokamake.serve.app import HttpThread
from tokamake.serve.engine_loop import EngineLoop
from tokamake.serve.model_server import ModelServer
from tokamake.serve.options import Limits
from tokamake.serve.serve import listen, open_models, with_engines
from tokamake.serve.server_metrics import ServerMetrics

TEMPLATE = "{% for message in messages %}[{{ message.content }}]{% endfor %} def "
"""A chat template."""


@dataclass
class Reply:
    """Reply of a server."""

    status: int
    headers: dict[str, str]
    content: bytes

    @property
    def json(self) -> Any:
        """The body."""
        return json.loads(self.content)

    @property
    def events(self) -> list[Any]:
        """Parts of a streamed reply; the last one of a whole reply says that it is done."""
        lines = self.content.decode().split("\n\n")
        assert lines.pop() == ""
        assert all(line.startswith("data: ") for line in lines)
        texts = [line.removeprefix("data: ") for line in lines]
        assert texts[-1] == "[DONE]"
        return [json.loads(text) for text in texts[:-1]]


@dataclass
class Served:
    """A running server."""

    port: int
    server: ModelServer
    token: str = ""

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    def connection(self) -> http.client.HTTPConnection:
        """A new connection."""
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def ask(
        self, method: str, path: str, body: Any = None, *, headers: dict[str, str] | None = None
    ) -> Reply:
        """Send a request; a body that is no bytes becomes JSON."""
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        sent = {"Content-Type": "application/json"} if body is not None else {}
        if self.token:
            sent["Authorization"] = f"Bearer {self.token}"
        connection = self.connection()
        try:
            connection.request(method, path, content, sent | (headers or {}))
            reply = connection.getresponse()
            return Reply(reply.status, dict(reply.getheaders()), reply.read())
        finally:
            connection.close()

    def send(self, *parts: bytes) -> bytes:
        """What the server sends until it closes the connection."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=30) as client:
            for part in parts:
                client.sendall(part)
            return b"".join(iter(lambda: client.recv(65536), b""))

    def complete(self, **body: Any) -> Any:
        """Reply of `/v1/completions`, which must succeed."""
        reply = self.ask("POST", "/v1/completions", body)
        assert reply.status == 200, reply.content
        return reply.json

    def refusal(self, path: str, body: Any, *, method: str = "POST", status: int = 400) -> str:
        """Message with which a request is refused."""
        reply = self.ask(method, path, body)
        assert reply.status == status, reply.content
        assert reply.json["message"] == reply.json["error"]["message"]
        return reply.json["message"]


@contextmanager
def served(
    folders: dict[str, Path], tokenizer: Path, *, token: str = "", **limits: Any
) -> Iterator[Served]:
    """A server of models, until the block ends."""
    checked = Limits(**{"batch_size": 4, "grace_seconds": 5, **limits})
    checked.check()
    with peers() as ranks, listen("127.0.0.1", 0) as listener:
        opened = open_models(folders, WHOLE_MODEL, tokenizer=tokenizer, limits=checked, ranks=ranks)
        metrics = ServerMetrics()
        models = with_engines(opened, checked)
        loop = EngineLoop([model.engine for model in models], metrics)
        server = ModelServer(models, loop, checked, metrics)
        http_thread = HttpThread(server, listener, host="127.0.0.1", token=token)
        engine_thread = threading.Thread(target=loop.run)
        engine_thread.start()
        http_thread.start()
        running = Served(listener.getsockname()[1], server, token)
        try:
            yield running
        finally:
            http_thread.end()
            engine_thread.join()


def with_template(tokenizer: Path, folder: Path) -> Path:
    """A copy of a tokenizer with a chat template."""
    shutil.copytree(tokenizer, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder
