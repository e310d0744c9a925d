"""A list of URLs is cleaned, with counts that add up, and cut into shards that stay the same."""

import gzip
import json
import lzma
from pathlib import Path

import pytest

from tokamake.config.fetch_urls import FetchUrlsSettings
from tokamake.data.urls.url_list import list_url_shards, list_version, num_urls, shard_urls
from tokamake.errors import UserError
from tokamake.remote.addresses import RemoteFile

SETTINGS = FetchUrlsSettings(urls_per_shard=4)
LINES = [
    *(f"http://example.org/{number}" for number in range(9)),
    "HTTP://example.org:80/3#again",
    "",
    "http://a",
    "ftp://example.org/x",
    "http://imgur.com/x",
    "http://example.org/x.pdf",
    "nothing to see",
    "http://example.org/last",
]
LEFT_OUT = {
    "blank": 1,
    "short": 1,
    "malformed": 2,
    "scheme": 1,
    "domain": 1,
    "extension": 1,
    "repeated": 1,
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def write(name: str, lines: list[str]) -> str:
    data = "\n".join(lines).encode() + b"\nhttp://\xff.example/"
    pack = {".gz": gzip.compress, ".xz": lzma.compress}.get(Path(name).suffix, bytes)
    Path(name).write_bytes(pack(data))
    return f"urls:{name}"


@pytest.mark.parametrize("name", ["urls.txt", "urls.txt.gz", "urls.txt.xz"])
def test_counts_of_kept_and_left_out_lines_add_up(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    files = list_url_shards(write(name, LINES), SETTINGS)
    assert list(map(num_urls, files)) == [4, 4, 2]
    urls = [url for file in files for url in shard_urls(file, SETTINGS)]
    assert urls == [*LINES[:9], LINES[-1]]
    (path,) = Path(f"results/raw/urls/{name}").glob("cleaned-*.json")
    counts = json.loads(path.read_text())
    assert (counts["lines"], counts["kept"], counts["left_out"]) == (18, 10, LEFT_OUT)
    assert counts["kept"] + sum(counts["left_out"].values()) == counts["lines"]
    assert "18 lines, 10 URLs; left out: 1 blank, 1 short, 2 malformed" in capsys.readouterr().err


def test_a_longer_list_keeps_the_shards_that_were_full() -> None:
    def names(files: list[RemoteFile]) -> list[str]:
        return [file.path for file in files]

    before = names(list_url_shards(write("urls.txt", LINES), SETTINGS))
    after = names(list_url_shards(write("urls.txt", [*LINES, "http://example.org/x"]), SETTINGS))
    assert before[:2] == after[:2]
    assert before[2] != after[2]


def test_a_list_that_changes_after_the_plan_is_an_error() -> None:
    files = list_url_shards(write("urls.txt", LINES), SETTINGS)
    write("urls.txt", LINES[1:])
    with pytest.raises(UserError, match=r"urls:urls.txt: changed since it was planned; start the"):
        shard_urls(files[0], SETTINGS)


def test_another_blacklist_is_another_version_of_a_list() -> None:
    address, blacklist = write("urls.txt", LINES), Path("blacklist.txt")
    blacklist.write_text("example.com\n")
    settings = SETTINGS.model_copy(update={"blacklist": blacklist})
    versions = {list_version(address, each) for each in (SETTINGS, settings)}
    blacklist.write_text("example.net\n")
    versions.add(list_version(address, settings))
    assert len(versions) == 3
    # Limits of requests change no URL.
    patient = SETTINGS.model_copy(update={"page_seconds": 60.0})
    assert list_version(address, patient) in versions


def test_a_list_without_a_url_or_file_is_refused() -> None:
    Path("empty.txt").write_text("http://imgur.com/a\n")
    with pytest.raises(UserError, match=r"1 lines, 0 URLs; left out: 1 domain; nothing to fetch"):
        list_url_shards("urls:empty.txt", SETTINGS)
    with pytest.raises(UserError, match=r"urls:none.txt: cannot be read \(No such file"):
        list_url_shards("urls:none.txt", SETTINGS)
    missing = SETTINGS.model_copy(update={"blacklist": Path("none")})
    with pytest.raises(UserError, match=r"fetch_urls.blacklist: none: no such file"):
        list_url_shards("urls:empty.txt", missing)
