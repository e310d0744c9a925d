"""Readers of parquet and Arrow return each row once for all column types."""

import gzip
import hashlib
import random
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pyarrow as arrow
import pyarrow.feather as feather
import pyarrow.parquet as parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import ipc

from tokamake.data.readers import BadRecord, Input, _table, open_input, sniff
from tokamake.errors import UserError

TEXTS = ["one", "zwei\nlines", "üç 😀", "", "five", "\0", "seven"]
TABLE = arrow.table({"text": TEXTS, "id": range(7), "title": [text.upper() for text in TEXTS]})


def write(table: Any, path: Path, rows: int = 2) -> Path:
    """Write in the format of the suffix, with `rows` rows per batch or row group."""
    match path.suffix:
        case ".parquet":
            parquet.write_table(table, path, row_group_size=rows)
        case ".feather":
            feather.write_feather(table, path, chunksize=rows)
        case ".arrow":
            with ipc.new_stream(path, table.schema) as stream:
                stream.write_table(table, max_chunksize=rows)
    return path


def records(raw: Input, *keys: str) -> list[Any]:
    result, numbers = [], []
    for block in raw.blocks(keys or ("text",)):
        result += block.records
        numbers += block.numbers.tolist()
        assert block.raw is None
        assert set(block.offsets.tolist()) <= {-1}
    assert raw.documents == len(result)
    assert numbers == sorted(set(numbers))
    return result


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "feather"])
def test_rows_are_documents(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(TABLE, tmp_path / f"a.{suffix}")
    for name in (f"a.{suffix}", "named_wrongly.jsonl", "named_wrongly.txt", "no_suffix"):
        path = path.rename(tmp_path / name)
        assert sniff(path) == ("parquet" if suffix == "parquet" else "arrow", "")
        raw = open_input(path)
        assert records(raw) == [{"text": text} for text in TEXTS]
        assert raw.bytes == path.stat().st_size
        assert raw.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
        assert raw.place(5) == f"{path}: row 5"
    with pytest.raises(UserError, match='no column "body" among text, id, title; fix text_key'):
        records(raw, "body")
    assert records(raw, "title", "text") == [
        {"title": text.upper(), "text": text} for text in TEXTS
    ]
    monkeypatch.setattr(_table, "BLOCK_BYTES", 1)
    rows = [(len(block.records), block.numbers.tolist()) for block in raw.blocks(("text",))]
    assert rows == [(1, [number]) for number in range(7)]


COLUMNS = {
    "string": arrow.array(["a", None, "ü"]),
    "large": arrow.array(["a", None, "ü"], arrow.large_string()),
    "binary": arrow.array([b"a", None, "ü".encode()], arrow.binary()),
    "dictionary": arrow.array(["a", None, "ü"]).dictionary_encode(),
    "binary_dictionary": arrow.array([b"a", None, "ü".encode()]).dictionary_encode(),
    "fixed": arrow.array([b"a ", None, "ü".encode()], arrow.binary(2)),
    "view": arrow.array(["a", None, "ü"], arrow.string_view()),
}


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "feather"])
@pytest.mark.parametrize("kind", COLUMNS)
def test_all_column_types_of_text_are_read(tmp_path: Path, kind: str, suffix: str) -> None:
    path = write(arrow.table({"text": COLUMNS[kind]}), tmp_path / f"a.{suffix}")
    first = "a " if kind == "fixed" else "a"
    assert records(open_input(path)) == [{"text": first}, {"text": None}, {"text": "ü"}]


@pytest.mark.parametrize(
    ("kind", "suffix"),
    [
        *product(["binary", "string"], ["parquet", "arrow", "feather"]),
        *product(["dictionary"], ["arrow", "feather"]),  # pyarrow does not write these to parquet
    ],
)
def test_a_value_that_is_not_utf8_is_one_bad_row(tmp_path: Path, kind: str, suffix: str) -> None:
    values = arrow.array([b"a", b"x\xffy", b"c"], arrow.binary())
    if kind != "binary":
        values = arrow.StringArray.from_buffers(3, *values.buffers()[1:])
    if kind == "dictionary":
        values = arrow.DictionaryArray.from_arrays(arrow.array([0, 1, 2]), values)
    table = arrow.table({"id": ["1", "2", "3"], "text": values})
    first, bad, last = records(open_input(write(table, tmp_path / f"a.{suffix}")), "id", "text")
    assert (first, last) == ({"id": "1", "text": "a"}, {"id": "3", "text": "c"})
    assert isinstance(bad, BadRecord)
    assert bad.reason.startswith("not valid UTF-8 (0xff at byte 1 of the value)")


def test_values_that_are_not_text_are_returned_unchanged(tmp_path: Path) -> None:
    table = arrow.table({"text": [["a"], None, ["b"]], "id": [1, 2, 3]})
    path = write(table, tmp_path / "a.parquet")
    assert records(open_input(path), "id", "text")[0] == {"id": 1, "text": ["a"]}


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.text(max_size=300), min_size=1, max_size=40),
    st.integers(1, 9),
    st.lists(st.floats(0, 1), max_size=5),
)
def test_byte_ranges_cover_each_row_group_once(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], rows: int, cuts: list[float]
) -> None:
    path = tmp_path_factory.mktemp("ranges") / "a.parquet"
    table = arrow.table({"other": [0] * len(texts), "text": texts})
    parquet.write_table(table, path, row_group_size=rows, use_dictionary=len(texts) % 2 == 0)
    size = path.stat().st_size
    bounds = [0, *sorted(int(cut * size) for cut in cuts), None]
    rows_read, numbers, content = [], [], b""
    for start, end in pairwise(bounds):
        raw = open_input(path, byte_range=(start or 0, end))
        for block in raw.blocks(("text",)):
            rows_read += block.records
            numbers += block.numbers.tolist()
        part = path.read_bytes()[start:end]
        assert (raw.bytes, raw.sha256) == (len(part), hashlib.sha256(part).hexdigest())
        content += part
    assert rows_read == [{"text": text} for text in texts]
    assert numbers == list(range(len(texts)))
    assert content == path.read_bytes()


