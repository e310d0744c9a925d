"""Tables with a tab between columns, and JSON lines."""

import json
from pathlib import Path

import pytest

from tokamake.errors import UserError
from tokamake.finetune.tasks._table import TextTable
from tokamake.train.objectives.classification.data import Example

PAIRS = TextTable("one", "two")


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode())
    return path


def test_quotation_marks_and_carriage_returns_are_text(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", '\ufeffone\ttwo\tlabel\r\n"a\tb\rc\t1\r\n\r\nd"\te\t0')
    assert [*PAIRS.read(path, {})] == [
        Example(('"a',), "b\rc", "1", f"{path}:2"),
        Example(('d"',), "e", "0", f"{path}:4"),
    ]


def test_json_lines_have_names_of_columns_as_keys(tmp_path: Path) -> None:
    rows = [{"one": "a", "two": "b", "label": 1}, {"one": "c\t", "two": "d", "label": "x"}]
    path = write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)))
    assert [(e.firsts, e.second, e.label) for e in PAIRS.read(path, {})] == [
        (("a",), "b", "1"),
        (("c\t",), "d", "x"),
    ]


def test_without_the_column_of_labels_there_are_none(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", "one\ttwo\na\tb\n")
    assert [example.label for example in PAIRS.read(path, {})] == [None]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.tsv", "one\ttwo\tlabel\na\tb\n", r"a.tsv:2: has 2 columns instead of 3"),
        ("a.tsv", "x\ty\n", r"a.tsv:1: has the columns x, y, without one and two"),
        ("a.jsonl", '{"one": "a"}\n', r"a.jsonl:1: has no two, only one"),
        ("a.jsonl", "\n[1]\n", r"a.jsonl:2: not a JSON object"),
    ],
)
def test_mistakes_name_file_and_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        [*PAIRS.read(write(tmp_path / name, text), {})]


def test_other_encodings_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_bytes(b"one\ttwo\n\xff\tb\n")
    with pytest.raises(UserError, match="not UTF-8"):
        [*PAIRS.read(path, {})]


def test_damaged_lines_are_left_out_where_a_task_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "a.tsv", "one\ttwo\tlabel\na\nb\tc\t1\n")
    table = TextTable("one", "two", skips_damaged=True)
    assert [example.firsts for example in table.read(path, {})] == [("b",)]
    assert "1 lines with missing columns left out" in capsys.readouterr().out
