"""`plan.keep_shards: false`: shards are deleted once they are merged, and nothing is made twice."""

import shutil
from pathlib import Path

import pytest
import yaml

from tests.support.workflows import CONFIG, MINE, jobs, make_workspace, snakemake
from tests.workflow.test_batches import WEB, changed, state, write_raw
from tokamake.status.jobs import read_jobs, states

PLAN = {"shard_bytes": 3500, "merged_bytes": 3500, "max_jobs": 20}


def configure(folder: Path, **settings: object) -> None:
    config = yaml.safe_load((folder / "my.yaml").read_text())
    config["plan"] = {**PLAN, **settings}
    (folder / "my.yaml").write_text(yaml.safe_dump(config))


@pytest.fixture
def folder(tmp_path: Path, sampled: Path) -> Path:
    """A workspace with four raw files, each a shard of two datasets."""
    folder = make_workspace(tmp_path)
    (folder / "corpora.tsv").write_text(WEB)
    tokenizer = {"path": str(sampled / "tokenizer")}
    config = {**CONFIG, "sample_corpus": {}, "tokenizer": tokenizer}
    (folder / "my.yaml").write_text(yaml.safe_dump(config))
    configure(folder, keep_shards=False)
    (folder / "raw").mkdir()
    for number in range(4):
        write_raw(folder / f"raw/{number}.jsonl", 20)
    return folder


def build(folder: Path, *arguments: str) -> dict[str, int]:
    """Build the data, and check that then nothing is left to do; return the planned jobs."""
    planned = jobs(snakemake(folder, "-n", *arguments, *MINE, "data"))
    result = snakemake(folder, *arguments, *MINE, "data")
    assert result.returncode == 0, result.stdout + result.stderr
    again = snakemake(folder, "-n", *MINE, "data")
    assert "Nothing to be done" in again.stdout + again.stderr
    return planned


def merged(folder: Path) -> dict[str, bytes]:
    files = (folder / "results/data/merged").iterdir()
    return {path.name: path.read_bytes() for path in files if path.suffix in (".bin", ".idx")}


def shards(folder: Path) -> list[str]:
    return sorted(state(folder, "shards"))


@pytest.mark.grid
@pytest.mark.slow
def test_shards_are_deleted_and_nothing_is_made_twice(folder: Path) -> None:
    planned = build(folder)
    assert planned["tokenize"] == 4
    assert shards(folder) == []
    # `tokamake status` counts shards that were deleted as made.
    assert {job.state for job in states(folder, read_jobs(folder)["data"].jobs)} == {"done"}
    first = merged(folder)
    assert len(first) > 4
    # A raw file more gives a shard more; the others stay deleted.
    write_raw(folder / "raw/4.jsonl", 20)
    assert build(folder)["tokenize"] == 1
    assert shards(folder) == []
    assert merged(folder).items() >= first.items()
    # A changed raw file: the shards of its merged datasets are made again, and no others.
    write_raw(folder / "raw/0.jsonl", 21)
    planned = build(folder)
    assert 1 <= planned["tokenize"] < 5
    assert shards(folder) == []
    now = merged(folder)
    assert now != first
    # The same as with shards that are kept.
    shutil.rmtree(folder / "results/data")
    configure(folder)
    assert build(folder)["tokenize"] == 5
    assert len([name for name in shards(folder) if name.endswith(".bin")]) == 10
    assert merged(folder) == now


@pytest.mark.grid
@pytest.mark.slow
def test_a_lost_merged_dataset_is_made_again(folder: Path) -> None:
    build(folder)
    first = merged(folder)
    before = state(folder, "merged")
    (folder / "results/data/merged/web-0000_text_document.bin").unlink()
    planned = build(folder)
    assert 1 <= planned["tokenize"] < 4
    # The shards have two datasets. The job of the other one finds its merged dataset complete.
    assert planned["merge"] == 2
    assert merged(folder) == first
    assert changed(before, state(folder, "merged")) == {"web-0000_text_document"}
    assert shards(folder) == []


@pytest.mark.grid
@pytest.mark.slow
def test_a_failed_merge_finds_its_shards(folder: Path) -> None:
    """A full disk, for example: the shards of merged datasets that are not made stay."""
    blocked = folder / "results/data/merged/web-0001_text_document.bin"
    blocked.mkdir(parents=True)
    result = snakemake(folder, "--keep-going", *MINE, "data")
    assert result.returncode == 1
    kept = shards(folder)
    assert kept
    blocked.rmdir()
    planned = build(folder)
    assert planned.get("tokenize", 0) == 0
    assert shards(folder) == []


@pytest.mark.grid
@pytest.mark.slow
def test_the_setting_changes_for_finished_data(folder: Path) -> None:
    configure(folder)
    build(folder)
    first, kept = merged(folder), shards(folder)
    assert kept
    configure(folder, keep_shards=False)
    planned = build(folder)
    assert planned.get("tokenize", 0) == 0
    assert planned["merge"] >= 1
    assert shards(folder) == []
    configure(folder)
    planned = jobs(snakemake(folder, "-n", *MINE, "data"))
    assert planned == {}
    assert merged(folder) == first
