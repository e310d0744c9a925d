"""A drawn sample has the number of documents that was asked for, from all over the files."""

import gzip
import json
from itertools import pairwise
from pathlib import Path

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from tokamake.data.corpus import drawn_documents
from tokamake.data.corpus.documents import Fields
from tokamake.data.corpus.drawn_documents import draw


def write(path: Path, texts: list[str]) -> Path:
    content = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def drawn(paths: list[Path], number: int) -> list[str]:
    """Texts of a sample, whose records must agree with them."""
    texts: list[str] = []
    for each in draw(paths, number, fields=Fields()):
        (column,) = each.columns
        assert [each.block.records[index]["text"] for index in each.indices] == [*column]
        texts += column
    return texts


def test_it_has_documents_of_all_files(tmp_path: Path) -> None:
    for name in ("a.jsonl", "b.jsonl.gz", "c.jsonl"):
        write(tmp_path / name, [f"{name} {number}" for number in range(100)])
    table = arrow.table({"text": [f"d.parquet {number}" for number in range(100)]})
    parquet.write_table(table, tmp_path / "d.parquet", row_group_size=7)
    paths = sorted(tmp_path.iterdir())
    texts = drawn(paths, 40)
    assert sorted(texts) == sorted(f"{path.name} {n}" for path in paths for n in range(10))
    assert drawn(paths, 40) == texts
    assert len(drawn(paths, 41)) == 41
    assert len(drawn(paths, 10_000)) == len(set(drawn(paths, 10_000))) == 400


def test_a_short_file_leaves_its_share_to_others(tmp_path: Path) -> None:
    short = write(tmp_path / "a.jsonl", ["a"])
    long = write(tmp_path / "b.jsonl", [f"b{number}" for number in range(100)])
    assert drawn([short, long], 20) == ["a", *(f"b{number}" for number in range(19))]


def test_many_files_are_evenly_spaced(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{number:03}.jsonl", [str(number)] * 9) for number in range(96)]
    texts = drawn(paths, 64)
    assert [*dict.fromkeys(texts)] == [str(number) for number in range(0, 96, 3)]
    assert len(texts) == 64
    assert len(drawn(paths, 600)) == 600
    assert len(drawn(paths, 900)) == 96 * 9


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_a_large_file_gives_documents_of_several_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(drawn_documents, "_MIN_PART_BYTES", 1000)
    texts = [f"{number:05}" for number in range(10_000)]
    if name == "a.jsonl":
        path = write(tmp_path / name, texts)
    else:
        path = tmp_path / name
        parquet.write_table(arrow.table({"text": texts}), path, row_group_size=100)
    sample = sorted(map(int, drawn([path], 320)))
    assert len(set(sample)) == 320
    assert min(sample) < 1000
    assert max(sample) > 9000
    assert max(b - a for a, b in pairwise(sample)) < 1000
    assert len(set(drawn([path], 20_000))) == 10_000


def test_bad_documents_count(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\nbad\n{"text": 1}\n{"text": "b"}\n')
    (first, *rest) = draw([path], 3, fields=Fields())
    assert not rest
    assert [*first.columns[0]] == ["a"]
    assert [index for index, _ in first.bad] == [1, 2]
    assert first.num_documents == 3
