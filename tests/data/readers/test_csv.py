"""Reader of csv and tsv files, against pandas."""

import gzip
import io
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest

from tests.support.readings import records, small_steps
from tokamake.data.readers import csv as reader
from tokamake.data.readers import open_input, sniff
from tokamake.data.readers._records import BadRecord
from tokamake.errors import UserError

CONTENTS = {
    "plain.csv": b"id,text\n1,one\n2,two\n",
    "no_end.csv": b"id,text\n1,one\n2,two",
    "crlf.csv": b"id,text\r\n1,one\r\n2,two\r\n",
    "mark.csv": "\ufeffid,text\n1,été\n".encode(),
    "quoted.csv": b'id,text\n1,"a, ""b""\nand\r\nc"\n"2",""\n3,"x"\n',
    "blank_lines.csv": b"id,text\n\n1,one\n\n\n2,two\n\n",
    "missing_values.csv": b"id,text\n1,NA\n2,null\n3,\n",
    "tabs.tsv": b'id\ttext\n1\tone, two\n2\t"a\tb"\n',
    "packed.csv.gz": gzip.compress(b"id,text\n1,one\n2,two\n"),
    "header.csv": b"id,text\n",
}


def rows(path: Path, *keys: str) -> tuple[list[Any], list[int]]:
    raw = open_input(path)
    blocks = list(raw.blocks(keys))
    numbers = [number for block in blocks for number in block.numbers.tolist()]
    return [record for block in blocks for record in block.records], numbers


@pytest.mark.parametrize("name", CONTENTS)
@pytest.mark.parametrize("size", [1 << 23, 3])
def test_rows_are_those_of_pandas(name: str, size: int, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(CONTENTS[name])
    content = gzip.decompress(CONTENTS[name]) if name.endswith("gz") else CONTENTS[name]
    expected = pandas.read_csv(
        io.BytesIO(content),
        dtype=str,
        keep_default_na=False,
        sep="\t" if ".tsv" in name else ",",
    )
    assert sniff(path)[0] == "csv"
    with small_steps(size):
        read, numbers = rows(path, "text")
    assert [record["text"] for record in read] == expected["text"].tolist()
    assert numbers == list(range(len(expected)))
    both, _ = rows(path, "text", "id")
    assert both == expected[["text", "id"]].to_dict("records")


def test_many_rows_are_several_blocks(tmp_path: Path) -> None:
    texts = [f"{number} " * (number % 2000) for number in range(3000)]
    frame = pandas.DataFrame({"text": texts})
    frame.to_csv(tmp_path / "a.csv", index=False)
    raw = open_input(tmp_path / "a.csv")
    blocks = list(raw.blocks(("text",)))
    assert len(blocks) > 2
    assert [record["text"] for block in blocks for record in block.records] == texts
    assert np.concatenate([block.numbers for block in blocks]).tolist() == list(range(3000))
    assert raw.documents == 3000
    assert raw.place(7) == f"{tmp_path / 'a.csv'}: row 7"


def test_rows_of_another_length_and_other_encodings_are_bad_documents(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(b"id,text\n1,one\n2,two,three\n3\n4,caf\xe9\n\xe9,five\n6,six\n")
    read, numbers = rows(path, "text")
    bad = {number: record for number, record in enumerate(read) if isinstance(record, BadRecord)}
    assert numbers == list(range(6))
    assert {number: record.reason.partition(";")[0] for number, record in bad.items()} == {
        1: "line 3 has 3 fields, the header 2",
        2: "line 4 has 1 field, the header 2",
        3: "line 5 is not valid UTF-8 (character 3 of the value)",
    }
    assert bad[1].raw == b"2,two,three"
    assert bad[3].raw == b"caf\xe9"
    # Another column does not matter.
    assert [read[0], read[4], read[5]] == [{"text": text} for text in ("one", "five", "six")]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"a\.csv: is empty; a csv file begins with the names of columns"),
        (
            b"id:text\n1:x\n",
            r'no column "text"; its first line names the columns "id:text"; fix tex',
        ),
        (b"text,text\n1,x\n", r'more than one column "text"'),
        (
            b'id,text\n1,"never\nclosed\n',
            r"a\.csv:2: not valid csv \(unexpected end of data\) in the row that ",
        ),
        (
            b'id,text\n1,"a"b\n2,c\n',
            r"a\.csv:2: not valid csv \(.*expected after.*\) in the row that be",
        ),
    ],
)
def test_files_that_cannot_be_read_are_one_error(
    content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(UserError, match=message):
        rows(tmp_path / "a.csv", "text")


def test_a_file_of_another_name_is_read_if_the_format_says_so(tmp_path: Path) -> None:
    path = tmp_path / "a.data"
    path.write_bytes(b"id,text\n1,one\n")
    raw = open_input(path, format="csv")
    assert [record for block in raw.blocks(("text",)) for record in block.records] == [
        {"text": "one"}
    ]


def test_a_quarantined_row_of_a_tsv_stays_a_line_of_it(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_bytes(b'text\tid\n"a ""b"""\t1\tmore\n')
    ((bad,), _) = rows(tmp_path / "a.tsv", "text")
    assert bad.raw == b'"a ""b"""\t1\tmore'


def test_a_line_without_an_end_takes_no_memory_without_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "LONGEST_BYTES", 1000)
    (tmp_path / "a.csv").write_bytes(b"x" * 5000)
    with small_steps(64), pytest.raises(UserError, match="a line of more than 1,000 bytes"):
        rows(tmp_path / "a.csv", "text")


@pytest.mark.parametrize("separator", [",", ";", "|", "\t"])
@pytest.mark.parametrize("name", ["a.csv", "a.tsv.gz"])
def test_the_header_decides_the_separator(tmp_path: Path, name: str, separator: str) -> None:
    rows = f'id{separator}text\n1{separator}"a, b; c | d"\n'.encode()
    (tmp_path / name).write_bytes(gzip.compress(rows) if name.endswith("gz") else rows)
    assert records(open_input(tmp_path / name)) == [{"text": "a, b; c | d"}]


def test_a_field_beyond_the_limit_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "_MAX_CHARACTERS", 100)
    (tmp_path / "a.csv").write_text(f'id,text\n1,{"x" * 100}\n2,"{"y" * 101}"\n')
    with pytest.raises(UserError, match=r"a\.csv:3: not valid csv \(field larger than field limit"):
        rows(tmp_path / "a.csv", "text")