def test_a_row_group_belongs_to_the_range_that_begins_with_it(tmp_path: Path) -> None:
    path = write(TABLE, tmp_path / "a.parquet")
    metadata = parquet.read_metadata(path)
    for group in range(metadata.num_row_groups):
        cut = metadata.row_group(group).column(0).dictionary_page_offset
        before, after = (open_input(path, byte_range=part) for part in ((0, cut), (cut, None)))
        assert len(records(before)) == 2 * group
        assert records(after) == [{"text": text} for text in TEXTS[2 * group :]]


def test_missing_rows_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(TABLE, tmp_path / "a.parquet")
    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", lambda *_, **__: iter([]))
    with pytest.raises(UserError, match="0 rows in row group 0, which should have 2"):
        records(open_input(path))


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "feather"])
def test_truncated_tables_are_refused(tmp_path: Path, suffix: str) -> None:
    content = write(TABLE, tmp_path / f"a.{suffix}").read_bytes()
    path = tmp_path / f"cut.{suffix}"
    for cut in (
        *range(0, 32),
        *range(32, len(content) - 32, 13),
        *range(len(content) - 32, len(content)),
    ):
        path.write_bytes(content[:cut])
        with pytest.raises(UserError):
            records(open_input(path))
    path.write_bytes(content + b"garbage!")
    with pytest.raises(UserError, match="cannot be read as"):
        records(open_input(path))


@pytest.mark.parametrize("suffix", ["parquet", "arrow", "feather"])
def test_damaged_tables_raise_only_user_errors(tmp_path: Path, suffix: str) -> None:
    rng = random.Random(3)
    content = write(TABLE, tmp_path / f"a.{suffix}").read_bytes()
    path = tmp_path / f"changed.{suffix}"
    num_errors = 0
    for position in range(8, len(content), 7):
        changed = bytearray(content)
        changed[position] ^= 1 << rng.randrange(8)
        path.write_bytes(changed)
        try:
            records(open_input(path))
        except UserError:
            num_errors += 1
    assert num_errors


def test_page_checksums_are_verified(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(
        TABLE, path, write_page_checksum=True, use_dictionary=False, compression=None
    )
    content = path.read_bytes()
    assert content.count(b"seven") >= 1
    path.write_bytes(content.replace(b"seven", b"Seven", 1))
    with pytest.raises(UserError, match=r"cannot be read as parquet .*; fetch it again"):
        records(open_input(path))


def test_tables_are_refused_with_a_remedy(tmp_path: Path) -> None:
    path = write(TABLE, tmp_path / "a.parquet")
    packed = tmp_path / "a.parquet.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(UserError, match="a parquet file inside gz cannot be read; unpack it"):
        records(open_input(packed))
    with pytest.raises(UserError, match="has the format parquet, not jsonl; fix or leave"):
        open_input(path, format="jsonl")
    with pytest.raises(UserError, match="byte range"):
        open_input(path, byte_range=(0, 1 << 40))
    with pytest.raises(UserError, match="arrow files have no byte ranges"):
        open_input(write(TABLE, tmp_path / "a.arrow"), byte_range=(0, 100))
    repeated = TABLE.append_column("text", TABLE["text"])
    with pytest.raises(UserError, match='more than one column "text" among'):
        records(open_input(write(repeated, tmp_path / "b.arrow")))


def test_tables_without_rows_have_no_documents(tmp_path: Path) -> None:
    for suffix in ("parquet", "arrow", "feather"):
        path = write(TABLE.slice(0, 0), tmp_path / f"a.{suffix}")
        assert records(open_input(path)) == []


def test_a_key_with_dots_names_a_field_of_a_struct(tmp_path: Path) -> None:
    rows = [{"a": {"text": "one"}, "b": 1}, {"a": None, "b": 2}, None]
    table = arrow.table({"meta": rows, "n": [1, 2, 3]})
    parquet.write_table(table, tmp_path / "a.parquet")
    with ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    literal = table.append_column("meta.a.text", arrow.array(["x", "y", "z"]))
    parquet.write_table(literal, tmp_path / "literal.parquet")
    for name, texts in {
        "a.parquet": ["one", None, None],
        "literal.parquet": ["x", "y", "z"],
    }.items():
        found = records(open_input(tmp_path / name), "meta.a.text")
        assert [record["meta.a.text"] for record in found] == texts
    found = records(open_input(tmp_path / "a.arrow"), "meta.a.text", "n")
    assert found[0] == {"meta.a.text": "one", "n": 1}
    for key in ("meta.c", "n.a", "none.a"):
        with pytest.raises(UserError, match=f'no column "{key}" among meta, n; fix text_key'):
            records(open_input(tmp_path / "a.parquet"), key)
