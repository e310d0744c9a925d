"""A file at a web address arrives whole, whatever the server and the network do."""

import hashlib
import os
import shutil
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.web_server import Server, serving
from tokamake.errors import UserError
from tokamake.remote import https
from tokamake.remote.addresses import RemoteFile, cache_folder
from tokamake.remote.download import download, list_files
from tokamake.remote.download_lock import claim

CONTENT = bytes(range(256)) * 4000


def listed(server: Server, name: str = "/raw/a b.jsonl") -> RemoteFile:
    server.files[name] = CONTENT
    (file,) = list_files(server.url + name.replace(" ", "%20"))
    return file


def test_a_file_is_listed_without_its_content(server: Server) -> None:
    file = listed(server)
    assert (file.size, file.version) == (len(CONTENT), f'etag:"{hashlib.md5(CONTENT).hexdigest()}"')
    host = server.url.removeprefix("http://")
    assert Path(file.path).parts[:4] == ("results", "raw", "https", host)
    assert Path(file.path).name == "a b.jsonl"
    assert server.requests == ["HEAD /raw/a b.jsonl"]


def test_a_server_without_lengths_is_asked_for_a_byte(server: Server) -> None:
    server.states_length = False
    assert listed(server).size == len(CONTENT)
    server.ignores_ranges = True
    with pytest.raises(UserError, match="does not state its size; download it by hand"):
        listed(server)


def test_a_download_is_a_link_to_the_cache_and_is_not_repeated(
    server: Server, tmp_path: Path
) -> None:
    file = listed(server)
    download(file)
    download(file)
    assert len(server.downloads()) == 1
    assert Path(file.path).read_bytes() == CONTENT
    assert Path(file.path).readlink().is_relative_to(tmp_path / "cache")
    Path(file.path).unlink()
    download(file)  # another workspace
    assert len(server.downloads()) == 1
    assert Path(file.path).read_bytes() == CONTENT


def test_a_cut_download_continues_where_it_was_cut(server: Server) -> None:
    file = listed(server)
    server.cuts = [1000, 50_000, 0, 7]
    download(file)
    assert Path(file.path).read_bytes() == CONTENT
    ranges = [request.rpartition(" ")[2] for request in server.downloads()]
    assert ranges[1:] == ["bytes=1000-", "bytes=51000-", "bytes=51000-", "bytes=51007-"]


def test_an_interrupted_process_leaves_what_the_next_one_continues(server: Server) -> None:
    file = listed(server)
    server.cuts = [1000] + [0] * 6
    with pytest.raises(UserError, match=r"6 times in a row; the received part is kept: run again"):
        download(file)
    assert not Path(file.path).exists()
    download(file)
    assert server.downloads()[-1].endswith("bytes=1000-")
    assert Path(file.path).read_bytes() == CONTENT


def test_a_server_that_ignores_ranges_sends_the_whole_again(server: Server) -> None:
    file = listed(server)
    server.ignores_ranges = True
    server.cuts = [1000]
    download(file)
    assert Path(file.path).read_bytes() == CONTENT


def test_a_server_that_is_busy_is_asked_again(server: Server) -> None:
    file = listed(server)
    server.refusals = [429, 503, 429]
    download(file)
    assert len(server.downloads()) == 4
    server.files["/b"] = b"b"
    server.refusals = [429] * 6
    (other,) = list_files(f"{server.url}/b")
    with pytest.raises(UserError, match=r"/b: the server answers 429, 6 times in a row"):
        download(other)


def test_a_file_that_changes_is_not_mixed_with_its_beginning(server: Server) -> None:
    file = listed(server)
    server.cuts = [1000] + [0] * 6
    with pytest.raises(UserError):
        download(file)
    server.files["/raw/a b.jsonl"] = CONTENT[::-1]
    with pytest.raises(UserError, match=r"changed since it was planned .*give the file another ad"):
        download(file)
    assert not Path(file.path).exists()
    assert listed(server).path == file.path
    server.files["/raw/a b.jsonl"] = CONTENT[::-1]
    (changed,) = list_files(f"{server.url}/raw/a%20b.jsonl")
    assert changed.path != file.path


def test_a_beginning_that_is_too_long_is_dropped(server: Server) -> None:
    file = listed(server)
    server.cuts = [1000] + [0] * 6
    with pytest.raises(UserError):
        download(file)
    (beginning,) = cache(file).glob("*!incomplete")
    beginning.write_bytes(b"x" * (file.size + 1))
    download(file)
    assert Path(file.path).read_bytes() == CONTENT


