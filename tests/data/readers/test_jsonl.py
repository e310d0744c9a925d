"""Each line of jsonl is a document, a bad document with position and reason, or blank."""

import json
import re
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.readings import LINES, PACK, TEXTS, read, records, small_steps
from tokamake.data.readers import BadRecord, jsonl, open_input

BAD = {
    b'{"text": ': r"not valid JSON \(unexpected end of data at character 9\); fix or remove",
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
def test_a_bad_line_keeps_its_position(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(LINES[:16] + b"\n" + line + b"\n" + LINES[16:])
    raw = open_input(path)
    (block,) = raw.blocks(("text",))
    assert isinstance(block.records[1], BadRecord)
    assert block.raw is not None
    assert block.raw[1] == line
    assert [record["text"] for record in block.records if isinstance(record, dict)] == TEXTS

    assert re.search(BAD[line], block.records[1].reason)
    assert raw.place(int(block.numbers[1])) == f"{path}:3"
    assert (raw.documents, raw.blank_lines) == (len(TEXTS) + 1, 1)


def test_nan_and_infinity_become_null(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a", "score": NaN}\n{"text": "b", "score": [-Infinity, NaN]}\n')
    assert records(open_input(path)) == [
        {"text": "a", "score": None},
        {"text": "b", "score": [None, None]},
    ]


OTHER_VALUES = ['"\\udc80"', "1e400", "-1e999", "9" * 5000, '{"a": ["\\ud800", NaN]}', '"\\u0000"']


@pytest.mark.parametrize("other", OTHER_VALUES)
def test_values_that_are_not_read_may_be_anything_that_python_reads(
    tmp_path: Path, other: str
) -> None:
    line = f'{{"a": {other}, "text": "x\u2028", "\\ud800": 1}}'
    for name, content in {
        "a.jsonl": f"{line}\r\n\ufeff{line}\n",
        "a.json": f"[{line},\n{line}]",
        "a.seq": f"\x1e{line}\n\x1e{line}\n",
    }.items():
        (tmp_path / name).write_text(content)
        assert read(tmp_path / name) == ["x\u2028"] * 2
    (bad,) = (
        {record.reason for record in records(open_input(tmp_path / "a.json"), "a")}
        if ("ud" in other and other[0] == '"')
        else {"a lone surrogate is no text"}
    )
    assert bad.startswith("a lone surrogate is no text")


def test_a_line_of_columns_is_a_table(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    tables: list[Any] = [
        {"text": TEXTS, "n": list(range(7))},
        {"n": dict.fromkeys("abcdefg", 1), "text": dict(zip("abcdefg", TEXTS, strict=True))},
    ]
    for table in tables:
        for content in (json.dumps(table), json.dumps(table, indent=1), json.dumps(table) + "\n"):
            path.write_text(content)
            raw = open_input(path)
            assert [record["text"] for record in records(raw)] == TEXTS
            assert (raw.unit, raw.documents) == ("row", 7)
    line = json.dumps({"text": ["a", "b"]}) + "\n"
    for content in (line * 2, '{"text": ["a"], "n": [1, 2]}', '{"text": ["a"], "n": 1}'):
        path.write_text(content)
        assert isinstance(records(open_input(path))[0]["text"], list)


def test_json_text_sequences_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    values = [json.dumps({"text": text}, indent=1) for text in TEXTS]
    path.write_text("".join(f"\x1e{value}\n" for value in [*values, '{"text": ', "3"]))
    with small_steps(7):
        raw = open_input(path)
        *good, cut, number = records(raw)
    assert [record["text"] for record in good] == TEXTS
    assert (raw.format, raw.place(3)) == ("json_seq", f"{path}: row 3")
    assert "not valid JSON" in cut.reason
    assert "not a JSON object" in number.reason


random_lines = st.one_of(
    st.text(max_size=12).map(lambda text: orjson.dumps({"text": text})),
    st.sampled_from(
        [*(line for line in BAD if len(line) < 40), b"", b" ", b"\t\r", b"\xef\xbb\xbf"]
    ),
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(random_lines, max_size=12),
    st.lists(st.integers(0, 1000), max_size=4),
    st.integers(1, 60),
    st.booleans(),
    st.sampled_from(["", *PACK]),
)
def test_ranges_cover_each_document_and_blank_line_once(
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
    pairs, num_documents, num_blank, raw_bytes = [], 0, 0, 0
    with small_steps(size):
        for start, end in pairwise(bounds):
            raw = open_input(path, byte_range=(start or 0, end))
            for block in raw.blocks(("text",)):
                assert block.raw is not None
                pairs += zip(block.records, block.raw, strict=True)
                for line, number, offset in zip(
                    block.raw, block.numbers, block.offsets, strict=True
                ):
                    if packing:
                        assert offset == -1
                    else:
                        assert (content + b"\n")[offset:].startswith(line + b"\n")
                        assert start <= offset < (len(content) if end is None else end)
                    if not start:
                        assert lines[number - 1] == line
            num_documents += raw.documents
            num_blank += raw.blank_lines
            raw_bytes += raw.bytes
    assert raw_bytes == path.stat().st_size
    assert num_documents + num_blank == len(lines)
    expected = [line for line in lines if line.removeprefix(b"\xef\xbb\xbf").strip()]
    assert [line for _, line in pairs] == expected
    for record, line in pairs:
        assert isinstance(record, BadRecord) == (line in BAD)
        if line not in BAD:
            assert record == json.loads(line)


class CountedBytes(bytes):
    """Bytes that count how many of them are searched."""

    searched = 0

    def find(self, *arguments: Any) -> int:
        CountedBytes.searched += len(self)
        return super().find(*arguments)

    def rfind(self, *arguments: Any) -> int:
        CountedBytes.searched += len(self)
        return super().rfind(*arguments)


def test_long_lines_are_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CountedBytes, "searched", 0)
    content = b"x" * 1_000_000 + b"\n" + b"y" * 500_000 + b"\n" + LINES
    chunks = [CountedBytes(content[start : start + 1000]) for start in range(0, len(content), 1000)]
    assert b"".join(jsonl.complete_parts(chunks, Path("a"))) == content
    assert len(content) <= CountedBytes.searched <= 1.1 * len(content)


def test_long_lines_are_parsed_at_most_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    word = "ü" * 25_000_000
    deep = b'{"a":' * 5_000_000
    path.write_bytes(
        orjson.dumps({"text": word}) + b"\n" + deep + b"\n" + b"[" * 20_000_000 + b"\n" + LINES
    )
    parsed: list[int] = []

    def loads(line: bytes) -> Any:
        parsed.append(len(line))
        return orjson.loads(line)

    names = {"loads": loads, "dumps": orjson.dumps, "JSONDecodeError": orjson.JSONDecodeError}
    monkeypatch.setattr(jsonl, "orjson", SimpleNamespace(**names))
    with small_steps(1 << 16):
        documents = read(path)
    assert sum(parsed) < 2.1 * path.stat().st_size
    assert documents[0] == word
    assert "nested too deep" in documents[1].reason
    assert "nested too deep" in documents[2].reason
    assert documents[3:] == TEXTS


@pytest.mark.parametrize("length", [1, 200, 300, 5000])
def test_short_and_long_lines_are_split_alike(tmp_path: Path, length: int) -> None:
    lines = [b'{"text": "%s%d"}' % (b"x" * length, number) for number in range(200_000 // length)]
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    with small_steps(70_001):
        blocks = list(open_input(path).blocks(("text",)))
    assert [line for block in blocks for line in block.raw or ()] == lines
    assert [record["text"].encode() for record in records(open_input(path))] == [
        line[10:-2] for line in lines
    ]
