"""A local web server with files, and with the part of the Hugging Face Hub's API that serves them.

It can cut connections, ask to come later, state wrong lengths and ignore ranges.
"""

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass
class Server:
    """What a server holds, how it fails, and what it was asked."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    """Content of each file, by its path on the server."""
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Files of each repository: datasets/ORG/NAME or models/ORG/NAME."""
    earlier: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Files of earlier commits."""
    large: set[str] = field(default_factory=set)
    """Paths in repositories of files in Git LFS; the others are plain git blobs."""
    private: set[str] = field(default_factory=set)
    """Repositories that need a token."""
    cuts: list[int] = field(default_factory=list)
    """Bytes after which each of the next answers with content is cut."""
    refusals: list[int] = field(default_factory=list)
    """Status of each of the next answers to requests of content, such as 429."""
    stated: list[dict[str, str]] = field(default_factory=list)
    """Headers of each of the next answers with content, in place of true ones; empty: none."""
    answers: dict[str, Any] = field(default_factory=dict)
    """JSON that the API answers in place of the true one, by the path."""
    bodies: dict[str, tuple[dict[str, str], Iterable[bytes]]] = field(default_factory=dict)
    """Headers and parts of a body of any length, in place of the answer, by the path."""
    ignores_ranges: bool = False
    states_length: bool = True
    has_etags: bool = True
    corrupts: bool = False
    """Send other bytes than those whose hash is listed."""
    extra_bytes: int = 0
    """Bytes that files have beyond those listed, under the same version."""
    redirects: dict[str, str] = field(default_factory=dict)
    """Address of another server that has the content of a path."""
    requests: list[str] = field(default_factory=list)
    """Method, path and range of each request."""
    with_token: list[str] = field(default_factory=list)
    """Paths of the requests that had a token."""
    lock: Any = field(default_factory=Lock)

    def commit(self, repository: str) -> str:
        """Commit of a repository: another one for other files."""
        content = sorted(self.repositories[repository].items())
        return hashlib.sha1(repr(content).encode()).hexdigest()

    def move_on(self, repository: str, changes: dict[str, bytes]) -> str:
        """Change files of a repository in a new commit, and return it; the earlier one stays."""
        self.earlier[self.commit(repository)] = dict(self.repositories[repository])
        self.repositories[repository] |= changes
        return self.commit(repository)

    def downloads(self) -> list[str]:
        """Requests of content."""
        return [request for request in self.requests if request.startswith("GET /")]


@contextmanager
def serving() -> Iterator[Server]:
    """Run a server on a free port until the block ends."""
    state = Server()
    handler = type("Handler", (_Handler,), {"state": state})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


_REFS = ("main", "refs/convert/parquet")
"""Names of revisions that each repository has."""


class _Handler(BaseHTTPRequestHandler):
    state: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Write no log."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        """Make a repository, say how files are uploaded, or commit them."""
        path = urlsplit(self.path).path
        body = self._body()
        with self.state.lock:
            self.state.requests.append(f"POST {path}")
        if not self.headers.get("Authorization"):
            self._send(401)
        elif path == "/api/repos/create":
            asked = json.loads(body)
            name = "/".join(filter(None, (asked.get("organization"), asked["name"])))
            is_new = f"models/{name}" not in self.state.repositories
            self.state.repositories.setdefault(f"models/{name}", {})
            is_private = asked.get("private") or asked.get("visibility") == "private"
            if is_private and is_new:
                self.state.private.add(f"models/{name}")
            self._send_json({"url": f"{self.state.url}/{name}"}, status=200 if is_new else 409)
        elif path == "/api/validate-yaml":  # of a model card
            self._send_json({"errors": [], "warnings": []})
        elif match := re.fullmatch(r"/api/(models/[^/]+/[^/]+)/preupload/main", path):
            files = [file["path"] for file in json.loads(body)["files"]]
            modes = {"uploadMode": "regular", "shouldIgnore": False}
            self._send_json({"files": [{"path": file, **modes} for file in files]})
        elif match := re.fullmatch(r"/api/(models/[^/]+/[^/]+)/commit/main", path):
            files = self.state.repositories[match[1]]
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            commit = self.state.commit(match[1])
            url = f"{self.state.url}/{match[1].removeprefix('models/')}/commit/{commit}"
            self._send_json({"commitUrl": url, "commitOid": commit, "success": True})
        else:
            self._send(404)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _answer(self) -> None:
        quoted = urlsplit(self.path).path  # a revision with slashes is one part of it
        path = unquote(quoted)
        wanted = self.headers.get("Range", "")
        with self.state.lock:
            self.state.requests.append(f"{self.command} {path} {wanted}".strip())
            if self.headers.get("Authorization"):
                self.state.with_token.append(path)
        if path in self.state.redirects:
            self._send(302, {"Location": self.state.redirects[path]})
            return
        if path in self.state.bodies:
            self._send_parts(*self.state.bodies[path])
        elif path in self.state.answers:
            self._send_json(self.state.answers[path])
        elif api := re.fullmatch(
            r"/api/(datasets|models)/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+)(/.*)?)?", quoted
        ):
            self._answer_api(*(unquote(part or "") for part in api.groups()))
        elif hub := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", quoted):
            self._answer_hub(*(unquote(part or "") for part in hub.groups()))
        elif path in self.state.files:
            self._send_file(self.state.files[path], etag=None)
        else:
            self._send(404)

    def _answer_api(self, kind: str, name: str, what: str, revision: str, folder: str) -> None:
        repository = f"{kind}/{name}"
        if not self._check(repository, revision or "main"):
            return
        earlier = revision in self.state.earlier
        commit = revision if earlier else self.state.commit(repository)
        if what != "tree":
            self._send_json({"_id": "1", "id": name, "sha": commit, "private": False, "tags": []})
            return
        self._send_json(self._tree(self._files(repository, commit), folder.strip("/")))

    def _files(self, repository: str, revision: str) -> dict[str, bytes]:
        return self.state.earlier.get(revision) or self.state.repositories[repository]

    def _tree(self, files: dict[str, bytes], folder: str) -> list[dict[str, Any]]:
        """Files below a folder; if the request is not recursive, its files and folders."""
        is_recursive = "recursive=true" in urlsplit(self.path).query.lower()
        entries: dict[str, dict[str, Any]] = {}
        for path, content in files.items():
            inside = path.removeprefix(f"{folder}/" if folder else "")
            if folder and inside == path:
                continue
            child, slash, _ = inside.partition("/")
            if slash and not is_recursive:
                child = f"{folder}/{child}".lstrip("/")
                entries[child] = {"type": "directory", "path": child, "oid": git_hash(b"")}
                continue
            entry = {"type": "file", "path": path, "size": len(content), "oid": git_hash(content)}
            if path in self.state.large:
                sha256 = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"oid": sha256, "size": len(content), "pointerSize": 130}
            entries[path] = entry
        return list(entries.values())

    def _answer_hub(self, dataset: str, name: str, revision: str, path: str) -> None:
        repository = f"{'datasets' if dataset else 'models'}/{name}"
        if not self._check(repository, revision):
            return
        content = self._files(repository, revision).get(path)
        if content is None:
            self._send(404, {"X-Error-Code": "EntryNotFound"})
            return
        hashed = hashlib.sha256(content).hexdigest()
        etag = hashed if path in self.state.large else git_hash(content)
        commit = revision if revision in self.state.earlier else self.state.commit(repository)
        self._send_file(content, etag=etag, commit=commit)

    def _check(self, repository: str, revision: str) -> bool:
        if repository not in self.state.repositories:
            self._send(404, {"X-Error-Code": "RepoNotFound"})
        elif repository in self.state.private and not self.headers.get("Authorization"):
            self._send(401, {"X-Error-Code": "GatedRepo"})
        elif revision not in (*_REFS, self.state.commit(repository), *self.state.earlier):
            self._send(404, {"X-Error-Code": "RevisionNotFound"})
        else:
            return True
        return False

    def _send_file(self, content: bytes, *, etag: str | None, commit: str = "") -> None:
        status, start, headers = 200, 0, {"ETag": f'"{etag or hashlib.md5(content).hexdigest()}"'}
        if commit:
            headers["X-Repo-Commit"] = commit
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        content += bytes(self.state.extra_bytes)
        if not self.state.has_etags:
            headers = {"X-File": "yes"}
        if self.command == "GET":
            with self.state.lock:
                refusal = self.state.refusals.pop(0) if self.state.refusals else 0
            if refusal:
                self._send(refusal, {"Retry-After": "0"})
                return
        end = len(content)
        if wanted and not self.state.ignores_ranges:
            start, end = int(wanted[1]), int(wanted[2] or end - 1) + 1
            status, headers["Content-Range"] = 206, f"bytes {start}-{end - 1}/{len(content)}"
        if self.command == "GET" and self.state.stated:
            headers |= self.state.stated.pop(0)
        body = content[start:end]
        if self.state.corrupts:
            body = body[::-1]
        self._send(status, headers, body)

    def _send_parts(self, headers: dict[str, str], parts: Iterable[bytes]) -> None:
        self.close_connection = True
        self.send_response(200)
        for name, value in {"Connection": "close", **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        with suppress(OSError):  # a client leaves an endless answer
            for part in parts:
                self.wfile.write(part)

    def _send_json(self, value: Any, status: int = 200) -> None:
        self._send(status, {"Content-Type": "application/json"}, json.dumps(value).encode())

    def _send(self, status: int, headers: dict[str, str] | None = None, body: bytes = b"") -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            if value:
                self.send_header(name, value)
        is_file = bool({"ETag", "X-File"} & set(headers or {}))
        if self.state.states_length or not is_file:
            self.send_header("Content-Length", str(len(body)))
        else:
            self.send_header("Connection", "close")
            self.close_connection = True
        self.end_headers()
        if self.command == "HEAD":
            return
        if is_file and self.state.cuts:
            with self.state.lock:
                body = body[: self.state.cuts.pop(0)]
            self.close_connection = True
        with suppress(ConnectionError):  # a client may leave before it has all
            self.wfile.write(body)


def git_hash(content: bytes) -> str:
    """Hash of a blob as git names it."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
