"""Stages of a training as rows of a table: each waits for the run that it starts from."""

import json
from pathlib import Path

import pytest
import yaml

from tests.support.workflows import ARCHITECTURE, CONFIG, CORPORA, MINE, copy_without_run, jobs
from tests.support.workflows import snakemake_alone as snakemake
from tokamake.status.status import status

pytestmark = [pytest.mark.slow, pytest.mark.grid]

ROWS = {
    "run": ["base", "long", "more"],
    "model.checkpoint": ["", "{run: base}", "{run: long}"],
    "model.architecture": ["", "long.yaml", ""],
    "train.finetune": ["", "true", "false"],
    "train.sequence_length": ["", "64", "64"],
    "train.train_steps": ["20", "4", "6"],
    "train.optimizer.learning_rate": ["", "1e-4", "1e-4"],
    "corpora": ["", "", "docs.tsv"],
}


@pytest.fixture(scope="module")
def staged(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with a table of three stages, of which two are trained."""
    folder = copy_without_run(built, tmp_path_factory.mktemp("staged"))
    (folder / "my.yaml").write_text(yaml.safe_dump({**CONFIG, "runs": "runs.tsv"}))
    write_rows(folder, ROWS)
    (folder / "docs.tsv").write_text(CORPORA.replace("code\tresults/raw/code/*\ttext\t2\n", ""))
    long = {**ARCHITECTURE, "max_position_embeddings": 128, "rope_theta": 100_000.0}
    (folder / "long.yaml").write_text(yaml.safe_dump(long))
    planned = snakemake(folder, "-n", *MINE, "train")
    of_each = dict.fromkeys(("weigh", "index", "resolve", "train"), 3)
    assert of_each.items() <= jobs(planned).items()
    assert "import_checkpoint" not in jobs(planned)
    assert "input: results/long/train.json" in planned.stdout + planned.stderr
    result = snakemake(folder, *MINE, "results/more/train.json")
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


def write_rows(folder: Path, columns: dict[str, list[str]]) -> None:
    rows = [list(columns), *zip(*columns.values(), strict=True)]
    (folder / "runs.tsv").write_text("".join("\t".join(row) + "\n" for row in rows))


def losses(folder: Path, run: str) -> list[float]:
    lines = (folder / f"results/{run}/training/metrics.jsonl").read_text().splitlines()
    return [record["loss"] for line in lines if "loss" in (record := json.loads(line))]


def test_each_stage_starts_with_the_weights_of_the_one_before(
    staged: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = {
        name: yaml.safe_load((staged / f"results/{name}/run.yaml").read_text())
        for name in ROWS["run"]
    }
    assert [run["parent"] for run in runs.values()] == [None, "base", "long"]
    assert runs["long"]["checkpoint"] == "results/base/training/global_step20"
    assert runs["more"]["checkpoint"] == "results/long/training/global_step4"
    thetas = [run["architecture"]["rope_theta"] for run in runs.values()]
    assert thetas == [10_000.0, 100_000.0, 100_000.0]
    assert [run["step"] for run in runs.values()] == [0, 0, 4]
    first = losses(staged, "base")
    assert losses(staged, "long")[0] < first[0] - 0.3
    assert len(losses(staged, "more")) == 2
    status("more", folder=staged)
    assert "  starts from run long" in capsys.readouterr().out.splitlines()
    assert "Nothing to be done" in snakemake(staged, *MINE, "train").stderr


def test_a_stage_does_not_follow_a_parent_that_changes(staged: Path) -> None:
    changed = {
        **ROWS,
        "train.train_steps": ["24", "4", "6"],
        "train.on_change": ["continue", "", ""],
    }
    write_rows(staged, changed)
    result = snakemake(staged, "-n", *MINE, "results/long/train.json")
    assert result.returncode == 2
    (message,) = [line for line in result.stderr.splitlines() if "run long" in line]
    assert message.startswith(
        "tokamake: run long: model.checkpoint: the last checkpoint of run base will be another "
        "one; 4 steps are trained in results/long/training. train.on_change is refuse, but the run "
        "cannot continue ("
    )
    assert "the run starts from another checkpoint): set train.on_change to 'restart'" in message
    write_rows(staged, ROWS)
