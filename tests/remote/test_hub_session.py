"""A hostile mirror of the Hub neither fills memory nor keeps a job waiting."""

import gzip
import json
from collections.abc import Iterable, Iterator
from itertools import repeat
from threading import Event

import pytest
from huggingface_hub import get_session

from tests.support.web_server import Server, git_hash, serving
from tokamake.errors import UserError
from tokamake.remote import hub
from tokamake.remote.download import list_files

NAME = "hf://datasets/org/texts"


@pytest.fixture
def tree(server: Server, monkeypatch: pytest.MonkeyPatch) -> str:
    """Path of the listing of a repository."""
    monkeypatch.setattr(hub, "_MAX_ANSWER_BYTES", 1 << 20)
    server.repositories["datasets/org/texts"] = {"a.jsonl": b"{}"}
    return f"/api/datasets/org/texts/tree/{server.commit('datasets/org/texts')}"


def page(*names: str) -> bytes:
    entries = [{"type": "file", "path": n, "size": 2, "oid": git_hash(b"{}")} for n in names]
    return json.dumps(entries).encode()


@pytest.mark.parametrize(
    ("headers", "parts", "message"),
    [
        ({}, repeat(b" " * 65536), "an answer of more than 1 MiB"),
        ({"Content-Encoding": "gzip"}, [gzip.compress(page("a.jsonl"))], "answer is compressed"),
    ],
)
def test_an_answer_without_bounds_is_refused(
    server: Server, tree: str, headers: dict[str, str], parts: Iterable[bytes], message: str
) -> None:
    server.bodies[tree] = headers, parts
    with pytest.raises(UserError, match=f"^{NAME}: .*{message}.*; check HF_ENDPOINT$"):
        list_files(NAME)


@pytest.mark.parametrize(
    ("names", "message"), [((), "no end of its listing"), (("a.jsonl",), "lists 'a.jsonl' twice")]
)
def test_pages_that_lead_to_themselves_end(
    server: Server, tree: str, names: tuple[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "_MAX_ANSWERS", 20)
    link = {"Link": f'<{server.url}{tree}>; rel="next"'}
    server.bodies[tree] = link, [page(*names)]
    with pytest.raises(UserError, match=f"^{NAME}: {message}.*; check HF_ENDPOINT$"):
        list_files(NAME)
    assert len(server.requests) <= 22


def test_the_token_goes_to_no_other_host(
    server: Server, tree: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    with serving() as other:
        server.bodies[tree] = {"Link": f'<{other.url}{tree}>; rel="next"'}, [page("a.jsonl")]
        with pytest.raises(UserError, match=r"listing continues at another host, 127\.0\.0\.1"):
            list_files(NAME)
        assert server.with_token
        assert not other.requests


def test_a_mirror_that_never_answers_ends_in_one_line(
    server: Server, tree: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub, "_TIMEOUT", 0.05)
    monkeypatch.setattr("time.sleep", lambda _: None)  # between attempts
    left = Event()

    class Silence:
        """Body without a byte until the client has left."""

        def __iter__(self) -> Iterator[bytes]:
            left.wait()
            return iter(())

    server.bodies[tree] = {}, Silence()
    try:
        with pytest.raises(UserError, match=f"^{NAME}: .*; check the network and rerun$"):
            list_files(NAME)
    finally:
        left.set()


def test_the_session_is_as_before_afterwards(server: Server, tree: str) -> None:
    before = get_session().event_hooks
    assert [file.size for file in list_files(NAME)] == [2]
    assert get_session().event_hooks == before
    assert get_session().timeout.read is None
