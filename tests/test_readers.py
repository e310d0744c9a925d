"""Readers give every document once, however it is packed, and name the place of a bad one."""

import bz2
import gzip
import json
import lzma
from itertools import pairwise
from pathlib import Path

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
from backports import zstd
from hypothesis import given
from hypothesis import strategies as st

from tokamake.data import readers
from tokamake.errors import UserError

TEXTS = ["one", "zwei\nlines", "üç 😀", "", "five"]
LINES = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in TEXTS).encode()

PACKED = {
    "plain.jsonl": LINES,
    "crlf.jsonl": LINES.replace(b"\n", b"\r\n"),
    "bom.jsonl": b"\xef\xbb\xbf" + LINES,
    "no_final_newline.jsonl": LINES[:-1],
    "blank_lines.jsonl": LINES.replace(b"\n", b"\n\n"),
    "one.gz": gzip.compress(LINES),
    "members.gz": gzip.compress(LINES[:20]) + gzip.compress(LINES[20:]),
    "one.zst": zstd.compress(LINES),
    "frames.zst": zstd.compress(LINES[:20]) + zstd.compress(LINES[20:]),
    "one.xz": lzma.compress(LINES),
    "one.bz2": bz2.compress(LINES),
    "named_wrongly.jsonl": gzip.compress(LINES),
}


@pytest.mark.parametrize("name", PACKED)
def test_every_packing_gives_the_same_documents(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(PACKED[name])
    assert list(readers.read(path, "text")) == TEXTS


def test_parquet(tmp_path: Path) -> None:
    path = tmp_path / "table.parquet"
    parquet.write_table(arrow.table({"text": TEXTS, "id": range(5)}), path, row_group_size=2)
    assert list(readers.read(path, "text")) == TEXTS
    with pytest.raises(UserError, match=r'no column "body" among text, id'):
        list(readers.read(path, "body"))


@given(st.lists(st.text(max_size=20), max_size=12), st.lists(st.integers(0, 400), max_size=4))
def test_byte_ranges_share_out_a_file(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], cuts: list[int]
) -> None:
    path = tmp_path_factory.mktemp("ranges") / "a.jsonl"
    path.write_bytes(b"".join(json.dumps({"text": t}).encode() + b"\n" for t in texts))
    bounds = [0, *sorted(cuts), None]
    parts = [readers.read(path, "text", (start, end)) for start, end in pairwise(bounds)]
    assert [text for part in parts for text in part] == texts


BAD = {
    b'{"text": "a"}\n{"text": \n': r"bad\.jsonl:2: not valid JSON",
    b'{"text": "a"}\n{"body": "b"}\n': r'bad\.jsonl:2: no key "text"',
    b'{"text": "a"}\n["b"]\n': r'bad\.jsonl:2: no key "text"',
    b'{"text": 3}\n': r'bad\.jsonl:1: "text" holds int',
    b'{"text": "\xff"}\n': r"bad\.jsonl:1: not valid JSON",
    b'{"text": "\\ud800"}\n': r"bad\.jsonl:1: not valid JSON",
    gzip.compress(LINES)[:-9]: r"bad\.jsonl:\d+: cannot be decompressed",
    zstd.compress(LINES * 100)[:-9]: r"bad\.jsonl:\d+: cannot be decompressed",
}


@pytest.mark.parametrize("content", BAD)
def test_bad_documents_are_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=BAD[content]):
        list(readers.read(path, "text"))


def test_missing_and_unknown_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        list(readers.read(tmp_path / "none.jsonl", "text"))
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n")
    with pytest.raises(UserError, match="of no known format"):
        list(readers.read(tmp_path / "picture.png", "text"))
