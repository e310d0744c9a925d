"""Archives give the documents of their members, each once and unchanged."""

import bz2
import gzip
import hashlib
import io
import json
import stat
import tarfile
import tracemalloc
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.readings import PACK, TEXTS, records, small_steps
from tokamake.data.readers import BadRecord, _input, open_input
from tokamake.data.readers import archive as reader
from tokamake.errors import UserError

JSONL = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
FIRST = JSONL.index(b"\n") + 1


def zipped(path: Path, members: Mapping[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def tar(members: Mapping[str, bytes]) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return content.getvalue()


def tarred(path: Path, members: Mapping[str, bytes]) -> Path:
    path.write_bytes(tar(members))
    return path


def texts(path: Path, key: str = "text") -> list[object]:
    return [
        record if isinstance(record, BadRecord) else record[key]
        for record in records(open_input(path), key)
    ]


MEMBERS: dict[str, dict[str, bytes]] = {
    "jsonl": {"a.jsonl": JSONL},
    "files in natural order": {"data/2.jsonl": JSONL[:FIRST], "data/10.jsonl": JSONL[FIRST:]},
    "an empty file": {"a.jsonl": b"", "b.jsonl": JSONL},
    "array": {"a.json": json.dumps([{"text": text} for text in TEXTS], indent=1).encode()},
    "text": {f"{number:02d}.md": text.encode() for number, text in enumerate(TEXTS)},
    "packed files": {f"a{n}.jsonl.{n}": pack(JSONL) for n, pack in PACK.items() if n == "gz"},
    "hidden files": {"a.jsonl": JSONL, "__MACOSX/._a.jsonl": b"x", "d/.DS_Store": b"y"},
    "types": {"a.jsonl": JSONL[:FIRST], "b.json": b"[]", "c.jsonl": JSONL[FIRST:]},
}


@pytest.mark.parametrize("kind", ["zip", "tar", *(f"tar.{name}" for name in PACK)])
@pytest.mark.parametrize("name", MEMBERS)
def test_an_archive_gives_the_documents_of_its_files(tmp_path: Path, name: str, kind: str) -> None:
    path = tmp_path / f"a::[1]*.{kind}"
    if kind == "zip":
        zipped(path, dict(reversed(MEMBERS[name].items())))
    else:
        content = tar({f"./{member}": data for member, data in MEMBERS[name].items()})
        path.write_bytes(PACK[kind[4:]](content) if kind != "tar" else content)
    raw = open_input(path)
    assert [record["text"] for record in records(raw)] == TEXTS
    assert (raw.format, raw.documents, raw.bytes) == ("archive", 7, path.stat().st_size)
    assert raw.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert raw.place(3) == f"{path}: row 3"


def test_texts_stay_as_they_are_in_all_members(tmp_path: Path) -> None:
    """Also texts that look like a number or a date, after a member with other types."""
    lines = ['{"text": "a"}', '{"text": "2020-01-01T10:00:00Z"}', '{"text": "NA"}', '{"text": "1"}']
    members = {f"{number}.jsonl": f"{line}\n".encode() for number, line in enumerate(lines)}
    members["z.jsonl"] = b'{"text": 3}\n{"text": {"b": 1}}\n'
    expected = ["a", "2020-01-01T10:00:00Z", "NA", "1", 3, {"b": 1}]
    assert texts(zipped(tmp_path / "a.zip", members)) == expected
    assert texts(tarred(tmp_path / "a.tar", members)) == expected


def test_documents_of_large_members_are_all_there(tmp_path: Path) -> None:
    rows = [{"text": f"{number} " + "x" * (number % 700)} for number in range(5000)]
    data = "".join(json.dumps(row) + "\n" for row in rows).encode()
    tarred(tmp_path / "a.tar", {"a.jsonl": data, "b.jsonl": data})
    with small_steps(4096):
        raw = open_input(tmp_path / "a.tar")
        blocks = list(raw.blocks(("text",)))
    assert [record["text"] for block in blocks for record in block.records] == [
        row["text"] for row in rows * 2
    ]
    assert [n for block in blocks for n in block.numbers.tolist()] == list(range(10000))
    assert {offset for block in blocks for offset in block.offsets.tolist()} == {-1}


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_members_of_one_name_are_read_once_each(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for text in ("first", "second"):
            archive.writestr("a.jsonl", json.dumps({"text": text}))
    assert texts(tmp_path / "a.zip") == ["first", "second"]


# ---- WebDataset ----


@pytest.mark.parametrize("block_bytes", [1, 1 << 22])
def test_samples_of_webdataset_are_documents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr(reader, "BLOCK_BYTES", block_bytes)
    members = {}
    for number, text in enumerate(TEXTS):
        members[f"d.1/{number:03d}.json"] = b'{"text": "not read"}'
        members[f"d.1/{number:03d}.png"] = b"\x89PNG\0"
        members[f"d.1/{number:03d}.txt"] = text.encode()
        members[f"d.1/{number:03d}.title.en"] = f"title {number}".encode()
    path = tarred(tmp_path / "a.tar", members)
    assert texts(path, "txt") == TEXTS
    both = records(open_input(path), "title.en", "txt")
    assert both[3] == {"title.en": "title 3", "txt": TEXTS[3]}
    choice = r"none ends in \.text; give text_key one of json, png, title\.en, txt"
    with pytest.raises(UserError, match=choice):
        texts(path)


def test_samples_without_text_and_bytes_that_are_no_text_are_bad_documents(tmp_path: Path) -> None:
    members = {"0.txt": b"good", "1.txt": b"\xff bad", "2.cls": b"1", "3.txt": b"\xef\xbb\xbfgood"}
    good, bad, missing, marked = texts(tarred(tmp_path / "a.tar", members), "txt")
    assert (good, marked) == ("good", "good")
    assert missing == BadRecord("there is no 2.txt; fix text_key or the archive")
    assert isinstance(bad, BadRecord)
    assert bad.raw == b"\xff bad"
    assert bad.reason.startswith("1.txt: not valid UTF-8 (0xff at byte 0")


def test_a_sample_that_has_a_text_twice_is_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", mode="w") as archive:
        for _ in range(2):
            archive.addfile(tarfile.TarInfo("0.txt"))
    with pytest.raises(UserError, match=r"0\.txt twice"):
        texts(tmp_path / "a.tar", "txt")


# ---- Damage ----

TEN = {f"{number}.txt": b"document %d" % number for number in range(10)}


def flipped(content: bytes, position: int) -> bytes:
    return content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :]


DAMAGED = {
    "a damaged header": lambda: flipped(tar(TEN), 6 * 1024 + 20),
    "cut between members": lambda: tar(TEN)[: 7 * 1024],
    "cut in a header": lambda: tar(TEN)[: 7 * 1024 + 100],
    "cut in a member": lambda: tar(TEN)[: 7 * 1024 + 515],
    "two archives in one file": lambda: tar(TEN) + tar(TEN),
}


@pytest.mark.parametrize("pack", ["", "gz"])
@pytest.mark.parametrize("key", ["text", "txt"])
@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_tar_archive_is_an_error(tmp_path: Path, name: str, key: str, pack: str) -> None:
    content = DAMAGED[name]()
    path = tmp_path / "a.tar"
    path.write_bytes(gzip.compress(content) if pack else content)
    with pytest.raises(UserError, match=r"a\.tar: cannot be read as archive .*fetch it again"):
        texts(path, key)


@pytest.mark.parametrize("cut", [3 * 1024, 3 * 1024 + 100])
def test_members_of_compression_may_end_anywhere(tmp_path: Path, cut: int) -> None:
    content = tar(TEN)
    for pack in (gzip.compress, bz2.compress):
        (tmp_path / "a.tar").write_bytes(pack(content[:cut]) + pack(content[cut:]))
        assert len(texts(tmp_path / "a.tar", "txt")) == 10


@pytest.mark.parametrize("position", [60, -200, -30])
def test_a_damaged_or_cut_zip_archive_is_an_error(tmp_path: Path, position: int) -> None:
    path = zipped(tmp_path / "a.zip", {"a.jsonl": JSONL * 40})
    content = path.read_bytes()
    path.write_bytes(content[:position])
    with pytest.raises(UserError, match=r"a\.zip: cannot be read as archive .*fetch it again"):
        texts(path)
    path.write_bytes(flipped(content, 60))
    with pytest.raises(UserError, match=r"a\.zip: .* as archive \(a\.jsonl: .*fetch it again"):
        texts(path)


def header(size: int, kind: bytes = tarfile.REGTYPE, name: str = "a.jsonl") -> bytes:
    """A block that states a size."""
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, size
    return info.tobuf(tarfile.GNU_FORMAT)[-512:]


def field(**fields: str) -> bytes:
    """A pax header with fields."""
    info = tarfile.TarInfo("x")
    info.pax_headers = fields
    content = info.tobuf(tarfile.PAX_FORMAT)
    return content[: len(content) - 512]


EXTENDED = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
HOSTILE = {
    "2^87 bytes": (header(2**87), r"header of a\.jsonl at byte 0 states 154,742,504,910,672"),
    "negative": (header(-(2**40)), r"header of a\.jsonl at byte 0 states -1,099,511,627,776"),
    "fields of 2^87 bytes": (
        field(size=str(2**65)) + header(3),
        r"header of a\.jsonl .* states 36,893",
    ),
    **{
        f"{kind!r} of 1.5 GB": (
            header(3 << 29, kind),
            r"at byte 0 states a name or fields of 1,610",
        )
        for kind in EXTENDED
    },
    "negative fields": (header(-512, tarfile.XHDTYPE), "states a name or fields of -512 bytes"),
    "many headers": (field(a="b") * 5000 + header(0), "states a name or fields of"),
    "no number": (field(size="9" * 5000) + header(0), "fields of the header at byte 0 are damaged"),
    "sparse": (field(**{"GNU.sparse.major": "1"}) + header(0), "a.jsonl is a link, not a file"),
    "old sparse": (header(0, tarfile.GNUTYPE_SPARSE), "a.jsonl is a link, not a file"),
}


@pytest.mark.parametrize("pack", ["", "gz"])
@pytest.mark.parametrize("name", HOSTILE)
def test_headers_that_state_too_much_are_one_error(
    tmp_path: Path, name: str, pack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A thread that starts while tracemalloc traces can hang in Python 3.11.
    monkeypatch.setattr(_input, "_SMALL_BYTES", 1 << 30)
    content, message = HOSTILE[name]
    path = tmp_path / "a.tar"
    content += bytes(4 << 20)  # what follows is not read into memory
    path.write_bytes(gzip.compress(content, 1) if pack else content)
    tracemalloc.start()
    with pytest.raises(UserError, match=message) as error:
        texts(path)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 12 << 20
    assert str(error.value).startswith(f"{path}: ")


def test_a_member_is_not_larger_than_a_plain_archive(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(header(1 << 40) + bytes(1 << 20))
    with pytest.raises(UserError, match=r"states 1,099,511,627,776 bytes"):
        texts(tmp_path / "a.tar")


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_long_names_and_other_folders_are_read(tmp_path: Path, format: int) -> None:
    names = ["../up.jsonl", "./here.jsonl", "/root.jsonl", f"{'ü' * 90}/{'d' * 90}.jsonl"]
    with tarfile.open(tmp_path / "a.tar", "w", format=format) as archive:
        for name in names:
            info = tarfile.TarInfo(name)
            info.size = len(JSONL)
            info.pax_headers = {"comment": "x" * 700}
            archive.addfile(info, io.BytesIO(JSONL))
    assert texts(tmp_path / "a.tar") == TEXTS * 4
    assert texts(zipped(tmp_path / "a.zip", dict.fromkeys(names, JSONL))) == TEXTS * 4


def test_zip_archives_that_do_not_fill_their_file_are_refused(tmp_path: Path) -> None:
    one = zipped(tmp_path / "one.zip", {"a.jsonl": JSONL}).read_bytes()
    empty = zipped(tmp_path / "empty.zip", {}).read_bytes()
    path = tmp_path / "a.zip"
    for content in (one + one, empty + one):
        path.write_bytes(content)
        with pytest.raises(
            UserError, match=r"a\.zip: cannot .* another archive, precedes its first"
        ):
            texts(path)
    for content in (one + b"rest", one + one[:60]):
        path.write_bytes(content)
        with pytest.raises(UserError, match=r"a\.zip: cannot .*other data follows its end"):
            texts(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.jsonl", JSONL)
        archive.comment = b"a comment"
    assert texts(path) == TEXTS


def test_members_of_a_zip_archive_that_share_their_data_are_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("a.jsonl", JSONL)
        archive.filelist += archive.filelist * 9
    with pytest.raises(UserError, match=r"a\.zip: .*its members overlap"):
        texts(tmp_path / "a.zip")


def test_a_link_in_a_zip_archive_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        link = zipfile.ZipInfo("a.txt")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, "b.txt")
    with pytest.raises(UserError, match=r"a\.txt is a link, not a file"):
        texts(tmp_path / "a.zip")


# ---- What is refused ----


def test_a_bad_line_names_its_member(tmp_path: Path) -> None:
    path = zipped(tmp_path / "a.zip", {"d/a.jsonl": b'{"text": "a"}\n\n{"text": \n'})
    good, bad = texts(path)
    assert good == "a"
    assert isinstance(bad, BadRecord)
    assert bad.reason.startswith("line 3 of d/a.jsonl: not valid JSON")


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"a.jsonl": JSONL, "b.parquet": b"PAR1"}, r"b\.parquet: a member of the format parquet"),
        ({"a.jsonl": JSONL, "b.bin": b"\0\1"}, r"b\.bin: a member of unknown format"),
        ({"a.jsonl": JSONL, "b.zip": b"PK\x03\x04"}, r"b\.zip: a member of the format archive"),
        ({".hidden": b""}, "an archive without files"),
        ({"b.csv": b"id\n1\n"}, r'b\.csv: no column "text"'),
    ],
)
def test_members_that_cannot_be_read_are_refused(
    tmp_path: Path, members: dict[str, bytes], message: str
) -> None:
    for path in (zipped(tmp_path / "a.zip", members), tarred(tmp_path / "a.tar", members)):
        with pytest.raises(UserError, match=message):
            texts(path)


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.FIFOTYPE])
def test_links_in_a_tar_archive_are_refused(tmp_path: Path, kind: bytes) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("a.jsonl"))
        link = tarfile.TarInfo("b.jsonl")
        link.type, link.linkname = kind, "a.jsonl"
        archive.addfile(link)
    with pytest.raises(UserError, match=r"b\.jsonl is a link, not a file; unpack the archive"):
        texts(tmp_path / "a.tar")


