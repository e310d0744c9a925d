"""Tokens of raw files from a sample: exact for small corpora, close and honest for large ones."""

import gzip
import json
import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from tokamake.data.corpus.documents import Fields
from tokamake.estimate.tokens import Count, count_tokens


def words(texts: Sequence[str]) -> list[int]:
    return [len(text.split()) for text in texts]


def write(path: Path, *, seed: int, documents: int = 6000) -> int:
    """Write documents of very different lengths; return words, and one more for each text."""
    chance = random.Random(seed)
    total = 0
    with gzip.open(path, "wt") if path.suffix == ".gz" else path.open("w") as stream:
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
