"""Shards are deleted only if the merged dataset is whole, and only their datasets."""

from pathlib import Path

import pytest

from tokamake.data.corpus.plan_file import PlannedMerge
from tokamake.data.indexed.merge import merge
from tokamake.data.indexed.merge_batch import delete_merged_shards
from tokamake.data.tokenize.tokenize import tokenize
from tokamake.errors import UserError


@pytest.fixture
def pair(tmp_path: Path, sampled: Path) -> list[Path]:
    """Two shards, one with a quarantined document, and a merged dataset of each."""
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
            max_bad_fraction=1,
        )
        prefixes.append(prefix)
    (tmp_path / "merged").mkdir()
    for number, prefix in enumerate(prefixes):
        merge([prefix], output=tmp_path / f"merged/{number}")
    return prefixes


GROUPS = [PlannedMerge(f"{number}", "web", "", (f"{number}",)) for number in range(2)]
"""Two merged datasets, each of a single shard."""


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_datasets_go_and_quarantined_documents_stay(
    pair: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(pair) == 2
    delete_merged_shards(GROUPS, tmp_path / "shards", merged=tmp_path / "merged")
    assert names(tmp_path / "shards") == {"1.quarantine.jsonl"}
    assert "merged/1: deleted 1 shard, 0.0 MB" in capsys.readouterr().out
    # A job that continues.
    delete_merged_shards(GROUPS, tmp_path / "shards", merged=tmp_path / "merged")
    assert "deleted" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["bin", "idx", "sources"])
def test_a_damaged_merged_dataset_keeps_its_shards(
    name: str, pair: list[Path], tmp_path: Path
) -> None:
    """Also those of the other datasets of the job, which would be made again."""
    assert len(pair) == 2
    before = names(tmp_path / "shards")
    file = tmp_path / f"merged/1.{name}"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(
        UserError, match=rf"merged/1\.{name}: damaged, .* not deleted; remove the data"
    ):
        delete_merged_shards(GROUPS, tmp_path / "shards", merged=tmp_path / "merged")
    assert names(tmp_path / "shards") == before