def test_other_archives_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="an archive without files"):
        texts(zipped(tmp_path / "empty.zip", {}))
    zipped(tmp_path / "a.zip", {"a.jsonl": JSONL})
    (tmp_path / "a.zip.gz").write_bytes(gzip.compress((tmp_path / "a.zip").read_bytes()))
    with pytest.raises(UserError, match="a zip archive inside gz; unpack it"):
        texts(tmp_path / "a.zip.gz")
    content = bytearray((tmp_path / "a.zip").read_bytes())
    for header in (content.index(b"PK\x03\x04") + 6, content.index(b"PK\x01\x02") + 8):
        content[header] |= 1  # encrypted
    (tmp_path / "a.zip").write_bytes(content)
    with pytest.raises(UserError, match=r"as archive \(a\.jsonl: .*password.*unpack it"):
        texts(tmp_path / "a.zip")


def test_the_content_of_a_long_sample_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "LONGEST_BYTES", 5)
    with pytest.raises(UserError, match=r"0\.txt is longer than 5 bytes; split it"):
        texts(tarred(tmp_path / "a.tar", TEN), "txt")


def test_the_format_archive_is_not_given_to_other_files(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(JSONL)
    with pytest.raises(UserError, match="is no archive; leave out the format"):
        records(open_input(tmp_path / "a.jsonl", format="archive"))


def test_damage_that_the_reading_thread_meets_is_an_error(tmp_path: Path) -> None:
    """Large files are read ahead by a thread."""
    path = tmp_path / "a.tar"
    path.write_bytes(flipped(tar({f"{n}.txt": b"x" * 5000 for n in range(400)}), 100 * 5632 + 20))
    assert path.stat().st_size > _input._SMALL_BYTES
    with pytest.raises(UserError, match="fetch it again"):
        texts(path, "txt")
