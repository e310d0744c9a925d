"""Shards are deleted only if the merged dataset is whole, and only their datasets."""

from pathlib import Path

import pytest

from tokamake.data.indexed.deleted_shards import delete_shards
from tokamake.data.indexed.merge import merge
from tokamake.data.tokenize.tokenize import tokenize
from tokamake.errors import UserError


@pytest.fixture
def pair(tmp_path: Path, sampled: Path) -> list[Path]:
    """Two shards, one with a quarantined document, merged into a dataset."""
    prefixes = []
    for number in range(2):
        raw = tmp_path / f"{number}.jsonl"
        raw.write_text('{"text": "some words"}\n' * 3 + "{\n" * number)
        prefix = tmp_path / f"shards/{number}"
        tokenize(
            (str(raw),),
            output=prefix,
            tokenizer=sampled / "tokenizer",
            on_bad_document="quarantine",
        )
        prefixes.append(prefix)
    merge(prefixes, output=tmp_path / "merged")
    return prefixes


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_datasets_go_and_quarantined_documents_stay(
    pair: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    delete_shards(pair, tmp_path / "merged")
    assert names(tmp_path / "shards") == {"1.quarantine.jsonl"}
    assert "merged: deleted 2 shards, 0.00 GB" in capsys.readouterr().out
    delete_shards(pair, tmp_path / "merged")  # a job that continues
    assert "deleted" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["bin", "idx", "sources"])
def test_a_damaged_merged_dataset_keeps_its_shards(
    name: str, pair: list[Path], tmp_path: Path
) -> None:
    before = names(tmp_path / "shards")
    file = tmp_path / f"merged.{name}"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(
        UserError, match=rf"merged\.{name}: damaged, .* not deleted; remove the data"
    ):
        delete_shards(pair, tmp_path / "merged")
    assert names(tmp_path / "shards") == before
