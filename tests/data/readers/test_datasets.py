"""Files that `datasets` alone reads, and files that it reads as other readers do."""

import socket
from pathlib import Path
from typing import Any

import datasets
import pytest

from tests.support.megatron_datasets import assert_same_dataset
from tokamake.data.corpus.corpora import Corpus
from tokamake.data.corpus.documents import read_texts
from tokamake.data.corpus.raw_files import raw_files
from tokamake.data.indexed.trace import trace
from tokamake.data.readers import open_input
from tokamake.data.tokenize.tokenize import tokenize
from tokamake.data.tokenize.verify import verify
from tokamake.errors import UserError

ROWS = [{"text": f"text {number} é", "meta": {"url": f"u{number}"}} for number in range(2500)]


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a file on disk needs no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "csv"])
def test_rows_are_those_of_the_file(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows [1].{suffix}"  # a name with glob characters
    rows = datasets.Dataset.from_list(ROWS)
    if suffix == "csv":
        rows.remove_columns("meta").to_csv(path)
    else:
        getattr(rows, "to_parquet" if suffix == "parquet" else "to_json")(path)
    texts = [row["text"] for row in ROWS]
    assert list(read_texts(path, format="datasets")) == list(read_texts(path)) == texts
    if suffix != "csv":
        urls = [row["meta"]["url"] for row in ROWS]  # type: ignore[index]
        assert list(read_texts(path, "meta.url", format="datasets")) == urls


def test_a_format_that_no_other_reader_knows(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw, plain = workspace / "a.fasta", workspace / "plain.jsonl"
    raw.write_text(">a first\nMKV\nLLA\n>b\nMMM\n")
    plain.write_text('{"text": "MKVLLA"}\n{"text": "MMM"}\n')
    for name, path, options in (
        ("proteins", raw, {"format": "datasets", "text_key": ("sequence",)}),
        ("plain", plain, {}),
    ):
        tokenize(
            (str(path),),
            output=workspace / name,
            tokenizer=workspace / "tokenizer",
            **options,  # type: ignore[arg-type]
        )
    assert_same_dataset(workspace / "proteins", workspace / "plain")
    verify([workspace / "proteins"])
    capsys.readouterr()
    trace(workspace / "proteins", 1)
    assert capsys.readouterr().out.endswith('a.fasta: row 1\n{"sequence": "MMM"}\n')


def test_each_mistake_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.fasta").write_text(">a first\nMKV\n")
    with pytest.raises(UserError, match='no column "text" among id, description, sequence'):
        list(read_texts(tmp_path / "a.fasta", format="datasets"))
    (tmp_path / "a.parquet").write_bytes(b"PAR1 damaged")
    with pytest.raises(UserError, match=r"a\.parquet: cannot be read as datasets \(.*Arrow.*"):
        list(read_texts(tmp_path / "a.parquet", format="datasets"))
    (tmp_path / "a.unknown").write_bytes(b"?")
    with pytest.raises(UserError, match=r"a\.unknown: cannot be read as datasets"):
        list(read_texts(tmp_path / "a.unknown", format="datasets"))


def test_a_saved_dataset_needs_no_format(tmp_path: Path) -> None:
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved", num_shards=3)
    corpus = Corpus(corpus="saved", files=str(tmp_path / "saved"), weight=1)
    files = raw_files(corpus, {})
    assert len(files) == 3  # known before any job runs
    texts = [text for file in files for text in read_texts(Path(file.path))]
    assert texts == [row["text"] for row in ROWS]
    assert open_input(Path(files[0].path)).format == "arrow"


def test_a_name_of_the_hub_without_its_address_is_one_line() -> None:
    corpus = Corpus(corpus="c", files="stanfordnlp/imdb", format="datasets", weight=1)
    with pytest.raises(UserError, match="write hf://datasets/stanfordnlp/imdb") as error:
        raw_files(corpus, {})
    assert len(str(error.value).splitlines()) == 1
