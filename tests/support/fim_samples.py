"""A tokenizer with special tokens, and samples, for tests of fill-in-the-middle."""

from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from tests.conftest import documents
from tests.support.runs import make_index
from tokamake.config.train_sections import FimSettings
from tokamake.data.corpus.train_tokenizer import train_tokenizer
from tokamake.data.indexed.dataset import DatasetWriter
from tokamake.data.samples.document_samples import DocumentSamples
from tokamake.data.samples.fim.samples import FimSamples

NAMES = ("<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>")
EOD, PREFIX, SUFFIX, MIDDLE, SEPARATOR = range(5)  # as train_tokenizer numbers them
SLACK = [EOD] * 300
"""Room after a document: it can grow without being truncated."""


def is_plain(text: str) -> bool:
    """Return whether a text contains no special token."""
    return not any(name in text for name in (*NAMES, "<|endoftext|>"))


class FixedSamples:
    """Rows as samples."""

    def __init__(self, rows: list[list[int]]) -> None:
        self.rows = rows
        self.prefixes: list[Path] = []
        self.digest = "fixed"
        self.corpora = ("code",)
        self.sequence_length = len(rows[0]) - 1

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, sample: int) -> np.ndarray:
        return np.array(self.rows[sample], np.int64)


def prepare(folder: Path, raw: list[Path]) -> Path:
    """Write a tokenizer with the special tokens, a dataset and an index into a folder."""
    train_tokenizer(raw, vocab_size=600, special_tokens=NAMES, output=folder / "tokenizer")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer/tokenizer.json"))
    ids = [[*tokenizer.encode(text).ids, EOD] for text in documents(raw[0]) if text.isascii()]
    with DatasetWriter(folder / "code.bin", folder / "code.idx", dtype=np.uint16) as writer:
        writer.add(np.concatenate(ids), np.array([*map(len, ids)], np.int32))
    (folder / "weights.txt").write_text("1 code code\n")
    samples = {"train_samples": 150, "valid_samples": 0}
    make_index(folder, sequence_length=200, split="1,0,0", seed=3, **samples)
    return folder


def plain(folder: Path) -> DocumentSamples:
    return DocumentSamples(folder / "index", split="train", data_root=folder)


def rearranged(folder: Path, samples: Any, *, seed: int = 11, **settings: Any) -> FimSamples:
    return FimSamples(samples, FimSettings(**settings), tokenizer=folder / "tokenizer", seed=seed)


def rearrange_rows(folder: Path, rows: list[list[int]], **settings: Any) -> list[list[int]]:
    samples = rearranged(folder, FixedSamples(rows), **settings)
    return [samples[number].tolist() for number in range(len(rows))]
