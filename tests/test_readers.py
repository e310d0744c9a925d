"""Readers give every document once, however it is packed, and name the place of a bad one."""

import bz2
import gzip
import hashlib
import json
import lzma
import random
import re
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import orjson
import pytest
from backports import zstd
from hypothesis import given, settings
from hypothesis import strategies as st

from tokamake.data.readers import Bad, Input, _compression, _input, jsonl, open_input, sniff
from tokamake.errors import UserError

TEXTS = ["one", "zwei\nlines", "üç 😀", "", "five", "\u2028 \u2029 \x85 \0 \x0b", "\r\n"]
LINES = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in TEXTS).encode()


def checked(data: bytes) -> bytes:
    """One zstd frame with a checksum, which files of `zstd` have."""
    return zstd.compress(data, options={zstd.CompressionParameter.checksum_flag: 1})


PACK = {"gz": gzip.compress, "zst": checked, "xz": lzma.compress, "bz2": bz2.compress}
SKIPPABLE = struct.pack("<II", 0x184D2A53, 5) + b"notes"


def records(opened: Input, *keys: str) -> list[Any]:
    return [record for block in opened.blocks(keys or ("text",)) for record in block.records]


def read(path: Path, **options: Any) -> list[Any]:
    return [
        record if isinstance(record, Bad) else record["text"]
        for record in records(open_input(path, **options))
    ]


@contextmanager
def small_steps(size: int) -> Iterator[None]:
    """Read and unpack a few bytes at a time, so that all things lie across borders."""
    with (
        patch.object(_input, "CHUNK_BYTES", size),
        patch.object(jsonl, "CHUNK_BYTES", size),
        patch.object(jsonl, "_FIRST_STEP", size),
        patch.object(jsonl, "_MOST_LINES", 3),
        patch.object(_compression, "_PIECE_BYTES", size),
        patch.object(_compression, "_OUTPUT_BYTES", size),
    ):
        yield


PACKED = {
    "plain.jsonl": LINES,
    "crlf.jsonl": LINES.replace(b"\n", b"\r\n"),
    "bom.jsonl": b"\xef\xbb\xbf" + LINES,
    "files_with_bom_in_a_row.jsonl": (b"\xef\xbb\xbf" + LINES[:16]) + b"\xef\xbb\xbf" + LINES[16:],
    "no_final_newline.jsonl": LINES[:-1],
    "blank_lines.jsonl": LINES.replace(b"\n", b"\n\n \t\r\n"),
    "no_suffix": LINES,
    "named_wrongly.parquet": LINES,
    "named_as_text.txt": b"\n" + LINES,
    "named_as_gz.jsonl.gz": LINES,
    "frames.zst": SKIPPABLE + checked(LINES[:20]) + SKIPPABLE + checked(LINES[20:]) + SKIPPABLE,
    "padded.gz": gzip.compress(LINES) + bytes(7),
    "padded.xz": lzma.compress(LINES[:20]) + bytes(8) + lzma.compress(LINES[20:]) + bytes(4),
    "long_window.zst": zstd.compress(LINES * 1, options={zstd.CompressionParameter.window_log: 31}),
}
for _name, _pack in PACK.items():
    PACKED[f"one.{_name}"] = _pack(LINES)
    PACKED[f"members.{_name}"] = _pack(LINES[:20]) + _pack(b"") + _pack(LINES[20:])
    PACKED[f"{_name}_named_wrongly.jsonl"] = _pack(LINES)
    PACKED[f"{_name}_named_as_text.txt"] = _pack(LINES)


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("size", [1 << 23, 5])
def test_every_packing_gives_the_same_documents(tmp_path: Path, name: str, size: int) -> None:
    path = tmp_path / name
    path.write_bytes(PACKED[name])
    with small_steps(size):
        opened = open_input(path)
        assert [record["text"] for record in records(opened)] == TEXTS
    assert opened.documents == len(TEXTS)
    assert opened.format == "jsonl"
    assert opened.bytes == len(PACKED[name])
    assert opened.sha256 == hashlib.sha256(PACKED[name]).hexdigest()


def test_members_without_number(tmp_path: Path) -> None:
    lines = [b'{"text": "%d"}\n' % number for number in range(3000)]
    for name, pack in PACK.items():
        path = tmp_path / f"many.{name}"
        path.write_bytes(b"".join(map(pack, lines)))
        assert read(path) == [str(number) for number in range(3000)]