def test_a_file_without_a_version_begins_anew(server: Server) -> None:
    server.has_etags = False
    file = listed(server)
    assert file.version == ""
    server.cuts = [1000]
    download(file)
    assert Path(file.path).read_bytes() == CONTENT
    assert not any("bytes=" in request for request in server.downloads())


@pytest.mark.parametrize("change", [b"", b"more", CONTENT])
def test_a_file_without_a_version_whose_length_is_another_is_refused(
    server: Server, change: bytes
) -> None:
    server.has_etags = False
    file = listed(server)
    server.files["/raw/a b.jsonl"] = CONTENT + change if change else CONTENT[:-1]
    with pytest.raises(UserError, match=r"changed since it was planned"):
        download(file)
    assert not Path(file.path).exists()


def test_a_file_of_another_length_is_refused_although_its_version_is_the_same(
    server: Server,
) -> None:
    file = listed(server)
    server.extra_bytes = 3
    with pytest.raises(UserError, match=rf"changed since it was planned .* now {file.size + 3} "):
        download(file)
    assert not Path(file.path).exists()


def test_a_redirected_download_continues_where_it_was_cut(server: Server) -> None:
    with serving() as other:
        other.files["/elsewhere"] = CONTENT
        server.redirects["/raw/a.jsonl"] = f"{other.url}/elsewhere"
        (file,) = list_files(f"{server.url}/raw/a.jsonl")
        other.cuts = [1000]
        download(file)
        assert Path(file.path).read_bytes() == CONTENT
        assert other.downloads() == ["GET /elsewhere", "GET /elsewhere bytes=1000-"]


@pytest.mark.parametrize(
    ("before", "after", "keeps_token"),
    [
        ("https://hub.co/a", "https://hub.co:443/b", True),
        ("https://hub.co/a", "https://HUB.co/b", True),
        ("https://hub.co/a", "https://hub.co:8443/b", False),
        ("https://hub.co/a", "https://cdn.hub.co/b", False),
        ("http://hub.co/a", "https://hub.co/b", False),
        ("https://hub.co/a", "http://hub.co/b", None),
        ("http://hub.co/a", "ftp://hub.co/b", None),
        ("https://hub.co/a", "file:///etc/passwd", None),
    ],
)
def test_a_token_stays_with_its_origin_and_nothing_is_downgraded(
    before: str, after: str, keeps_token: bool | None
) -> None:
    request = urllib.request.Request(before, headers={"Authorization": "Bearer secret"})
    redirect = partial(https._Redirect().redirect_request, request, None, 302, "Found", {}, after)
    if keeps_token is None:
        with pytest.raises(ValueError, match=f"redirected from https? to {after[:3]}"):
            redirect()
    else:
        assert redirect().has_header("Authorization") == keeps_token


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("ftp://127.0.0.1/x", "redirected from http to ftp; fix the address"),
        ("/loop", "is redirected without end or target; fix the address"),
    ],
)
def test_other_redirects_are_one_line(server: Server, target: str, message: str) -> None:
    server.redirects["/loop"] = target
    with pytest.raises(UserError) as caught:
        list_files(f"{server.url}/loop")
    assert str(caught.value) == f"{server.url}/loop: {message}"


