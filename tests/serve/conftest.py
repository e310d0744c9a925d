"""A server of a tiny model, which the tests of a worker share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.llamas import write_confident
from tests.support.served import Served, served, with_template

CONTEXT = 64


@pytest.fixture(scope="session")
def chat_tokenizer(sampled: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of 400 tokens with a chat template."""
    return with_template(sampled / "tokenizer", tmp_path_factory.mktemp("chat") / "tokenizer")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a Llama of 400 tokens and a context of 64."""
    folder = tmp_path_factory.mktemp("tiny")
    return write_confident(folder, vocab_size=400, context=CONTEXT)


@pytest.fixture(scope="session")
def server(tiny: Path, chat_tokenizer: Path) -> Iterator[Served]:
    """A server of the model `tiny`."""
    with served({"tiny": tiny}, chat_tokenizer) as running:
        yield running
