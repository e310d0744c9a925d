"""Readers return each document once for all compressions and byte ranges."""

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
# RFC 8878: a frame without content size, with one raw block and a window of 2**28 bytes. Decoders
# refuse such a window by default.
LONG_WINDOW = b"\x28\xb5\x2f\xfd\0" + bytes([(28 - 10) << 3])
LONG_WINDOW += (len(LINES) << 3 | 1).to_bytes(3, "little") + LINES

PACKED = {
    "plain.jsonl": LINES,
    "crlf.jsonl": LINES.replace(b"\n", b"\r\n"),
    "bom.jsonl": b"\xef\xbb\xbf" + LINES,
    "concatenated_with_bom.jsonl": (b"\xef\xbb\xbf" + LINES[:16]) + b"\xef\xbb\xbf" + LINES[16:],
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
    PACKED[f"{_name}_named_as_table.parquet"] = _pack(LINES)


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("size", [1 << 23, 5])
def test_each_compression_gives_the_same_documents(tmp_path: Path, name: str, size: int) -> None:
    path = tmp_path / name
    path.write_bytes(PACKED[name])
    with small_steps(size):
        raw = open_input(path)
        assert [record["text"] for record in records(raw)] == TEXTS
    assert raw.documents == len(TEXTS)
    assert raw.format == "jsonl"
    assert raw.bytes == len(PACKED[name])
    assert raw.sha256 == hashlib.sha256(PACKED[name]).hexdigest()


def test_invalid_byte_ranges_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINES)
    for byte_range in ((0, len(LINES) + 1), (len(LINES) + 1, None), (9, 5), (-1, None)):
        with pytest.raises(UserError, match=r"a\.jsonl: byte range .* rerun plan"):
            open_input(path, byte_range=byte_range)
    assert read(path, byte_range=(len(LINES), None)) == []
    for name in ("a.gz", "a.txt"):
        packed = tmp_path / name
        packed.write_bytes(gzip.compress(LINES) if name == "a.gz" else b"text")
        with pytest.raises(UserError, match="no byte ranges; read the whole file"):
            open_input(packed, byte_range=(0, 5))


def test_place_is_a_line_number_or_far_into_a_file_a_byte(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINES)
    raw = open_input(path, byte_range=(3, None))
    block = next(raw.blocks(("text",)))
    position = int(block.numbers[0]), int(block.offsets[0])
    assert raw.place(*position) == f"{path}:2"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(_input, "_COUNTED_BYTES", 2)
        assert raw.place(*position) == f"{path}: byte 16"


def test_empty_files_have_no_documents(tmp_path: Path) -> None:
    for name, content in {"a.jsonl": b"", "b": b"\n \n", "c.gz": gzip.compress(b"")}.items():
        (tmp_path / name).write_bytes(content)
        raw = open_input(tmp_path / name)
        assert records(raw) == []
        assert (raw.format, raw.documents) == ("jsonl", 0)
        assert raw.blank_lines == content.count(b"\n") * (name == "b")


def test_a_file_truncated_during_reading_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINES)
    raw = open_input(path, byte_range=(0, len(LINES) - 5))
    with small_steps(8):
        chunks = raw.chunks(0, len(LINES))
        next(chunks)
        path.write_bytes(LINES[:20])
        with pytest.raises(UserError, match="was truncated while being read"):
            list(chunks)


def test_a_second_reading_resets_the_counts(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINES)
    raw = open_input(path)
    assert records(raw) == records(raw)
    assert (raw.documents, raw.bytes) == (len(TEXTS), len(LINES))
    next(raw.blocks(("text",)))  # an abandoned iterator does no harm
