"""Pages of a list become a WARC file: in the list's order, resumable, each outcome on record."""

import hashlib
import json
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT
from tests.support.web_sites import WebSite, page, serving
from tokamake.config.fetch_urls import FetchUrlsSettings
from tokamake.data.readers import open_input
from tokamake.data.urls.cleaning import read_blacklist
from tokamake.data.urls.fetch_shard import Outcomes, fetch_listed, fetch_shard, outcomes_path
from tokamake.data.urls.hosts import Crawler
from tokamake.data.urls.url_list import list_url_shards
from tokamake.errors import UserError

pytestmark = pytest.mark.extra("corpora", "fastwarc", "resiliparse")
PATHS = ("/a", "/missing", "/packed", "/private/x", "/chunked", "/to/b", "/picture")


@pytest.fixture
def site() -> Iterator[WebSite]:
    with serving() as site:
        yield site


def settings(**changes: Any) -> FetchUrlsSettings:
    base = {
        "host_seconds": 0,
        "allow_private_addresses": True,
        "attempts": 1,
        "page_seconds": 5,
        "max_wait_seconds": 0,
    }
    return FetchUrlsSettings.model_validate({**base, **changes})


def fetch(
    urls: list[str], path: Path, *, of_corpus: Sequence[Path] = (), **changes: Any
) -> Counter[str]:
    options = settings(**changes)
    crawler = Crawler(options, read_blacklist(None, with_default=True))
    return fetch_shard(urls, path, crawler=crawler, settings=options, of_corpus=of_corpus).counts


def read(path: Path) -> list[tuple[str, str]]:
    """URL and text of each document."""
    blocks = open_input(path).blocks(("text", "url"))
    return [(record["url"], record["text"]) for block in blocks for record in block.records]


def outcomes(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in outcomes_path(path).read_text().splitlines()]


def test_pages_are_in_the_order_of_the_list_and_failures_have_reasons(
    site: WebSite, tmp_path: Path
) -> None:
    path = tmp_path / "list/0.warc.gz"
    counts = fetch([site.url + each for each in PATHS], path, connections_per_host=4)
    assert counts == {
        "fetched": 4,
        "status 404": 1,
        "robots.txt": 1,
        "content type image/png": 1,
    }
    found = read(path)
    assert [url.removeprefix(site.url) for url, _ in found] == ["/a", "/packed", "/chunked", "/b"]
    assert found[1][1].startswith("packed. Rivers carry water")
    lines = outcomes(path)
    assert [line["url"] for line in lines] == [site.url + each for each in PATHS]
    assert lines[4]["sha256"] == hashlib.sha256(page("/chunked")).hexdigest()
    assert lines[5]["redirected_to"] == f"{site.url}/b"
    assert not list(path.parent.glob("*!*"))


def test_a_line_of_the_log_sums_up_outcomes() -> None:
    reasons = {f"status {status}": 3 for status in range(400, 410)}
    assert Outcomes(Counter(fetched=1200, **reasons), 7).summary == (
        "1,200 of 1,230 URLs fetched; failures: "
        + ", ".join(f"3 status {status}" for status in range(400, 408))
        + ", 6 for other reasons; 7 of them are transient"
    )


