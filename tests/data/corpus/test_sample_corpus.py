"""The sample corpus has the declared sizes; it and its tokenizer are reproducible."""

import gzip
import json
from pathlib import Path

from tests.conftest import SAMPLES
from tokamake.data.corpus.sample_corpus import sample_corpus
from tokamake.data.corpus.train_tokenizer import train_tokenizer


def test_files_have_the_declared_size_and_documents_all_keys(sampled: Path) -> None:
    for corpus, sample in SAMPLES.items():
        paths = sorted((sampled / "raw" / corpus).iterdir())
        assert [path.name for path in paths] == [f"{corpus}-00.jsonl", f"{corpus}-01.jsonl.gz"]
        contents = [paths[0].read_bytes(), gzip.decompress(paths[1].read_bytes())]
        assert all(
            0.5 * sample["file_bytes"] < len(content) <= sample["file_bytes"]
            for content in contents
        )
        rows = [json.loads(line) for content in contents for line in content.splitlines()]
        assert all(set(row) == {"text", "src", "id"} and row["text"].strip() for row in rows)
        assert len({row["id"] for row in rows}) == len(rows)


def test_two_runs_give_the_same_bytes(sampled: Path, tmp_path: Path) -> None:
    sample_corpus(settings=json.dumps(SAMPLES), output=tmp_path / "raw")
    for path in (sampled / "raw").rglob("*.*"):
        assert (tmp_path / path.relative_to(sampled)).read_bytes() == path.read_bytes()
    raw = sorted((sampled / "raw").rglob("*.*"))
    train_tokenizer(raw, vocab_size=400, output=tmp_path / "tokenizer")
    for path in (sampled / "tokenizer").iterdir():
        assert (tmp_path / "tokenizer" / path.name).read_bytes() == path.read_bytes()
