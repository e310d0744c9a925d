"""A JSON array, or objects of several lines, give the documents that jsonl gives."""

import gzip
import hashlib
import json
from pathlib import Path

import pytest

from tests.support.readings import TEXTS, records
from tokamake.data.readers import BadRecord, open_input, sniff
from tokamake.data.readers import json as reader
from tokamake.errors import UserError

ROWS = [{"text": text, "id": number} for number, text in enumerate(TEXTS)]
FILES = {
    "array.json": json.dumps(ROWS).encode(),
    "array.jsonl": json.dumps(ROWS, ensure_ascii=False).encode(),
    "pretty.json": json.dumps(ROWS, indent=2).encode(),
    "lines.json": b"[" + b",\n".join(json.dumps(row).encode() for row in ROWS) + b"]\n",
    "mark.json": b"\xef\xbb\xbf" + json.dumps(ROWS).encode(),
    "no_suffix": json.dumps(ROWS, indent=1).encode(),
    "packed.json.gz": gzip.compress(json.dumps(ROWS).encode()),
    "objects.json": "\n\n".join(json.dumps(row, indent=4) for row in ROWS).encode(),
    "long.json": b"[" + b" " * 100_000 + json.dumps(ROWS).encode()[1:],
}


@pytest.mark.parametrize("name", FILES)
def test_each_form_gives_the_same_documents(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(FILES[name])
    raw = open_input(path)
    assert [record["text"] for record in records(raw)] == TEXTS
    assert (raw.format, raw.documents, raw.bytes) == ("json", len(TEXTS), len(FILES[name]))
    assert raw.sha256 == hashlib.sha256(FILES[name]).hexdigest()
    assert raw.place(3) == f"{path}: row 3"


def test_rows_have_consecutive_numbers_in_all_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_MAX_ROWS", 3)
    path = tmp_path / "a.json"
    path.write_bytes(FILES["array.json"])
    blocks = list(open_input(path).blocks(("text",)))
    assert [block.numbers.tolist() for block in blocks] == [[0, 1, 2], [3, 4, 5], [6]]


def test_bad_rows_are_bad_documents_with_their_content(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('[{"text": "a"}, 3, ["x"], {"text": "\\ud800"}, {"text": "b", "v": NaN}]')
    first, number, a_list, surrogate, last = records(open_input(path))
    assert (first["text"], last["text"], last["v"]) == ("a", "b", None)
    assert number == BadRecord(
        "not a JSON object with keys, as each row should be; fix or remove the row", b"3"
    )
    assert a_list.raw == b'["x"]'
    assert "a lone surrogate is no text" in surrogate.reason
    assert surrogate.raw == b'{"text": "\\ud800"}'


def test_integers_of_any_length_are_numbers_as_in_jsonl(tmp_path: Path) -> None:
    row = '{\n"text": "a", "n": %s\n}\n'
    for digits in ("18446744073709551616", "9" * 5000, "-9223372036854775809"):
        (tmp_path / "a.json").write_text(row % digits + row % "1")
        assert [row["text"] for row in records(open_input(tmp_path / "a.json"))] == ["a", "a"]


@pytest.mark.parametrize("content", [b"[]", b"[\n]\n", b"[ ]"])
def test_an_empty_array_has_no_documents(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.json").write_bytes(content)
    raw = open_input(tmp_path / "a.json")
    assert (records(raw), raw.format) == ([], "json")


BROKEN = {
    "cut": (b'[{"text": "a"},\n {"te', r"a\.json:2: not valid JSON .* lost documents"),
    "comma": (b'[{"text": "a"}\n {"text": "b"}]', r"a\.json:2: not valid JSON \(Expecting ','"),
    "latin": ('[\n{"text": "é"}]'.encode("latin1"), r"0xe9 at byte 12\); convert it: iconv"),
    "deep": (b"[\n" + b"[" * 100_000, "nested too deep"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused_with_its_line(tmp_path: Path, name: str) -> None:
    content, message = BROKEN[name]
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(UserError, match=message):
        records(open_input(tmp_path / "a.json"))


def test_a_file_that_fills_the_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "LONGEST_BYTES", 1000)
    (tmp_path / "a.json").write_bytes(b"[" + b" " * 1000 + b'{"text": "a"}]')
    with pytest.raises(UserError, match=r"more than 1,000 bytes .* convert it: jq -cn --stream"):
        records(open_input(tmp_path / "a.json"))
    (tmp_path / "a.json").write_bytes(b"{\n" + b" " * 1000 + b'"text": "a"}]')
    with pytest.raises(UserError, match=r"convert it: jq -c \. "):
        records(open_input(tmp_path / "a.json"))


@pytest.mark.parametrize("name", ["notes.md", "a.txt", "table.csv"])
def test_the_name_decides_for_text_and_tables(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"[link] or text\n")
    assert sniff(tmp_path / name)[0] == ("csv" if name.endswith("csv") else "text")


def test_an_array_of_other_values_stays_jsonl(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'["a", "b"]\n{"text": "c"}\n')
    raw = open_input(tmp_path / "a.jsonl")
    assert isinstance(records(raw)[0], BadRecord)
    assert raw.format == "jsonl"


def test_an_array_is_not_read_as_jsonl(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(FILES["pretty.json"])
    (tmp_path / "a.txt").write_bytes(FILES["array.json"])
    for name in ("a.json", "a.txt"):
        with pytest.raises(UserError, match="is not one JSON object per line; give it the format"):
            records(open_input(tmp_path / name, format="jsonl"))
