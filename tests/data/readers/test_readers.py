"""Readers give every document once, however it is packed or cut into ranges."""

import gzip
import hashlib
import lzma
import struct
from pathlib import Path

import pytest

from tests.support.readings import LINES, PACK, TEXTS, checked, read, records, small_steps
from tokamake.data.readers import _input, open_input
from tokamake.errors import UserError

SKIPPABLE = struct.pack("<II", 0x184D2A53, 5) + b"notes"
# RFC 8878: no content size, a window of 2**28 bytes, which is more than decoders take unasked, and
# one raw block.
LONG_WINDOW = b"\x28\xb5\x2f\xfd\0" + bytes([(28 - 10) << 3])
LONG_WINDOW += (len(LINES) << 3 | 1).to_bytes(3, "little") + LINES

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
    "long_window.zst": LONG_WINDOW,
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


def test_reading_twice_counts_once(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINES)
    opened = open_input(path)
    assert records(opened) == records(opened)
    assert (opened.documents, opened.bytes) == (len(TEXTS), len(LINES))
    next(opened.blocks(("text",)))  # left alone half-way, without harm
