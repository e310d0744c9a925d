"""Jobs that each start of a workflow writes, and `status` reads."""

from pathlib import Path

import pytest

from tokamake.config.data_set import DataSet
from tokamake.errors import UserError
from tokamake.status.jobs import DagJob, data_set_of, read_jobs, states, write_jobs
from tokamake.status.snakemake_internals import Marks

WEIGHTS = DagJob("fetch_weights", "", ["a.safetensors"], [], "logs/fetch_weights/a.log")
TOKENIZE = DagJob("tokenize", "", ["results/data/0.json"], [], "logs/tokenize/0.log")
TRAIN = DagJob("train", "big", ["results/big/train.json"], [], "logs/big/train.log")
PLOT = DagJob("plot", "big", ["results/big/plot"], ["results/big/train.json"], "logs/big/plot.log")
REPORT = DagJob("report", "", ["results/report.html"], ["results/big/plot"], "logs/report.log")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def jobs_of(folder: Path) -> dict[str, list[DagJob]]:
    return {title: group.jobs for title, group in read_jobs(folder).items()}


def test_groups_are_in_the_order_of_the_data_flow() -> None:
    write_jobs([WEIGHTS, TOKENIZE, TRAIN, PLOT, REPORT], DataSet(), rules=())
    write_jobs([WEIGHTS, REPORT, TRAIN._replace(run="small")], DataSet("gpt2"), rules=())
    groups = jobs_of(Path())
    assert groups == {
        "data": [TOKENIZE], "data gpt2": [], "starts": [WEIGHTS],
        "run big": [TRAIN, PLOT], "run small": [TRAIN._replace(run="small")],
        "report": [REPORT], "report gpt2": [REPORT],
    }  # fmt: skip
    assert [*groups] == [
        *("data", "data gpt2", "starts", "run big", "run small", "report", "report gpt2")
    ]
    assert data_set_of(Path(), "big") == DataSet()
    assert data_set_of(Path(), "small") == DataSet("gpt2")


def test_jobs_that_an_earlier_start_began_stay(folder: Path) -> None:
    write_jobs([TRAIN, PLOT], DataSet(), rules=())
    segment = TRAIN._replace(outputs=["results/big/train.5.json"])

    def after(*rules: str) -> list[DagJob]:
        write_jobs([segment], DataSet(), rules=["train", *rules])
        return jobs_of(folder)["run big"]

    assert after("plot") == [segment]
    write_jobs([TRAIN, PLOT], DataSet(), rules=())
    (folder / "logs/big").mkdir(parents=True)
    (folder / PLOT.log).touch()
    assert after("plot") == [segment, PLOT]
    assert after() == [segment]


@pytest.mark.parametrize("text", ["[", "[]", '{"jobs": [{"rule": "train"}]}', '{"jobs": 5}'])
def test_a_damaged_file_is_one_line_and_the_next_start_replaces_it(folder: Path, text: str) -> None:
    write_jobs([TRAIN], DataSet(), rules=())
    (folder / "results/big/jobs.json").write_text(text)
    with pytest.raises(UserError, match=r"^results/big/jobs\.json: not .*; start the workflow"):
        read_jobs(Path())
    write_jobs([TRAIN], DataSet(), rules=())
    assert jobs_of(folder) == {"run big": [TRAIN]}


def test_a_job_that_has_ended_meanwhile_does_not_run(tmp_path: Path) -> None:
    ended = DagJob("merge", "", ["results/data/a.json"], [], "logs/merge.log")
    marks = Marks(1.0, {ended.outputs[0]: tmp_path / "gone"})
    (found,) = states(tmp_path, [ended], marks=marks)
    assert found.state == "waiting"


def test_a_finished_run_that_continued_and_stopped_is_stopped(folder: Path) -> None:
    """Its model was plotted before; the training of more steps has removed train.json."""
    for path in (TRAIN.log, PLOT.log, f"{PLOT.outputs[0]}/loss.png"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).touch()
    (folder / TRAIN.log).write_text("stopped by SIGINT: saved at step 58, run the same command\n")
    assert [each.state for each in states(folder, [TRAIN, PLOT])] == ["stopped", "done"]
    (folder / TRAIN.outputs[0]).touch()
    assert [each.state for each in states(folder, [TRAIN, PLOT])] == ["done", "done"]
