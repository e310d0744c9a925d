"""Any document or token leads back to the raw line that it was made from."""

import gzip
import json
import random
from pathlib import Path

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from tokamake.data.indexed.dataset import IndexedDataset
from tokamake.data.indexed.document_sources import locate_document
from tokamake.data.indexed.merge import merge
from tokamake.data.indexed.trace import trace
from tokamake.data.tokenize.tokenize import tokenize
from tokamake.errors import UserError


def lines(seed: int, count: int) -> list[str]:
    """Lines of jsonl, some of them blank, some with an empty text."""
    numbers = random.Random(seed)
    made = []
    for number in range(count):
        text = numbers.choice(["", f"document {seed}-{number} " + "word " * numbers.randrange(9)])
        made.append(numbers.choice(["", json.dumps({"text": text}), json.dumps({"text": text})]))
    return made


def traced(prefix: Path, capsys: pytest.CaptureFixture[str], **options: int) -> tuple[str, str]:
    trace(prefix, **options) if "token" in options else trace(prefix, options["document"])
    place, _, text = capsys.readouterr().out.rstrip("\n").partition("\n")
    return place, text


def full(lines: list[str]) -> list[tuple[int, str]]:
    """(line number, line) of the documents that have a token."""
    return [(n, line) for n, line in enumerate(lines, 1) if line and json.loads(line)["text"]]


def test_each_document_of_shards_and_of_their_merge(
    workspace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokamake.data.indexed import document_sources

    monkeypatch.setattr(
        document_sources, "_RUN_BYTES_LOG2", 8
    )  # so that runs end within these small files
    prefixes, expected = [], []
    for seed in range(3):
        raw = [workspace / f"{seed}-{part}.jsonl" for part in range(2)]
        for part, path in enumerate(raw):
            made = lines(10 * seed + part, 40)
            path.write_text("".join(line + "\n" for line in made))
            expected += [(path, number, line) for number, line in full(made)]
        prefixes.append(workspace / f"shard{seed}")
        tokenize(tuple(map(str, raw)), output=prefixes[-1], tokenizer=workspace / "tokenizer")
    merge(prefixes, output=workspace / "merged")
    capsys.readouterr()
    for number, (path, line_number, line) in enumerate(expected):
        place, text = traced(workspace / "merged", capsys, document=number)
        assert place.endswith(f"{path}: line {line_number}")
        assert text == line
    pair = IndexedDataset(workspace / "merged")
    for token in (0, 17, len(pair.tokens) - 1):
        place, _ = traced(workspace / "merged", capsys, token=token)
        document = int((pair.pointers // 2 <= token).sum()) - 1
        assert place.startswith(f"document {document},")


def test_within_a_byte_range(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = [json.dumps({"text": f"number {n}"}) for n in range(100)]
    raw = workspace / "some.jsonl"
    raw.write_text("\n".join(made))
    tokenize(
        (str(raw),), output=workspace / "pair", tokenizer=workspace / "tokenizer",
        byte_range="900:1500",
    )  # fmt: skip
    capsys.readouterr()
    place, text = traced(workspace / "pair", capsys, document=3)
    before = len(raw.read_text()[:900].split("\n")) - 1
    assert text == made[before + 1 + 3]
    assert "line 4 counted from byte" in place


def test_rows_and_compressed_lines(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = workspace / "some.parquet"
    texts = [f"row {n}" for n in range(20)]
    parquet.write_table(arrow.table({"text": texts}), table, row_group_size=6)
    zipped = workspace / "some.jsonl.gz"
    zipped.write_bytes(gzip.compress(b'{"text": "first"}\n\n{"text": "second"}\n'))
    tokenize(
        (str(table), str(zipped)), output=workspace / "pair", tokenizer=workspace / "tokenizer"
    )
    capsys.readouterr()
    place, text = traced(workspace / "pair", capsys, document=13)
    assert (place[-7:], json.loads(text)) == (": row 13"[-7:], {"text": "row 13"})
    place, text = traced(workspace / "pair", capsys, document=21)
    assert place.endswith("some.jsonl.gz: line 3")
    assert text == f"(compressed; zcat {zipped} | sed -n 3p)"


def test_mistakes(workspace: Path) -> None:
    raw = workspace / "raw/docs/docs-00.jsonl"
    tokenize((str(raw),), output=workspace / "pair", tokenizer=workspace / "tokenizer")
    for arguments in ((10_000_000,), (-10_000_000,)):
        with pytest.raises(UserError, match="no document"):
            trace(workspace / "pair", *arguments)
    with pytest.raises(UserError, match="no token"):
        trace(workspace / "pair", token=10**9)
    with pytest.raises(UserError, match="give either"):
        trace(workspace / "pair")
    (workspace / "pair.sources").write_bytes(b"x")
    with pytest.raises(UserError, match="not a sources file"):
        locate_document(workspace / "pair", 0)
    (workspace / "pair.sources").unlink()
    with pytest.raises(UserError, match="no sources file"):
        locate_document(workspace / "pair", 0)


@pytest.mark.parametrize(("suffix", "byte_range"), [("parquet", "4:"), ("arrow", "")])
def test_a_table_that_has_lost_a_row(
    workspace: Path, capsys: pytest.CaptureFixture[str], suffix: str, byte_range: str
) -> None:
    def write(texts: list[str]) -> int:
        made = arrow.table({"text": texts})
        if suffix == "parquet":
            parquet.write_table(made, table, row_group_size=6)
        else:
            with arrow.ipc.new_stream(table, made.schema) as stream:
                stream.write_table(made, max_chunksize=6)
        return table.stat().st_size

    table = workspace / f"some.{suffix}"
    before = write(list("abcdefghijklmnopq"))
    tokenize(
        (str(table),),
        output=workspace / "pair",
        tokenizer=workspace / "tokenizer",
        byte_range=byte_range,
    )
    capsys.readouterr()
    assert json.loads(traced(workspace / "pair", capsys, document=16)[1]) == {"text": "q"}
    # Where the whole file was read, another size would be told instead.
    assert write([*"abcdefghijklmno", "pppp"]) == before or byte_range
    place, text = traced(workspace / "pair", capsys, document=16)
    assert place.endswith(f"{table}: row 16")
    assert text == f"({table} has changed since: it has no row 16)"


def test_a_changed_raw_file_is_told(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = workspace / "some.jsonl"
    raw.write_text("".join(json.dumps({"text": f"number {n}"}) + "\n" for n in range(9)))
    tokenize((str(raw),), output=workspace / "pair", tokenizer=workspace / "tokenizer")
    raw.write_text(raw.read_text()[30:])
    capsys.readouterr()
    _, text = traced(workspace / "pair", capsys, document=5)
    assert "has changed since" in text
