"""Datasets of raw files, made with the tokenizer of a folder."""

from pathlib import Path
from typing import Any

from tokamake.data.tokenize.tokenize import tokenize

QUARANTINE: dict[str, Any] = {"on_bad_document": "quarantine", "max_bad_fraction": 1.0}
"""Options that let any number of documents be bad."""


def tokenized(folder: Path, *raw: Path | str, name: Path | str = "pair", **options: Any) -> Path:
    """Tokenize raw files with `folder`/tokenizer to the prefix `folder`/`name`; return it."""
    prefix = folder / name
    files = tuple(str(folder / path) for path in raw)
    tokenize(files, output=prefix, tokenizer=folder / "tokenizer", **options)
    return prefix
