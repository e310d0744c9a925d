"""What a run was made from, as its files say."""

import json
import os
from pathlib import Path

import pytest
import yaml

from tests.support.finished_run import RUN
from tokamake.config.data_set import DEFAULT
from tokamake.config.resolved_run import Run, read_run
from tokamake.data.indexed.manifest import write_manifest
from tokamake.status import runs
from tokamake.status.runs import Origin, read_origin

PREFIX = "merged/web-0000_text_document"


def write_run(folder: Path, *, data_set: str = DEFAULT, **settings: str) -> None:
    """Write the run.yaml of the run `big` and its sample index of one dataset."""
    (folder / "results/big/index").mkdir(parents=True, exist_ok=True)
    jobs = {"data_set": data_set, "jobs": []}
    (folder / "results/big/jobs.json").write_text(json.dumps(jobs))
    run = {**RUN, "run": "big", "data_root": "results/data", **settings}
    (folder / "results/big/run.yaml").write_text(yaml.safe_dump(run))
    index = folder / "results/big/index/index.json"
    index.write_text(json.dumps({"pairs": {PREFIX: {"sha256": {"bin": "of big"}}}}))
    os.utime(index, (100, 100))


def write_dataset(data: Path, *, sha256: str, time: float) -> None:
    path = data / f"{PREFIX}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_manifest(path, {"sha256": {"bin": sha256}})
    os.utime(path, (time, time))


def test_a_run_names_its_data_set_and_its_parent(tmp_path: Path) -> None:
    write_run(tmp_path, data_set="gpt2", parent="small")
    assert read_origin(tmp_path, "big") == Origin("gpt2", [], "small")


@pytest.mark.parametrize(
    ("sha256", "time", "is_replaced"),
    [("of big", 50, False), ("of big", 200, False), ("another", 200, True)],
    ids=["older than the index", "written again alike", "written again with other content"],
)
def test_replaced_datasets_are_named(
    tmp_path: Path, sha256: str, time: float, is_replaced: bool
) -> None:
    write_run(tmp_path)
    write_dataset(tmp_path / "results/data", sha256=sha256, time=time)
    assert read_origin(tmp_path, "big").replaced == [PREFIX] * is_replaced


def test_the_same_name_in_another_data_set_replaces_nothing(tmp_path: Path) -> None:
    write_run(tmp_path)
    write_dataset(tmp_path / "results/data/gpt2", sha256="another", time=200)
    assert read_origin(tmp_path, "big").replaced == []


def test_a_damaged_dataset_is_not_replaced(tmp_path: Path) -> None:
    write_run(tmp_path)
    write_dataset(tmp_path / "results/data", sha256="another", time=200)
    (tmp_path / f"results/data/{PREFIX}.json").write_text("{}")
    assert read_origin(tmp_path, "big").replaced == []


@pytest.mark.parametrize("flow", [False, True])
def test_steps_are_read_without_a_check_of_all_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flow: bool
) -> None:
    """The settings of hundreds of runs take seconds; a file in another style is read in full."""
    write_run(tmp_path)
    text = yaml.safe_dump({**RUN, "run": "big"}, default_flow_style=flow, sort_keys=False)
    (tmp_path / "results/big/run.yaml").write_text(text)
    metrics = tmp_path / "results/big/training/metrics.jsonl"
    metrics.parent.mkdir()
    metrics.write_text(json.dumps({"step": 0, "validation_loss": 7.0}) + "\n")
    checked: list[Path] = []

    def read(path: Path) -> Run:
        checked.append(path)
        return read_run(path)

    monkeypatch.setattr(runs, "read_run", read)
    training = runs.read_training(tmp_path, "big", now=0)
    assert training is not None
    assert training.steps == read_run(tmp_path / "results/big/run.yaml").train.train_steps
    assert len(checked) == flow
