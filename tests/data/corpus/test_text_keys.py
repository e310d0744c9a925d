"""Keys of the first documents, and the one that holds the text."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
from pyarrow import ipc

from tests.support.readings import PACK
from tokamake.data.corpus.text_keys import first_documents, guess_text_key
from tokamake.errors import UserError

PROSE = "Once upon a time, there was a small language model."
ROWS = [
    {"id": number, "hash": "f" * 64, "story": f"{PROSE} {number}", "meta": {"note": "too short"}}
    for number in range(5)
]
Write = Callable[[Path], object]


def lines(rows: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def write_arrow(path: Path) -> None:
    table = arrow.Table.from_pylist(ROWS)
    with ipc.new_file(path, table.schema) as writer:
        writer.write_table(table)


FILES: dict[str, Write] = {
    "a.jsonl": lambda path: path.write_bytes(lines(ROWS)),
    "a.jsonl.gz": lambda path: path.write_bytes(gzip.compress(lines(ROWS))),
    "a.jsonl.zst": lambda path: path.write_bytes(PACK["zst"](lines(ROWS))),
    "a.jsonl.xz": lambda path: path.write_bytes(PACK["xz"](lines(ROWS))),
    "a.json": lambda path: path.write_text(json.dumps(ROWS, indent=1)),
    "a.parquet": lambda path: parquet.write_table(arrow.Table.from_pylist(ROWS), path),
    "a.arrow": write_arrow,
    "a.csv": lambda path: path.write_text(
        "id;story\n" + "".join(f"{row['id']};{row['story']}\n" for row in ROWS)
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_the_text_is_found_in_each_format(tmp_path: Path, name: str) -> None:
    FILES[name](tmp_path / name)
    first = first_documents(tmp_path / name)
    assert (first.number, first.is_all, first.is_empty) == (5, True, False)
    assert first.texts["story"] == [row["story"] for row in ROWS]
    assert guess_text_key([first]) == "story"
    keys = {"id", "story"} if name == "a.csv" else {"id", "hash", "story", "meta.note"}
    assert {*first.texts} == keys


def test_a_text_file_is_a_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(PROSE)
    first = first_documents(tmp_path / "a.txt")
    assert (first.format, first.texts, guess_text_key([first])) == (
        "text",
        {"text": [PROSE]},
        "text",
    )


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        # A usual name, also of short texts; else the longest texts.
        ([{"summary": PROSE * 3, "content": "short"}], "content"),
        ([{"title": PROSE, "plot": PROSE * 2}], "plot"),
        # Other scripts have no spaces.
        ([{"wenzhang": "从前有一个小小的语言模型，它想学会写故事和诗歌。"}], "wenzhang"),
        ([{"meta": {"text": PROSE}}], "meta.text"),
        # Numbers, addresses, identifiers, and names that a table cannot hold are no text.
        ([{"id": 1, "url": "https://example.org/a/long/path"}], ""),
        ([{"my text": PROSE}], ""),
        # Most documents need it.
        ([{"text": PROSE}, {"id": 1}], ""),
        ([{}], ""),
    ],
)
def test_guesses(tmp_path: Path, rows: list[dict[str, Any]], expected: str) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines(rows))
    assert guess_text_key([first_documents(tmp_path / "a.jsonl")]) == expected


def test_files_share_a_key_and_empty_ones_decide_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines([{"title": PROSE * 2, "plot": PROSE}]))
    (tmp_path / "b.jsonl").write_bytes(lines([{"plot": PROSE}]))
    (tmp_path / "c.jsonl").write_bytes(b"")
    parquet.write_table(arrow.table({"v": [[1.0]]}), tmp_path / "d.parquet")
    first = [first_documents(tmp_path / f"{name}.jsonl") for name in "abc"]
    assert guess_text_key(first) == "plot"
    table = first_documents(tmp_path / "d.parquet")
    assert ([each.is_empty for each in first], table.is_empty) == ([False, False, True], False)
    assert guess_text_key([*first, table]) == ""


def test_bad_documents_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\n{"text": \n')
    first = first_documents(path)
    assert (first.texts, first.number) == ({"text": ["a"]}, 1)
    assert "a.jsonl:2: not valid JSON" in first.bad
    path.write_text('{"text": \n')
    with pytest.raises(UserError, match=r"a\.jsonl:1: not valid JSON"):
        first_documents(path)
