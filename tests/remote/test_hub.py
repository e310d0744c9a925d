"""Addresses of the Hugging Face Hub stand for files at a commit, and downloads have its hashes."""

from pathlib import Path

import pytest
from huggingface_hub import hf_hub_download

from tests.support.web_server import Server, serving
from tokamake.errors import UserError
from tokamake.remote.addresses import parse_address
from tokamake.remote.download import download, list_files

CARD = b"""---
configs:
- config_name: en
  data_files:
  - {split: train, path: "en/*.jsonl"}
  - {split: test, path: ["en-test/a.jsonl", "en-test/b.jsonl"]}
- config_name: de
  default: true
  data_dir: de
  data_files: "*.jsonl"
---
# Texts
"""
FILES = {
    "README.md": CARD,
    "en/0.jsonl": b'{"text": "zero"}\n' * 5000,
    "en/1.jsonl": b'{"text": "one"}\n',
    "en-test/a.jsonl": b"{}\n",
    "en-test/b.jsonl": b"{}\n",
    "de/0.jsonl": b"{}\n",
    "deep/x/y.jsonl": b"{}\n",
}
NAME = "hf://datasets/org/texts"


@pytest.fixture
def hub(server: Server) -> Server:
    server.repositories["datasets/org/texts"] = dict(FILES)
    server.large = {"en/0.jsonl"}
    return server


def names(address: str) -> list[str]:
    return [parse_address(file.url).path for file in list_files(address)]


@pytest.mark.parametrize(
    ("address", "files"),
    [
        ("/en/0.jsonl", ["en/0.jsonl"]),
        ("/en", ["en/0.jsonl", "en/1.jsonl"]),
        ("@main/en/*.jsonl", ["en/0.jsonl", "en/1.jsonl"]),
        ("/*/[01].jsonl", ["de/0.jsonl", "en/0.jsonl", "en/1.jsonl"]),
        ("/deep/**", ["deep/x/y.jsonl"]),
        ("", ["de/0.jsonl"]),
        ("?config=en", ["en/0.jsonl", "en/1.jsonl"]),
        ("?config=en&split=test", ["en-test/a.jsonl", "en-test/b.jsonl"]),
    ],
)
def test_an_address_stands_for_files(hub: Server, address: str, files: list[str]) -> None:
    assert names(NAME + address) == files


def test_files_are_pinned_with_sizes_and_hashes(hub: Server) -> None:
    commit = hub.commit("datasets/org/texts")
    large, small = list_files(f"{NAME}/en")
    assert large.url == f"{NAME}@{commit}/en/0.jsonl"
    assert large.path == f"results/raw/hub/datasets/org/texts/{commit[:12]}/en/0.jsonl"
    assert (large.size, small.size) == (len(FILES["en/0.jsonl"]), len(FILES["en/1.jsonl"]))
    assert (large.version[:7], small.version[:4]) == ("sha256:", "git:")


