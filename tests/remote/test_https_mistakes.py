"""Addresses and servers that `https` refuses, in one line."""

import socket

import pytest

from tests.support.web_server import Server
from tokamake.errors import UserError
from tokamake.remote.download import list_files


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("/a/../../x", r"file name '127.0.0.1:\d+/a/\.\./\.\./x': a name has letters"),
        ("/%2e%2e/%2e%2e/etc/x", "file name"),
        ("/a%2f..%2f..%2fx", "file name"),
        ("/a%5cb", "file name"),
        ("/a%00b", "file name"),
        ("/a%0ab", "file name"),
        ("/a\nb", "names no file"),
        ("/a$(touch x)", "file name"),
        ("/a{b}.json", "file name"),
        (f"/{'x' * 200}", "at most 140 bytes"),
        ("/" + "x/" * 600 + "y", "file name"),
        ("/folder/", "names no file"),
    ],
)
def test_a_path_that_leaves_its_folder_or_is_no_name_is_refused(
    server: Server, path: str, fault: str
) -> None:
    with pytest.raises(UserError, match=fault) as caught:
        list_files(server.url + path)
    assert "\n" not in str(caught.value)
    assert server.requests == []


@pytest.mark.parametrize(
    ("address", "fault"),
    [
        ("https://me:secret@host/x", r"^https://\*\*\*@host/x: has a user or password"),
        ("https://secret@host/x", r"^https://\*\*\*@host/x: has a user or password"),
        ("https://host:99999/x", "port out of range"),
        ("https://host:abc/x", "port could not be cast"),
        ("https://../x", "file name"),
        ("https:///x", "names no file"),
    ],
)
def test_an_address_with_a_password_or_without_a_host_is_refused(address: str, fault: str) -> None:
    with pytest.raises(UserError, match=fault) as caught:
        list_files(address)
    assert "secret" not in str(caught.value)


def test_an_unknown_host_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        asked.append(1)
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    asked: list[int] = []
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    message = r"^https://hugingface\.co/a\.jsonl: no host has the name hugingface\.co; fix the"
    with pytest.raises(UserError, match=message):
        list_files("https://hugingface.co/a.jsonl")
    assert len(asked) == 2  # by HEAD, then by GET; no attempt is repeated