def test_the_log_shows_progress(
    site: WebSite,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("tokamake.data.urls.fetch_shard._PROGRESS_SECONDS", 0.05)
    urls = [f"{site.url}/{number}" for number in range(6)]
    fetch(urls, tmp_path / "list/0.warc.gz", host_seconds=0.05)
    lines = capsys.readouterr().out.splitlines()
    assert lines
    assert all(re.fullmatch(r"0.warc.gz: [0-6] pages and 0 failures of 6 URLs", s) for s in lines)


def test_other_readers_of_warc_files_agree(site: WebSite, tmp_path: Path) -> None:
    from fastwarc.warc import ArchiveIterator

    path = tmp_path / "list/0.warc.gz"
    fetch([f"{site.url}/a", f"{site.url}/packed"], path)
    with path.open("rb") as stream:
        records = list(ArchiveIterator(stream, parse_http=False, func_filter=None))
        kinds = [record.headers["WARC-Type"] for record in records]
    assert kinds == ["warcinfo", "response", "response"]
    with path.open("rb") as stream:
        for record in ArchiveIterator(stream, parse_http=False):
            assert record.verify_block_digest(consume=False)
            if record.headers["WARC-Type"] == "response":
                assert record.headers["WARC-Payload-Digest"].startswith("sha1:")


@pytest.mark.extra("oracles", "warcio")
def test_warcio_finds_the_stated_digests(site: WebSite, tmp_path: Path) -> None:
    from warcio.archiveiterator import ArchiveIterator

    path = tmp_path / "list/0.warc.gz"
    fetch([f"{site.url}/{name}" for name in ("a", "chunked", "packed")], path)
    with path.open("rb") as stream:
        found = {}
        for record in ArchiveIterator(stream, check_digests="raise"):
            found[record.rec_type, record.rec_headers.get_header("WARC-Target-URI")] = (
                record.content_stream().read()
            )
            assert record.digest_checker.passed
    assert found.pop(("warcinfo", None)).startswith(b"software: tokamake")
    assert found == {
        ("response", site.url + name): page(text)
        for name, text in (("/a", "/a"), ("/chunked", "/chunked"), ("/packed", "packed"))
    }


def test_finished_files_are_not_fetched_again(site: WebSite, tmp_path: Path) -> None:
    path = tmp_path / "list/0.warc.gz"
    first = fetch([f"{site.url}/a", f"{site.url}/missing"], path)
    content, num_requests = path.read_bytes(), len(site.requests)
    assert fetch([f"{site.url}/a", f"{site.url}/missing"], path) == first
    assert (path.read_bytes(), len(site.requests)) == (content, num_requests)


_PROGRAM = """
import sys
from pathlib import Path
from tests.data.urls.test_fetch_shard import fetch
fetch(sys.argv[2:], Path(sys.argv[1]), host_seconds=0.05)
"""


def test_a_killed_job_keeps_its_pages(site: WebSite, tmp_path: Path) -> None:
    path = tmp_path / "list/0.warc.gz"
    urls = [f"{site.url}/{number}" for number in range(40)]
    program = subprocess.Popen([sys.executable, "-c", _PROGRAM, path, *urls], cwd=ROOT)
    deadline = time.monotonic() + 60
    while len(site.requests) < 12 and time.monotonic() < deadline:
        time.sleep(0.02)
    program.send_signal(signal.SIGKILL)
    program.wait()
    pages = path.with_name(f"{path.name}!pages")
    assert not path.exists()
    with pages.open("r+b") as stream:  # a machine that stops may lose the end of a file
        stream.truncate(pages.stat().st_size - 5)
    assert fetch(urls, path) == {"fetched": 40}
    assert [url for url, _ in read(path)] == urls
    counts = Counter(site.paths())
    assert set(counts) == {f"/{number}" for number in range(40)}
    assert sum(counts.values()) <= 43  # the lost page, and requests that ran at the kill


def test_workspaces_share_what_was_fetched(
    site: WebSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    options = settings(urls_per_shard=2)
    crawler = Crawler(options, read_blacklist(None, with_default=True))
    for name in ("one", "two"):
        home = tmp_path / name
        home.mkdir()
        monkeypatch.chdir(home)
        Path("urls.txt").write_text("\n".join(f"{site.url}/{each}" for each in "abc"))
        files = list_url_shards("urls:urls.txt", options)
        fetched = [fetch_listed(file, options, crawler=crawler) for file in files]
        assert fetched == [({"fetched": 2}, 0), ({"fetched": 1}, 0)]
        assert [url for file in files for url, _ in read(Path(file.path))] == [
            f"{site.url}/{each}" for each in "abc"
        ]
        assert outcomes_path(Path(files[0].path)).exists()
    assert len(site.paths()) == 3
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    Path(files[0].path).resolve().unlink()
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set, so nothing can fetch its pages"):
        fetch_listed(files[0], options, crawler=crawler)
