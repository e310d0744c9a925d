"""A run that has changed, in the real workflow: the dry run says so, and nothing is lost."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.paths import ROOT
from tests.support.shared_folders import made_once
from tests.support.workflows import CONFIG, CORPORA, MINE, copy_without_run, jobs
from tests.support.workflows import snakemake_alone as snakemake
from tokamake.checkpoint.hf import config_json
from tokamake.config.architecture_files import read_architecture

TRAIN: dict[str, Any] = {**CONFIG["train"], "segment_steps": 20}  # type: ignore[dict-item]
REFUSED = (
    "train.on_change is refuse: set it to 'continue' (keeps them) or to 'restart' (starts at step "
    "0), undo the change, or give the run another name"
)
WHOLE = {"segment_steps": None}
CHANGED = {"train_steps": 44, "optimizer": {"learning_rate": 0.01}}
LINES = "train.train_steps 40 -> 44, train.optimizer.learning_rate 0.02 -> 0.01"


@pytest.fixture
def trained(built: Path, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Path:
    """A workspace in which a run of two segments has been trained."""

    def build(folder: Path) -> None:
        copy = copy_without_run(built, folder)
        configure(copy)
        result = snakemake(copy, *MINE, "train")
        assert result.returncode == 0, result.stdout + result.stderr

    folder = made_once(tmp_path_factory, "two segments", build)
    return Path(shutil.copytree(folder / "copy", tmp_path / "copy", symlinks=True))


def configure(folder: Path, **train: Any) -> None:
    (folder / "my.yaml").write_text(yaml.safe_dump({**CONFIG, "train": {**TRAIN, **train}}))


def messages(folder: Path, *arguments: str) -> list[str]:
    """What the workflow itself says about a run that it refuses."""
    result = snakemake(folder, *arguments)
    assert result.returncode == 2
    lines = result.stderr.splitlines()
    if "-n" in arguments:
        assert all(line.startswith(("tokamake: ", "Using profile")) for line in lines)
    return [line for line in lines if line.startswith("tokamake: ")]


def content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_a_changed_run_is_refused_before_any_job_runs(built: Path, tmp_path: Path) -> None:
    trained = Path(shutil.copytree(built, tmp_path / "copy", symlinks=True))
    configure(trained, **WHOLE, **CHANGED)
    before = content(trained / "results")
    expected = (
        f"tokamake: run smoke: {LINES}; 40 steps are trained in results/smoke/training. {REFUSED}"
    )
    assert messages(trained, "-n", *MINE, "train") == [expected]
    assert messages(trained, *MINE, "train") == [expected]
    assert content(trained / "results") == before
    # Other data are another run, even if nothing else changes.
    (trained / "my.yaml").write_text(yaml.safe_dump({**CONFIG, "data_set": "other"}))
    (message,) = messages(trained, "-n", *MINE, "train")
    assert message.startswith("tokamake: run smoke: data_set default -> other; 40 steps")
    configure(trained, **WHOLE, **CHANGED)
    # What does not need the run is not concerned.
    assert "Nothing to be done" in snakemake(trained, *MINE, "data").stderr


@pytest.mark.slow
@pytest.mark.grid
def test_a_changed_run_continues_in_a_chain_of_jobs(trained: Path) -> None:
    run = trained / "results/smoke"
    configure(trained, **CHANGED, on_change="continue")
    dry_run = snakemake(trained, "-n", *MINE, "train")
    assert (
        f"tokamake: run smoke: {LINES}; 40 steps are trained. train.on_change is continue: "
        "training continues at step 40 with the change\n"
    ) in dry_run.stderr
    assert jobs(dry_run) == {"index": 1, "resolve": 1, "train": 3}
    result = snakemake(trained, *MINE, "train")
    assert result.returncode == 0, result.stdout + result.stderr
    assert (run / "train.20.json").exists()
    assert json.loads((run / "train.json").read_text())["step"] == 44
    state = json.loads((run / "training/global_step44/state.json").read_text())
    assert [change["step"] for change in state["lineage"]] == [40]
    assert state["lineage"][0]["changed"] == LINES.split(", ")
    records = map(json.loads, (run / "training/metrics.jsonl").read_text().splitlines())
    assert [record["step"] for record in records if "loss" in record] == [*range(1, 45)]
    assert not list(run.glob("training.*"))
    # The setting alone runs nothing again.
    for on_change in ("continue", "refuse", "restart"):
        configure(trained, **CHANGED, on_change=on_change)
        result = snakemake(trained, *MINE, "train")
        assert "Nothing to be done" in result.stderr
        assert "tokamake:" not in result.stderr


@pytest.mark.slow
@pytest.mark.grid
def test_a_changed_run_restarts(trained: Path) -> None:
    configure(trained, optimizer={"learning_rate": 0.01}, on_change="restart")
    assert (
        "reason: Params have changed since last execution: optimizer.learning_rate 0.02 -> 0.01\n"
    ) in snakemake(trained, "-n", *MINE, "train").stdout
    configure(trained, **CHANGED, on_change="restart", segment_steps=None)
    result = snakemake(trained, *MINE, "train")
    assert result.returncode == 0, result.stdout + result.stderr
    assert (
        f"tokamake: run smoke: {LINES}; 40 steps are trained. train.on_change is restart: "
        "results/smoke/training moves aside, training starts at step 0\n"
    ) in result.stderr
    (aside,) = (trained / "results/smoke").glob("training.*")
    assert (aside / "global_step40").is_dir()


@pytest.mark.grid
@pytest.mark.slow
def test_a_new_raw_file_does_not_touch_a_run_until_the_user_says_so(trained: Path) -> None:
    before = content(trained / "results")
    (trained / "extra.jsonl").write_text('{"text": "one more document"}\n' * 500)
    (trained / "corpora.tsv").write_text(CORPORA.replace("docs/*", "docs/* extra.jsonl"))
    (message,) = messages(trained, "-n", *MINE, "train")
    assert "run smoke: corpus docs: added merged/docs-0002_text_document; 40 steps are" in message
    assert messages(trained, *MINE, "train") == [message]
    assert content(trained / "results") == before
    # The data alone may be built; the run is still refused.
    result = snakemake(trained, *MINE, "data")
    assert result.returncode == 0, result.stdout + result.stderr
    assert messages(trained, *MINE, "train") == [message]
    configure(trained, on_change="continue", train_steps=44)
    result = snakemake(trained, *MINE, "train")
    assert result.returncode == 0, result.stdout + result.stderr
    state = json.loads((trained / "results/smoke/training/global_step44/state.json").read_text())
    assert state["lineage"][0]["changed"] == [
        "train.train_steps 40 -> 44",
        "corpus docs: added merged/docs-0002_text_document",
    ]


@pytest.mark.grid
@pytest.mark.slow
def test_what_a_run_cannot_continue_with_fails_the_dry_run(trained: Path) -> None:
    def reason(**train: Any) -> str:
        configure(trained, **train, on_change="continue")
        (message,) = messages(trained, "-n", *MINE, "train")
        assert "train.on_change is continue, but the run cannot continue (" in message
        return message.partition("cannot continue (")[2]

    assert reason(optimizer={"name": "lion"}).startswith("train.optimizer.name: an optimizer")
    assert reason(train_steps=30).startswith("train.train_steps: no step is left after step 40;")
    assert "segments end at other steps" in reason(global_batch_size=8, train_steps=200)
    for record in (trained / "results/smoke/training/inputs").iterdir():
        record.write_text("[]")
    lost = "training/inputs/[0-9a-f]{16}.json is lost, damaged, or an earlier version wrote none; "
    assert re.search(f"{lost}train once with the settings before", reason(train_steps=44))
    (trained / "architecture.yaml").write_text(
        (trained / "architecture.yaml").read_text().replace("layers: 2", "layers: 3")
    )
    assert reason().startswith("architecture.num_hidden_layers: the weights belong to another")


@pytest.mark.grid
@pytest.mark.slow
def test_a_changed_raw_file_is_named(trained: Path) -> None:
    lines = '{"text": "one document"}\n' * 300
    (trained / "own.jsonl").write_text(lines)
    (trained / "corpora.tsv").write_text(CORPORA.replace("results/raw/docs/*", "own.jsonl"))
    configure(trained, on_change="restart", train_steps=4, segment_steps=None)
    result = snakemake(trained, *MINE, "train")
    assert result.returncode == 0, result.stdout + result.stderr
    (trained / "own.jsonl").write_text(lines.replace("one", "two"))
    configure(trained, train_steps=4, segment_steps=None)
    (message,) = messages(trained, "-n", *MINE, "train")
    assert ": corpus docs: changed merged/docs-" in message


MODELS = {
    path.stem: path
    for path in (ROOT / "config/models").glob("*.yaml")
    if read_architecture(path).family != "retro"  # transformers has no model type for it
}


@pytest.mark.parametrize("model", sorted(MODELS))
def test_an_architecture_is_the_same_after_it_became_a_checkpoint(
    model: str, tmp_path: Path
) -> None:
    """Else a run that has not changed would be refused."""
    stated = read_architecture(MODELS[model])
    architecture = stated.model_copy(update={"vocab_size": stated.vocab_size or 1000})
    config_json.write_config(tmp_path, architecture, dtype="float32", eos_token=0)
    assert config_json.read_config(tmp_path)[0].model_dump() == architecture.model_dump()