BAD = {
    b'{"text": ': r"not valid JSON \(unexpected end of data at character 9\); mend or remove",
    b'{"text": "a",}': "not valid JSON .*comma",
    b"{'text': 'a'}": "not valid JSON",
    b'{"text": "a"': "not valid JSON",
    b'{"text": "\0"}': "not valid JSON .*control character",
    b'{"text": "a"} {"text": "b"}': "more than one JSON value in a line .*jq -c",
    b'{"text": "a"}\r{"text": "b"}': r"lone CR as line end; .* tr '\\r' '\\n'",
    b'{"text": "\xff"}': r"not valid UTF-8 \(0xff at byte 10 of the line\)",
    b'{"text": "\xed\xa0\x80"}': "not valid UTF-8 .0xed at byte 10",
    b'{"text": "\\ud800"}': "a lone surrogate is no text",
    b'{"text": "\\udc00\\ud800"}': "a lone surrogate is no text",
    b'{"text": ' + b"[" * 5000 + b"]" * 5000 + b"}": "nested too deep",
    b'{"x": NaN, "text": "\\ud800"}': "not valid JSON|lone surrogate",
    b'["text"]': "not a JSON object",
    b'"text"': "not a JSON object",
    b"null": "not a JSON object",
    "｛": "not valid JSON",
    b"\x1f\x8b\x08": "not valid UTF-8",
}
BAD = {key.encode() if isinstance(key, str) else key: value for key, value in BAD.items()}


