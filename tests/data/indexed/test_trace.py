"""`trace` finds the raw line of any document or token."""

import gzip
import json
import random
from pathlib import Path

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from tests.support.tokenized import tokenized
from tokamake.data.indexed.dataset import IndexedDataset
from tokamake.data.indexed.document_sources import locate_document
from tokamake.data.indexed.merge import merge
from tokamake.data.indexed.trace import trace
from tokamake.errors import UserError


def lines(seed: int, count: int) -> list[str]:
    """Draw lines of jsonl: some are blank, some have an empty text."""
    numbers = random.Random(seed)
    drawn = []
    for number in range(count):
        text = numbers.choice(["", f"document {seed}-{number} " + "word " * numbers.randrange(9)])
        drawn.append(numbers.choice(["", json.dumps({"text": text}), json.dumps({"text": text})]))
    return drawn


def traced(prefix: Path, capsys: pytest.CaptureFixture[str], **options: int) -> tuple[str, str]:
    trace(prefix, **options) if "token" in options else trace(prefix, options["document"])
    location, _, text = capsys.readouterr().out.rstrip("\n").partition("\n")
    return location, text


def non_empty(lines: list[str]) -> list[tuple[int, str]]:
    """Return (line number, line) of each document with at least one token."""
    return [(n, line) for n, line in enumerate(lines, 1) if line and json.loads(line)["text"]]


def test_finds_each_document_of_merged_shards(
    workspace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokamake.data.indexed import document_sources

    # With ranges of 256 bytes, these small files have several.
    monkeypatch.setattr(document_sources, "_RANGE_BYTES_LOG2", 8)
    prefixes, expected = [], []
    for seed in range(3):
        raw = [workspace / f"{seed}-{part}.jsonl" for part in range(2)]
        for part, path in enumerate(raw):
            raw_lines = lines(10 * seed + part, 40)
            path.write_text("".join(line + "\n" for line in raw_lines))
            expected += [(path, number, line) for number, line in non_empty(raw_lines)]
        prefixes.append(workspace / f"shard{seed}")
        tokenized(workspace, *tuple(map(str, raw)), name=prefixes[-1])
    merge(prefixes, output=workspace / "merged")
    capsys.readouterr()
    for number, (path, line_number, line) in enumerate(expected):
        location, text = traced(workspace / "merged", capsys, document=number)
        assert location.endswith(f"{path}: line {line_number}")
        assert text == line
    dataset = IndexedDataset(workspace / "merged")
    for token in (0, 17, len(dataset.tokens) - 1):
        location, _ = traced(workspace / "merged", capsys, token=token)
        document = int((dataset.pointers // 2 <= token).sum()) - 1
        assert location.startswith(f"document {document},")


def test_says_that_a_long_line_is_cut(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = json.dumps({"text": "word " * 99})
    size, prefix = len(line), workspace / "data"
    (workspace / "a.jsonl").write_text(line + "\n")
    tokenized(workspace, "a.jsonl", name=prefix)
    capsys.readouterr()
    cut = f"(300 of {size} characters; --max-characters {size} shows all)"
    assert traced(prefix, capsys, document=0)[1] == f"{line[:300]}\n{cut}"
    trace(prefix, 0, max_characters=size)
    assert capsys.readouterr().out.splitlines()[1:] == [line]


def test_finds_documents_of_a_byte_range(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw_lines = [json.dumps({"text": f"number {n}"}) for n in range(100)]
    raw = workspace / "some.jsonl"
    raw.write_text("\n".join(raw_lines))
    tokenized(workspace, raw, name='data', byte_range="900:1500")  # fmt: skip
    capsys.readouterr()
    location, text = traced(workspace / "data", capsys, document=3)
    before = len(raw.read_text()[:900].split("\n")) - 1
    assert text == raw_lines[before + 1 + 3]
    assert "line 4 counted from byte" in location


def test_finds_rows_and_compressed_lines(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = workspace / "some.parquet"
    texts = [f"row {n}" for n in range(20)]
    parquet.write_table(arrow.table({"text": texts}), table, row_group_size=6)
    zipped = workspace / "some.jsonl.gz"
    zipped.write_bytes(gzip.compress(b'{"text": "first"}\n\n{"text": "second"}\n'))
    tokenized(workspace, table, zipped, name="data")
    capsys.readouterr()
    location, text = traced(workspace / "data", capsys, document=13)
    assert (location[-7:], json.loads(text)) == (": row 13"[-7:], {"text": "row 13"})
    location, text = traced(workspace / "data", capsys, document=21)
    assert location.endswith("some.jsonl.gz: line 3")
    assert text == f"(compressed; zcat {zipped} | sed -n 3p)"


def test_invalid_arguments_and_missing_sources_are_refused(workspace: Path) -> None:
    raw = workspace / "raw/docs/docs-00.jsonl"
    tokenized(workspace, raw, name="data")
    for arguments in ((10_000_000,), (-10_000_000,)):
        with pytest.raises(UserError, match="no document"):
            trace(workspace / "data", *arguments)
    with pytest.raises(UserError, match="no token"):
        trace(workspace / "data", token=10**9)
    with pytest.raises(UserError, match="give either"):
        trace(workspace / "data")
    (workspace / "data.sources").write_bytes(b"x")
    with pytest.raises(UserError, match="not a sources file"):
        locate_document(workspace / "data", 0)
    (workspace / "data.sources").unlink()
    with pytest.raises(UserError, match="no sources file"):
        locate_document(workspace / "data", 0)


@pytest.mark.parametrize(("suffix", "byte_range"), [("parquet", "4:"), ("arrow", "")])
def test_reports_a_table_without_the_row(
    workspace: Path, capsys: pytest.CaptureFixture[str], suffix: str, byte_range: str
) -> None:
    def write(texts: list[str]) -> int:
        content = arrow.table({"text": texts})
        if suffix == "parquet":
            parquet.write_table(content, table, row_group_size=6)
        else:
            with arrow.ipc.new_stream(table, content.schema) as stream:
                stream.write_table(content, max_chunksize=6)
        return table.stat().st_size

    table = workspace / f"some.{suffix}"
    before = write(list("abcdefghijklmnopq"))
    tokenized(workspace, table, name="data", byte_range=byte_range)
    capsys.readouterr()
    assert json.loads(traced(workspace / "data", capsys, document=16)[1]) == {"text": "q"}
    # Of a whole file, `trace` would report another size first.
    assert write([*"abcdefghijklmno", "pppp"]) == before or byte_range
    location, text = traced(workspace / "data", capsys, document=16)
    assert location.endswith(f"{table}: row 16")
    assert text == f"({table} has changed since: it has no row 16)"


def test_reports_a_changed_raw_file(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = workspace / "some.jsonl"
    raw.write_text("".join(json.dumps({"text": f"number {n}"}) + "\n" for n in range(9)))
    tokenized(workspace, raw, name="data")
    raw.write_text(raw.read_text()[30:])
    capsys.readouterr()
    _, text = traced(workspace / "data", capsys, document=5)
    assert "has changed since" in text
