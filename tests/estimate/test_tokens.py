"""Tokens of raw files from a sample: exact for small corpora, close and honest for large ones."""

import gzip
import json
import random
from collections.abc import Sequence
from pathlib import Path

import pyarrow as arrow
import pytest
from pyarrow.parquet import write_table

from tokamake.data.corpus.documents import Fields
from tokamake.data.readers import _table, csv, parquet
from tokamake.estimate.tokens import Count, count_tokens


def words(texts: Sequence[str]) -> list[int]:
    return [len(text.split()) for text in texts]


def write(path: Path, *, seed: int, documents: int = 6000) -> int:
    """Write documents of very different lengths; return words, and one more for each text."""
    chance = random.Random(seed)
    total = 0
    with gzip.open(path, "wt", 1) if path.suffix == ".gz" else path.open("w") as stream:
        for _ in range(documents):
            length = int(chance.lognormvariate(4, 1))
            text = " ".join(chance.choices(("a", "bcd", "efghij", "klm"), k=length))
            stream.write(json.dumps({"text": text}) + "\n")
            total += length + bool(length)
    return total


def count(paths: Sequence[Path], *, sample_bytes: int, seed: int = 1) -> Count:
    return count_tokens(
        paths,
        words,
        fields=Fields(),
        tokens_per_document=1,
        sample_bytes=sample_bytes,
        seed=seed,
    )


def test_a_small_corpus_is_counted(tmp_path: Path) -> None:
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"]
    expected = sum(write(path, seed=n, documents=300) for n, path in enumerate(paths))
    assert count(paths, sample_bytes=10_000_000) == Count(600, expected, 0)


def test_an_estimate_is_as_wrong_as_it_says(tmp_path: Path) -> None:
    """Of 20 samples, nearly all have the true number within their error."""
    paths = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    expected = sum(write(path, seed=n) for n, path in enumerate(paths))
    counts = [count(paths, sample_bytes=400_000, seed=seed) for seed in range(20)]
    assert sum(abs(each.tokens - expected) <= each.error for each in counts) >= 17
    assert all(0 < each.error / expected < 0.05 for each in counts)
    assert sum(each.tokens for each in counts) / 20 == pytest.approx(expected, rel=0.02)
    assert counts[0] == count(paths, sample_bytes=400_000, seed=0)  # seeded
    more = count(paths, sample_bytes=1_600_000)
    assert more.error < counts[1].error


def test_the_beginning_of_a_large_compressed_file_is_enough(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    expected = write(path, seed=1, documents=20_000)
    found = count([path], sample_bytes=path.stat().st_size // 2)
    assert found.tokens == pytest.approx(expected, rel=0.02)
    assert 0 < found.error < 0.05 * expected


def test_some_of_many_compressed_files_are_read(tmp_path: Path) -> None:
    paths = [tmp_path / f"{n}.jsonl.gz" for n in range(12)]
    expected = sum(write(path, seed=n, documents=400) for n, path in enumerate(paths))
    size = sum(path.stat().st_size for path in paths)
    found = count(paths, sample_bytes=size // 2)
    assert found.tokens == pytest.approx(expected, rel=0.05)
    assert abs(found.tokens - expected) <= 1.5 * found.error


def test_tables_are_read_from_their_beginning_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_table, "BLOCK_BYTES", 1 << 16)
    monkeypatch.setattr(parquet, "BLOCK_BYTES", 1 << 16)
    texts = ["one two three four " * (1 + n % 7) for n in range(20_000)]
    path = tmp_path / "a.parquet"
    write_table(
        arrow.table({"text": texts}),
        path,
        row_group_size=5000,
        compression="none",
        use_dictionary=False,
    )
    seen: list[int] = []

    def tokenize(batch: Sequence[str]) -> list[int]:
        seen.append(len(batch))
        return words(batch)

    found = count_tokens(
        [path], tokenize, fields=Fields(), sample_bytes=path.stat().st_size // 2, seed=1
    )
    assert sum(seen) < 10_000
    assert found.tokens == pytest.approx(sum(words(texts)), rel=0.02)
    assert found.error is not None
    assert not found.is_all


def test_the_beginning_of_a_large_csv_file_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csv, "BLOCK_BYTES", 1 << 16)
    path = tmp_path / "a.csv"
    rows = [f"{n},{'one two three four ' * (1 + n % 7)}" for n in range(60_000)]
    path.write_text("\n".join(["id,text", *rows]))
    found = count([path], sample_bytes=path.stat().st_size // 2)
    assert found.documents == pytest.approx(60_000, rel=0.1)
    assert not found.is_all


def test_one_block_of_a_large_file_tells_no_error(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    write(path, seed=1, documents=400)
    found = count([path], sample_bytes=path.stat().st_size // 2)
    assert found.documents
    assert (found.error, found.is_all) == (None, False)
    path = tmp_path / "b.jsonl.gz"  # its beginning ends within the first line
    with gzip.open(path, "wt") as stream:
        stream.write(json.dumps({"text": random.Random(1).randbytes(50_000).hex()}))
    assert count([path], sample_bytes=1000) == Count(0, 0, None, is_all=False)
