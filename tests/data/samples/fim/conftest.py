"""Fixtures of the tests of fill-in-the-middle."""

from pathlib import Path

import pytest
import tokenizers

from tests.support.fim_samples import prepare


@pytest.fixture(scope="module")
def folder(sampled: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with the special tokens, a dataset and an index."""
    return prepare(tmp_path_factory.mktemp("fim"), sorted((sampled / "raw").rglob("*.*")))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> tokenizers.Tokenizer:
    """The same tokenizer, opened by Hugging Face."""
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer/tokenizer.json"))