@pytest.mark.parametrize("line", BAD)
def test_bad_lines_stand_where_they_were(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(LINES[:16] + b"\n" + line + b"\n" + LINES[16:])
    opened = open_input(path)
    (block,) = opened.blocks(("text",))
    assert isinstance(block.records[1], Bad)
    assert block.raw is not None
    assert block.raw[1] == line
    assert [record["text"] for record in block.records if isinstance(record, dict)] == TEXTS

    assert re.search(BAD[line], block.records[1].reason)
    assert opened.place(int(block.numbers[1])) == f"{path}:3"
    assert (opened.documents, opened.blank_lines) == (len(TEXTS) + 1, 1)


def test_what_orjson_is_too_strict_for(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a", "score": NaN}\n{"text": "b", "score": [-Infinity, NaN]}\n')
    assert records(open_input(path)) == [
        {"text": "a", "score": None},
        {"text": "b", "score": [None, None]},
    ]


kinds = st.one_of(
    st.text(max_size=12).map(lambda text: orjson.dumps({"text": text})),
    st.sampled_from(
        [*(line for line in BAD if len(line) < 40), b"", b" ", b"\t\r", b"\xef\xbb\xbf"]
    ),
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(kinds, max_size=12),
    st.lists(st.integers(0, 1000), max_size=4),
    st.integers(1, 60),
    st.booleans(),
    st.sampled_from(["", *PACK]),
)
def test_documents_and_blank_lines_account_for_every_line(
    tmp_path_factory: pytest.TempPathFactory,
    lines: list[bytes],
    cuts: list[int],
    size: int,
    final: bool,
    packing: str,
) -> None:
    lines = [b'{"text": "first"}', *lines]
    content = b"\n".join(lines) + b"\n" * final
    lines = content.split(b"\n")[: None if content[-1:] != b"\n" else -1]
    path = tmp_path_factory.mktemp("lines") / "a.jsonl"
    path.write_bytes(PACK[packing](content) if packing else content)
    bounds = [0, None]
    if not packing:
        bounds = [0, *sorted(cut % (len(content) + 1) for cut in cuts), None]
    found, documents, blank, raw_bytes = [], 0, 0, 0
    with small_steps(size):
        for start, end in pairwise(bounds):
            opened = open_input(path, byte_range=(start or 0, end))
            for block in opened.blocks(("text",)):
                assert block.raw is not None
                found += zip(block.records, block.raw, strict=True)
                for raw, number, offset in zip(*block[3:], *block[1:3], strict=True):
                    if packing:
                        assert offset == -1
                    else:
                        assert (content + b"\n")[offset:].startswith(raw + b"\n")
                        assert start <= offset < (len(content) if end is None else end)
                    if not start:
                        assert lines[number - 1] == raw
            documents += opened.documents
            blank += opened.blank_lines
            raw_bytes += opened.bytes
    assert raw_bytes == path.stat().st_size
    assert documents + blank == len(lines)
    expected = [line for line in lines if line.removeprefix(b"\xef\xbb\xbf").strip()]
    assert [raw for _, raw in found] == expected
    for record, raw in found:
        assert isinstance(record, Bad) == (raw in BAD)
        if raw not in BAD:
            assert record == json.loads(raw)


def test_ranges_outside_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINES)
    for byte_range in ((0, len(LINES) + 1), (len(LINES) + 1, None), (9, 5), (-1, None)):
        with pytest.raises(UserError, match=r"a\.jsonl: byte range .* plan again"):
            open_input(path, byte_range=byte_range)
    assert read(path, byte_range=(len(LINES), None)) == []
    opened = open_input(path, byte_range=(3, None))
    block = next(opened.blocks(("text",)))
    place = int(block.numbers[0]), int(block.offsets[0])
    assert opened.place(*place) == f"{path}:2"
    with pytest.MonkeyPatch.context() as patched:  # lines are not counted through terabytes
        patched.setattr(_input, "_COUNTED_BYTES", 2)
        assert opened.place(*place) == f"{path}: byte 16"
    for name in ("a.gz", "a.txt"):
        packed = tmp_path / name
        packed.write_bytes(gzip.compress(LINES) if name == "a.gz" else b"text")
        with pytest.raises(UserError, match="no byte ranges; read it whole"):
            open_input(packed, byte_range=(0, 5))


@pytest.mark.parametrize("name", PACK)
def test_cut_compressed_files_never_pass(tmp_path: Path, name: str) -> None:
    seeded = random.Random(1)
    lines = [orjson.dumps({"text": seeded.randbytes(20).hex()}) + b"\n" for _ in range(40)]
    parts = [PACK[name](b"".join(lines[:20])), PACK[name](b"".join(lines[20:]))]
    whole = b"".join(parts)
    path = tmp_path / f"a.{name}"
    ends = [len(parts[0]) + near for near in range(-12, 13)]
    for cut in sorted(
        {*range(1, 40), *range(40, len(whole) - 12, 7), *ends, *range(len(whole) - 12, len(whole))}
    ):
        path.write_bytes(whole[:cut])
        if cut == len(parts[0]):  # nobody can see that a whole member is gone
            assert len(read(path)) == 20
            continue
        if cut < 6 and _compression.compression(whole[:cut]) == "":
            with pytest.raises(UserError):  # not even its kind can be told
                open_input(path)
            continue
        with pytest.raises(UserError, match=rf"a\.{name}: {name} data is .* fetch it again"):
            read(path)


@pytest.mark.parametrize("name", PACK)
def test_changed_bytes_never_pass(tmp_path: Path, name: str) -> None:
    seeded = random.Random(2)
    texts = [seeded.randbytes(20).hex() for _ in range(40)]
    whole = PACK[name](b"".join(orjson.dumps({"text": text}) + b"\n" for text in texts))
    path = tmp_path / f"a.{name}"
    caught = 0
    positions = range(12, len(whole), 3)
    for position in positions:
        changed = bytearray(whole)
        changed[position] ^= 1 << seeded.randrange(8)
        path.write_bytes(changed)
        try:
            assert read(path) == texts  # a bit without a meaning
        except UserError:
            caught += 1
    assert caught > 0.95 * len(positions)


@pytest.mark.parametrize("name", PACK)
@pytest.mark.parametrize(
    "garbage", [b"x", b"garbage after the end", b"\0\0\0", bytes(5) + b"x", b"\n", LINES]
)
def test_trailing_garbage_never_passes(tmp_path: Path, name: str, garbage: bytes) -> None:
    path = tmp_path / f"a.{name}"
    path.write_bytes(PACK[name](LINES) + garbage)
    if name == "gz" and not garbage.strip(b"\0"):
        assert read(path) == TEXTS
        return
    with pytest.raises(UserError, match=rf"a\.{name}: {name} data .*"):
        read(path)


@pytest.mark.parametrize("name", PACK)
def test_memory_stays_bounded(tmp_path: Path, name: str) -> None:
    packed = PACK[name](b"x" * 10_000_000) * 10
    largest = 0
    for block in _compression.unpack([packed], name, tmp_path, block_bytes=1 << 20):
        largest = max(largest, len(block))
    assert largest <= 2 << 20


def test_long_lines_are_quick(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    word = "ü" * 25_000_000
    deep = b'{"a":' * 5_000_000
    path.write_bytes(
        orjson.dumps({"text": word}) + b"\n" + deep + b"\n" + b"[" * 20_000_000 + b"\n" + LINES
    )
    begin = time.process_time()
    with small_steps(1 << 16):
        found = read(path)
    assert time.process_time() - begin < 10
    assert found[0] == word
    assert "nested too deep" in found[1].reason
    assert "nested too deep" in found[2].reason
    assert found[3:] == TEXTS


WHOLE = {
    "array.json": (b'[{"text": "a"},\n{"text": "b"}]', r"jq -c '\.\[\]'"),
    "array_in_a_line.json": (b'[{"text": "a"},{"text": "b"}]\n', r"jq -c '\.\[\]'"),
    "array.jsonl.gz": (gzip.compress(b'[\n  {"text": "a"}\n]'), r"jq -c '\.\[\]'"),
    "long_array.json": (b"[" + LINES.replace(b"\n", b",") * 9000, r"jq -c '\.\[\]'"),
    "pretty.json": (b'{\n  "text": "a"\n}\n', r"jq -c \. "),
    "mark.jsonl": ('{"text": "a"}\n'.encode("utf-16"), "iconv -f UTF-16 -t UTF-8"),
    "le.jsonl": ('{"text": "a"}\n'.encode("utf-16-le"), "iconv -f UTF-16LE"),
    "be.jsonl": ('{"text": "a"}\n'.encode("utf-16-be"), "iconv -f UTF-16BE"),
    "mark32.jsonl": ('{"text": "a"}\n'.encode("utf-32"), "iconv -f UTF-32 "),
    "be32.jsonl": ('{"text": "a"}\n'.encode("utf-32-be"), "iconv -f UTF-32BE"),
    "wide.txt.xz": (lzma.compress("text".encode("utf-16")), "iconv -f UTF-16 "),
    "picture.png": (b"\x89PNG\r\n\x1a\n\0\0", "of no known format"),
    "binary.jsonl": (b"\x80\0\0\1\2\3", "of no known format"),
    "a.zip": (b"PK\x03\x04...", "a zip archive; unpack it"),
    "a.tar.gz": (gzip.compress(bytes([65]) * 257 + b"ustar\x0000"), "a tar archive; unpack it"),
    "words": (b"Once upon a time\n", "of no known format .*name its format"),
    "empty.gz": (b"", r"is empty, which no \.gz file is"),
    "empty.parquet": (b"", r"is empty, which no \.parquet file is"),
}


@pytest.mark.parametrize("name", WHOLE)
def test_files_that_are_refused_as_a_whole(tmp_path: Path, name: str) -> None:
    content, message = WHOLE[name]
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        read(path)
    assert str(path) in str(error.value)


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.jsonl: cannot be read \(No such file"):
        open_input(tmp_path / "none.jsonl")
    with pytest.raises(UserError, match="is a folder; name files"):
        open_input(tmp_path)
    with pytest.raises(UserError, match=r"loop: cannot be read"):
        (tmp_path / "loop").symlink_to(tmp_path / "loop")
        open_input(tmp_path / "loop")


def test_empty_files_hold_nothing(tmp_path: Path) -> None:
    for name, content in {"a.jsonl": b"", "b": b"\n \n", "c.gz": gzip.compress(b"")}.items():
        (tmp_path / name).write_bytes(content)
        opened = open_input(tmp_path / name)
        assert records(opened) == []
        assert (opened.format, opened.documents) == ("jsonl", 0)
        assert opened.blank_lines == content.count(b"\n") * (name == "b")


def test_a_file_that_shrinks_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINES)
    opened = open_input(path, byte_range=(0, len(LINES) - 5))
    with small_steps(8):
        chunks = opened.chunks(0, len(LINES))
        next(chunks)
        path.write_bytes(LINES[:20])
        with pytest.raises(UserError, match="became shorter"):
            list(chunks)


TEXT_FILES = {
    "a.txt": b"Once upon\n\na time\r\n",
    "b.MD": b"[link](there)\n",
    "c.tex": b"{\\bf bold}\n",
    "d.rst.bz2": bz2.compress("üç\0".encode()),
    "e.txt": b"",
    "f.text": b"\xef\xbb\xbf{\n}",
    "g.txt.zst": checked(b"PAR"),
}


@pytest.mark.parametrize("name", TEXT_FILES)
@pytest.mark.parametrize("size", [1 << 23, 3])
def test_a_text_file_is_one_document(tmp_path: Path, name: str, size: int) -> None:
    path = tmp_path / name
    path.write_bytes(TEXT_FILES[name])
    plain = {"d.rst.bz2": bz2.decompress, "g.txt.zst": zstd.decompress}.get(name, bytes)
    content = plain(TEXT_FILES[name])
    assert sniff(path)[0] == "text"
    with small_steps(size):
        opened = open_input(path)
        (block,) = opened.blocks(("body",))
    assert block.records == [{"body": content.decode("utf-8-sig")}]
    assert block.raw == [content]
    assert list(block.numbers) == [1]
    assert opened.sha256 == hashlib.sha256(TEXT_FILES[name]).hexdigest()


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"caf\xe9")
    opened = open_input(path)
    (block,) = opened.blocks(("text",))
    assert "0xe9 at byte 3" in block.records[0].reason
    assert block.raw == [b"caf\xe9"]
    with pytest.raises(UserError, match="one text, not title, text"):
        records(opened, "title", "text")


def test_a_given_format_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "words"
    path.write_bytes(b"Once upon a time\n")
    assert read(path, format="text") == ["Once upon a time\n"]
    path.write_bytes(LINES)
    assert read(path, format="text") == [LINES.decode()]
    assert sniff(path) == ("jsonl", "")
    with pytest.raises(UserError, match="no data/readers plug-in is called 'csv'"):
        open_input(path, format="csv")


def test_reading_twice_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINES)
    opened = open_input(path)
    assert records(opened) == records(opened)
    assert (opened.documents, opened.bytes) == (len(TEXTS), len(LINES))
    next(opened.blocks(("text",)))  # left alone half-way, without harm