def test_an_answer_without_a_length_writes_no_more_than_was_listed(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = listed(server)
    server.states_length, server.extra_bytes = False, 5 << 20
    sizes = []
    monkeypatch.setattr(https, "_empty", lambda stream: sizes.append(stream.tell()))
    with pytest.raises(UserError, match=r"changed since it was planned .* now more bytes\)"):
        download(file)
    assert max(sizes) <= file.size


SIZE = len(CONTENT)


@pytest.mark.parametrize(
    "stated",
    [
        {"Content-Range": f"bytes 0-{SIZE - 1}/{SIZE}"},  # from the start, under status 206
        {"Content-Range": f"bytes 1001-{SIZE - 1}/{SIZE}"},
        {"Content-Range": f"bytes 1000-{SIZE - 1}/*"},
        {"Content-Range": ""},
        {"Content-Range": "", "Content-Type": "multipart/byteranges; boundary=x"},
        {"ETag": ""},
    ],
)
def test_a_range_that_does_not_continue_the_listed_version_is_not_appended(
    server: Server, stated: dict[str, str]
) -> None:
    file = listed(server)
    server.cuts, server.stated = [1000], [{}, stated]
    download(file)
    assert Path(file.path).read_bytes() == CONTENT
    assert [request.partition("bytes=")[2] for request in server.downloads()] == ["", "1000-", ""]


def test_a_server_that_never_continues_is_given_up(server: Server) -> None:
    file = listed(server)
    server.cuts, server.stated = [1000] * 20, [{}, {"Content-Range": "bytes 0-1/2"}] * 20
    with pytest.raises(UserError, match=r"6 times in a row; the received part is kept"):
        download(file)


def test_a_range_that_the_server_refuses_begins_the_file_again(server: Server) -> None:
    file = listed(server)
    server.cuts = [1000] + [0] * 6
    with pytest.raises(UserError):
        download(file)
    server.refusals = [416]
    download(file)
    assert Path(file.path).read_bytes() == CONTENT


def test_a_weak_version_is_not_continued(server: Server) -> None:
    file = listed(server)._replace(version='etag:W/"1"')
    server.cuts, server.stated = [1000], [{"ETag": 'W/"1"'}] * 2
    download(file)
    assert not any("bytes=" in request for request in server.downloads())
    assert Path(file.path).read_bytes() == CONTENT


def test_a_compressed_answer_is_refused_unless_the_file_is_compressed(server: Server) -> None:
    coded = [{"Content-Encoding": "gzip"}]
    file = listed(server)
    server.stated = coded
    with pytest.raises(
        UserError, match=r"the server compresses it \(gzip\), although asked not to; down"
    ):
        download(file)
    file = listed(server, "/raw/a.jsonl.gz")
    server.stated = coded
    download(file)
    assert Path(file.path).read_bytes() == CONTENT


@pytest.mark.parametrize("length", ["\u00b2", "-5", "9" * 30, "1, 1"])
def test_a_length_that_is_no_number_is_not_taken(server: Server, length: str) -> None:
    server.stated = [{"Content-Range": f"bytes 0-0/{length}"}]
    server.states_length = False
    with pytest.raises(UserError, match="the server does not state its size"):
        listed(server)


def test_temporary_names_are_those_of_no_other_file(server: Server) -> None:
    names = ("a", "a.lock", "a.incomplete", "a.takeover", "x" * 140)
    server.repositories["datasets/o/n"] = {name: name.encode() for name in names}
    files = list_files("hf://datasets/o/n/*")
    server.cuts = [1]
    for file in reversed(files):
        download(file)
        assert Path(file.path).read_bytes() == Path(file.path).name.encode()


def test_a_full_disk_is_said(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    file = listed(server)
    with monkeypatch.context() as patch:
        patch.setattr(https, "_read", lambda _: os.write(os.open("/dev/full", os.O_WRONLY), b"x"))
        with pytest.raises(OSError, match="No space left on device"):
            download(file)
    download(file)
    assert Path(file.path).read_bytes() == CONTENT


def test_threads_that_need_one_file_do_not_mix_it(server: Server) -> None:
    file = listed(server)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(download, [file] * 24))
    assert Path(file.path).read_bytes() == CONTENT
    assert [path.name for path in cache(file).iterdir()] == ["a b.jsonl"]
    assert len(server.downloads()) == 1


def test_a_file_that_another_job_finishes_before_the_lock_is_not_downloaded_again(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = listed(server)

    def late(path: Path, partial: Path) -> bool:
        """Between the first look and the lock, another job downloads the file."""
        monkeypatch.setattr(https, "claim", claim)
        download(file)
        return claim(path, partial)

    monkeypatch.setattr(https, "claim", late)
    download(file)
    assert len(server.downloads()) == 1


def cache(file: RemoteFile) -> Path:
    """Folder of a download in the cache."""
    return (cache_folder() / "tokamake" / Path(file.path).relative_to("results/raw")).parent


def test_mistakes_are_one_line(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        UserError, match=r"/none: the server answers 404 Not Found; fix the address"
    ):
        list_files(f"{server.url}/none")
    with pytest.raises(UserError, match="names no file; write https://HOST/PATH"):
        server.files["/folder/"] = b"x"
        list_files(f"{server.url}/folder/")
    for address in (f"{server.url}/ä.jsonl", "https://[::1/x", "raw/a.jsonl"):
        with pytest.raises(UserError, match=r"fix the address|no address; write hf://") as caught:
            list_files(address)
        assert str(caught.value).startswith(f"{address}: ")
    with pytest.raises(UserError, match=r"no connection \(.*refused.*6 times in a row; check the"):
        list_files("http://127.0.0.1:9/x")
    file = listed(server)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set, so nothing can download it"):
        download(file)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set, so nothing can ask for its size"):
        list_files(f"{server.url}/raw")


def test_a_file_larger_than_the_disk_is_refused_before_it_is_downloaded(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.files["/a.jsonl"] = b"{}\n" * 1000
    (file,) = list_files(f"{server.url}/a.jsonl")
    usage = SimpleNamespace(free=2999)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(UserError, match=r"3,000 bytes to download, 2,999 are free in .*HF_HOME$"):
        download(file)
    assert not [request for request in server.requests if request == "GET /a.jsonl"]