def test_a_download_is_in_the_cache_and_is_not_repeated(
    hub: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in list_files(f"{NAME}/en"):
        download(file)
        assert Path(file.path).read_bytes() == FILES[parse_address(file.url).path]
        expected = tmp_path / "cache/tokamake/hub/datasets/org/texts"
        assert Path(file.path).readlink().is_relative_to(expected)
    before = len(hub.downloads())
    hub.repositories.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    Path(file.path).unlink()
    download(file)
    assert Path(file.path).read_bytes() == FILES["en/1.jsonl"]
    assert len(hub.downloads()) == before


def test_the_server_of_large_files_gets_no_token(
    hub: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    hub.private = {"datasets/org/texts"}
    (file,) = list_files(f"{NAME}/en/0.jsonl")
    commit = hub.commit("datasets/org/texts")
    with serving() as other:
        other.files["/store"] = FILES["en/0.jsonl"]
        path = f"/datasets/org/texts/resolve/{commit}/en/0.jsonl"
        hub.redirects[path] = f"{other.url}/store"
        other.cuts = [1000]
        download(file)
        assert other.downloads() == ["GET /store", "GET /store bytes=1000-"]
        assert other.with_token == []
    assert path in hub.with_token
    assert Path(file.path).read_bytes() == FILES["en/0.jsonl"]


@pytest.mark.parametrize("name", ["en/0.jsonl", "en/1.jsonl"])
def test_a_file_of_another_length_is_refused(hub: Server, name: str) -> None:
    (file,) = list_files(f"{NAME}/{name}")
    hub.extra_bytes = 3
    with pytest.raises(UserError, match=rf"{name}: differs .*now {file.size + 3} bytes"):
        download(file)
    assert not Path(file.path).exists()


def test_what_other_tools_of_the_hub_have_downloaded_is_taken(hub: Server, tmp_path: Path) -> None:
    (file,) = list_files(f"{NAME}/en/1.jsonl")
    path = hf_hub_download(
        "org/texts",
        "en/1.jsonl",
        repo_type="dataset",
        cache_dir=tmp_path / "cache/hub",
        endpoint=hub.url,
    )
    before = len(hub.requests)
    download(file)
    assert len(hub.requests) == before
    assert Path(file.path).readlink() == Path(path)


def test_names_with_special_characters_arrive(hub: Server) -> None:
    names = ["a+b=(1).jsonl", "50%.jsonl", "ä #1.jsonl", "x@y.jsonl"]
    hub.repositories["datasets/org/texts"] = {name: name.encode() for name in names}
    for file in list_files(f"{NAME}/*"):
        download(file)
        assert Path(file.path).read_bytes() == Path(file.path).name.encode()


def test_a_file_that_the_upstream_moves_on_from_stays_at_its_commit(hub: Server) -> None:
    (file,) = list_files(f"{NAME}/en/1.jsonl")
    hub.repositories["datasets/org/texts"]["en/1.jsonl"] = b"other\n"
    with pytest.raises(UserError, match=r"texts@[0-9a-f]{40}/en/1\.jsonl: the server answers 404"):
        download(file)  # this server forgets old commits
    (other,) = list_files(f"{NAME}/en/1.jsonl")
    assert other.path != file.path


def test_other_bytes_than_those_listed_are_refused_and_removed(hub: Server) -> None:
    hub.corrupts = True
    for name in ("en/0.jsonl", "en/1.jsonl"):
        (file,) = list_files(f"{NAME}/{name}")
        with pytest.raises(UserError, match=r"was listed; it is removed: run again"):
            download(file)
        assert not Path(file.path).exists()
    hub.corrupts = False
    download(file)
    assert Path(file.path).read_bytes() == FILES["en/1.jsonl"]


@pytest.mark.parametrize(
    ("address", "fault"),
    [
        (f"{NAME}/en?split=train", "config and split are of a dataset without a path"),
        (f"{NAME}/fr/*", r"no file of the repository matches; it has README\.md, de/0\.jsonl"),
        (f"{NAME}?config=fr", "no configuration fr; choose one of en, de"),
        (f"{NAME}?config=en&split=dev", "no file of split dev; it has the splits train, test"),
        (f"{NAME}@v9/en", "no such revision; fix it"),
        ("hf://datasets/o--x/texts", "Cannot have -- or .. in repo_id"),
        (f"{NAME}/[z-a]", "not a pattern"),
        ("hf://datasets/org/broken", "the metadata in its README.md cannot be read"),
        ("hf://datasets/org/none", "no such repository, or a private one; fix the name, or set"),
        ("hf://datasets/org/gated", "access is restricted; set HF_TOKEN, or log in"),
    ],
)
def test_mistakes_are_one_line_that_names_the_address(
    hub: Server, address: str, fault: str
) -> None:
    hub.repositories["datasets/org/gated"] = {}
    hub.repositories["datasets/org/broken"] = {
        "README.md": b"---\nconfigs: [{data_files: [1]}]\n---\n"
    }
    hub.private = {"datasets/org/gated"}
    with pytest.raises(UserError, match=fault) as caught:
        list_files(address)
    assert str(caught.value).startswith(f"{address}: ")
    assert "\n" not in str(caught.value)


def test_offline_nothing_is_listed_and_what_is_missing_is_named(
    hub: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    (file,) = list_files(f"{NAME}/en/0.jsonl")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=r"en: HF_HUB_OFFLINE is set, so nothing can list its"):
        list_files(f"{NAME}/en")
    with pytest.raises(
        UserError, match=r"en/0\.jsonl: HF_HUB_OFFLINE is set, so nothing can download"
    ):
        download(file)


@pytest.mark.parametrize(
    "name",
    [
        "model-$(touch X).safetensors",
        "model{x}.safetensors",
        "../../x",
        "/etc/x",
        "a//b",
        "a/./b",
        "a\\b",
        "a\tb",
        "a\x1b[2Jb",
        "a\u202eb",
        "a\ud800b",
        "a;b",
        "a'b",
        "x" * 141,
    ],
)
def test_a_listed_name_outside_the_alphabet_is_refused(hub: Server, name: str) -> None:
    commit = hub.commit("datasets/org/texts")
    entry = {"type": "file", "path": name, "size": 1, "oid": "0" * 40}
    hub.answers[f"/api/datasets/org/texts/tree/{commit}"] = [entry]
    with pytest.raises(
        UserError, match=r"/\*\*: file name .*: a name has letters, digits"
    ) as caught:
        list_files(f"{NAME}/**")
    assert str(caught.value).isprintable()
    with pytest.raises(UserError, match=r"no file of the repository matches; it has") as caught:
        list_files(f"{NAME}/none")
    assert str(caught.value).isprintable()


def test_names_that_are_one_path_are_refused(hub: Server) -> None:
    hub.repositories["datasets/org/texts"] = {"a": b"x", "a/b": b"y"}
    with pytest.raises(UserError, match="lists a as a file and as a folder"):
        list_files(f"{NAME}/**")


def test_names_that_look_alike_are_two_files(hub: Server) -> None:
    content = {name: name.encode() for name in ("a", "A", "\u00e9", "e\u0301")}
    hub.repositories["datasets/org/texts"] = content
    for file in list_files(f"{NAME}/**"):
        download(file)
    assert {path.name for path in Path(file.path).parent.iterdir()} == {*content}
    assert Path(file.path).parent.joinpath("a").read_bytes() == b"a"


GOOD = {"type": "file", "path": "a", "size": 1, "oid": "0" * 40}


@pytest.mark.parametrize(
    "entries",
    [
        None,
        {"a": 1},
        [1],
        [{}],
        [{**GOOD, "size": -1}],
        [{**GOOD, "size": "1"}],
        [{**GOOD, "size": 1e400}],
        [{**GOOD, "oid": "../x"}],
        [{**GOOD, "oid": None}],
        [{**GOOD, "path": 1}],
        [{**GOOD, "path": ["a"]}],
        [{**GOOD, "lfs": {"oid": "0" * 64}}],
        [{**GOOD, "lfs": {"oid": "z", "size": 1, "pointerSize": 1}}],
        [{**GOOD, "lfs": 1}],
    ],
)
def test_an_answer_that_is_not_that_of_a_hub_is_one_line(hub: Server, entries: object) -> None:
    hub.answers[f"/api/datasets/org/texts/tree/{hub.commit('datasets/org/texts')}"] = entries
    with pytest.raises(UserError, match=rf"^{NAME}/a: no answer of a Hub") as caught:
        list_files(f"{NAME}/a")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("info", [None, [], {}, {"sha": None}, {"sha": "../../x"}, {"sha": 1}])
def test_a_commit_that_is_none_is_refused(hub: Server, info: object) -> None:
    hub.answers["/api/datasets/org/texts/revision/main"] = info
    with pytest.raises(UserError, match="no answer of a Hub"):
        list_files(f"{NAME}/a")


def test_a_listing_ends(hub: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokamake.remote.hub._MAX_ENTRIES", len(FILES) - 1)
    with pytest.raises(UserError, match="lists more than 6 files; download"):
        list_files(f"{NAME}/en")


@pytest.mark.parametrize(
    "card",
    [
        b"---\nconfigs: [{data_files: '*a*b*c*d*e*f'}]\n---\n",
        b"---\nconfigs: [{data_files: [{split: train, path: [[x]]}]}]\n---\n",
        b"---\nconfigs: " + b"[" * 3000 + b"\n---\n",
        b"x" * (17 << 20),
    ],
)
def test_a_card_that_takes_long_to_read_is_refused(hub: Server, card: bytes) -> None:
    hub.repositories["datasets/org/texts"]["README.md"] = card
    with pytest.raises(UserError, match=r"the metadata in its README\.md cannot be read"):
        list_files(NAME)
