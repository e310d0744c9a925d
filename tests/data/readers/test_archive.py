"""Archives give the documents of their members, in the order of `datasets`."""

import gzip
import hashlib
import importlib.metadata
import io
import json
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.support.readings import TEXTS, records
from tokamake.data.readers import BadRecord, open_input
from tokamake.data.readers import archive as reader
from tokamake.errors import UserError

ROWS = [{"text": text, "id": number} for number, text in enumerate(TEXTS)]
JSONL = "".join(json.dumps(row) + "\n" for row in ROWS)


def zipped(path: Path, **members: str | bytes) -> Path:
    """Write a zip archive; __ in a name stands for a dot, and _in_ for a folder."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name.replace("_in_", "/").replace("__", "."), content)
    return path


def tarred(path: Path, members: dict[str, bytes]) -> Path:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    data = content.getvalue()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def texts(path: Path, key: str = "text") -> list[object]:
    return [
        record if isinstance(record, BadRecord) else record[key]
        for record in records(open_input(path), key)
    ]


FIRST = JSONL.index("\n") + 1
ZIPS: dict[str, dict[str, str | bytes]] = {
    "jsonl": {"a__jsonl": JSONL},
    "two files": {"data_in_a__jsonl": JSONL[:FIRST], "data_in_b__json": JSONL[FIRST:]},
    "array": {"a__json": json.dumps(ROWS, indent=1)},
    "hidden": {"a__jsonl": JSONL, "__DS_Store": "x", "sub_in___b__jsonl": "{"},
}


@pytest.mark.parametrize("name", ZIPS)
def test_a_zip_archive_gives_its_documents(tmp_path: Path, name: str) -> None:
    path = zipped(tmp_path / "a [1]*.zip", **ZIPS[name])
    raw = open_input(path)
    assert [record["text"] for record in records(raw)] == TEXTS
    assert (raw.format, raw.documents, raw.bytes) == ("archive", 7, path.stat().st_size)
    assert raw.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert raw.place(3) == f"{path}: row 3"


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz"])
def test_a_tar_archive_of_webdataset_gives_its_samples(tmp_path: Path, name: str) -> None:
    members = {}
    for number, text in enumerate(TEXTS):
        members[f"{number:03d}.txt"] = text.encode()
        members[f"{number:03d}.png"] = b"\x89PNG is not decoded"
    path = tarred(tmp_path / name, members)
    assert texts(path, "txt") == TEXTS
    with pytest.raises(UserError, match=r'a\.tar.*: no column "text" among txt, png.*; fix text_'):
        texts(path)


@pytest.mark.parametrize("size", [512 * 8, 512 * 8 + 300, 512 * 15])
def test_a_cut_tar_archive_is_an_error(tmp_path: Path, size: int) -> None:
    path = tarred(tmp_path / "a.tar", {f"{number}.txt": b"x" for number in range(9)})
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(UserError, match=r"a\.tar: cannot be read .*fetch it again"):
        texts(path, "txt")


def test_a_cut_download_is_an_error(tmp_path: Path) -> None:
    for path in (
        zipped(tmp_path / "a.zip", a__jsonl=JSONL * 50),
        tarred(tmp_path / "a.tar.gz", {f"{number}.txt": bytes([number]) for number in range(99)}),
    ):
        path.write_bytes(path.read_bytes()[:-200])
        with pytest.raises(UserError, match=r"fetch it again"):
            texts(path, "text" if path.suffix == ".zip" else "txt")


def test_one_number_among_texts_does_not_change_the_texts(tmp_path: Path) -> None:
    """`datasets` would turn the other texts into JSON strings, in quotes."""
    path = zipped(tmp_path / "a.zip", a__jsonl='{"text": "a"}\n{"text": 3}\n')
    with pytest.raises(UserError, match=r"from string to number in row 1.*or unpack it"):
        texts(path)


def test_missing_texts_and_bytes_that_are_no_text_are_bad_documents(tmp_path: Path) -> None:
    path = zipped(tmp_path / "a.zip", a__jsonl='{"text": "a"}\n{"id": 3}\n')
    assert texts(path) == ["a", None]
    path = tarred(tmp_path / "a.tar", {"0.data": b"good", "1.data": b"\xff bad"})
    first, second = texts(path, "data")
    assert first == "good"
    assert isinstance(second, BadRecord)
    assert second.raw == b"\xff bad"


@pytest.mark.parametrize(
    ("members", "kinds"),
    [
        ({"a__jsonl": "", "b__csv": ""}, r"\.csv, \.jsonl"),
        ({"a__jsonl__gz": ""}, r"\.gz"),
        ({"a__txt": ""}, r"\.txt"),
        ({"folder_in_": ""}, "nothing"),
    ],
)
def test_members_of_other_kinds_are_refused(
    tmp_path: Path, members: dict[str, str], kinds: str
) -> None:
    path = zipped(tmp_path / "a.zip", **members)
    with pytest.raises(
        UserError, match=f"members of the zip archive are named {kinds}, not .*unpack"
    ):
        texts(path)


def test_without_datasets_the_remedy_is_its_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    path = zipped(tmp_path / "a.zip", a__jsonl=JSONL)
    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(UserError, match=r"pip install 'datasets>=5'`, or unpack the archive"):
        open_input(path)
    monkeypatch.setattr(importlib.metadata, "version", lambda _: "4.9.1")
    with pytest.raises(UserError, match=r"pip install 'datasets>=5'`"):
        open_input(path)


def test_rows_have_consecutive_numbers_in_all_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "BLOCK_BYTES", 100)
    blocks = list(open_input(zipped(tmp_path / "a.zip", a__jsonl=JSONL)).blocks(("text",)))
    assert len(blocks) > 1
    assert [number for block in blocks for number in block.numbers.tolist()] == list(range(7))
