"""Progress of a workflow from its files: states of stages and progress of training."""

import io
import json
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tests.support.finished_run import RUN, metric
from tests.support.status_folders import (
    NOW,
    index_run,
    job,
    killed,
    lock,
    mark,
    train,
    write,
    write_dataset,
)
from tokamake.config.data_set import DataSet
from tokamake.errors import UserError
from tokamake.runtime.folder_lock import this_process
from tokamake.status.jobs import DagJob, read_jobs, states, write_jobs
from tokamake.status.status import status
from tokamake.status.workflow_process import lock_text

BATCHES = [job("tokenize", f"web-0000{number}") for number in range(4)]
MERGE = job("merge", "web-00000", inputs=" ".join(batch.outputs[0] for batch in BATCHES))
REPORT = job("report", output="results/report.html")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A workflow in which the second tokenize job is running and the third has failed."""
    monkeypatch.setattr("tokamake.status.jobs.time", SimpleNamespace(time=lambda: NOW))
    monkeypatch.setattr("tokamake.status.status.time", SimpleNamespace(time=lambda: NOW))
    monkeypatch.chdir(tmp_path)
    write_jobs([*BATCHES, MERGE, job("describe"), REPORT], DataSet(), rules=())
    for number in (0, 1, 2):
        write(tmp_path / f"logs/tokenize/web-0000{number}.log", "reading\n\n")
    write(tmp_path / "results/data/batches/tokenize/web-00000.json", "{}")
    mark(tmp_path, "results/data/batches/tokenize/web-00001.json")
    words = "".join(f"line {n}\n" for n in range(9))
    write(tmp_path / "logs/tokenize/web-00002.log", f"{words}tokamake tokenize: a.jsonl:3: bad\n")
    return tmp_path


def test_a_line_a_group_running_ones_first(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(folder, age=60)
    status(folder=folder)
    since = time.strftime("%Y-%m-%d %H:%M", time.localtime(NOW - 9000))
    runs = f"the workflow runs (process {os.getpid()} on {os.uname().nodename}, since {since})"
    assert lock_text(folder, unlock="") == f"this folder is locked: {runs}; wait until it ends"
    assert capsys.readouterr().out.splitlines() == [
        runs,
        "running  run big  step 10 of 50 (20%), loss 4.0000, validation 7.0000, 108 tokens/s, "
        "1 h 00 min left",
        "running  data     tokenize 1 of 4 done",
        "waiting  report   0 of 1 job done, next: report",
    ]
    status(folder=folder, state="waiting")
    assert capsys.readouterr().out.splitlines()[1:] == [
        "waiting  report  0 of 1 job done, next: report"
    ]
    (folder / ".snakemake/incomplete").rename(folder / "gone")
    status(folder=folder, state="failed")
    assert capsys.readouterr().out.splitlines()[1:] == [
        "failed   run big  train: words",
        "failed   data     tokenize: reading",
        "the end of its logs: tokamake status big",
    ]


def test_a_job_of_several_files_is_done_when_it_does_not_run(folder: Path) -> None:
    outputs = ["results/raw/code/code-00.jsonl", "results/raw/docs"]
    sampling = DagJob("sample_corpus", "", outputs, [], "logs/sample_corpus.log")

    def state() -> str:
        return states(folder, [sampling])[0].state

    write(folder / sampling.log, "writing\n")
    (folder / "results/raw/docs").mkdir(parents=True)
    assert state() == "failed"
    mark(folder, outputs[0])
    assert state() == "running"
    shutil.rmtree(folder / ".snakemake")
    write(folder / outputs[0], "{}\n")
    assert state() == "failed"
    write(folder / "results/raw/docs/docs-00.jsonl", "{}\n")
    assert state() == "done"


def test_a_job_whose_deleted_files_no_job_needs_is_done(folder: Path) -> None:
    write(folder / MERGE.outputs[0], "{}")
    assert {each.state for each in states(folder, [*BATCHES, MERGE])} == {"running", "done"}
    (folder / MERGE.outputs[0]).unlink()
    found = [each.state for each in states(folder, [*BATCHES, MERGE])]
    assert found == ["done", "running", "failed", "waiting", "waiting"]


def state_of(folder: Path, batch: str) -> str:
    (batch_job,) = [each for each in BATCHES if each.log.endswith(f"{batch}.log")]
    return states(folder, [batch_job])[0].state


def test_a_killed_job_is_stopped_once_the_folder_is_unlocked(folder: Path) -> None:
    write(folder / "logs/tokenize/web-00001.log", "reading\n", age=3600)
    lock(folder, age=7200)
    assert state_of(folder, "tokenize/web-00001") == "running"
    shutil.rmtree(folder / ".snakemake/locks")
    assert state_of(folder, "tokenize/web-00001") == "stopped"
    # A job of a batch system continues without Snakemake.
    write(folder / "logs/tokenize/web-00001.log", "reading\n", age=60)
    assert state_of(folder, "tokenize/web-00001") == "running"
    local = BATCHES[1]._replace(is_local=True)
    assert states(folder, [local])[0].state == "stopped"


def test_a_failure_before_the_present_start_of_snakemake_is_waiting(folder: Path) -> None:
    write(folder / "logs/tokenize/web-00002.log", "bad\n", age=100)
    assert state_of(folder, "tokenize/web-00002") == "failed"
    lock(folder, age=200)
    assert state_of(folder, "tokenize/web-00002") == "failed"
    lock(folder, age=50)
    assert state_of(folder, "tokenize/web-00002") == "waiting"


def test_training_shows_speed_and_remaining_time(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(folder, age=7500)
    status("big", folder=folder)
    lines = capsys.readouterr().out.splitlines()
    start = lines.index("run big")
    assert lines[start + 1 : start + 4] == [
        "  running  train (last output 2 h 05 min ago)",
        "  waiting  export_hf, evaluate, generate, plot",
        "  done     weigh, index, resolve",
    ]
    assert lines[start + 4] == (
        "  training step 10 of 50 (20%), loss 4.0000, validation 7.0000, 108 tokens/s, "
        "1 h 00 min left, last line 2 h 05 min ago"
    )


def test_a_training_that_was_asked_to_stop_has_not_failed(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(folder, age=0)
    (folder / ".snakemake/incomplete").rename(folder / "gone")
    log = (
        "step 10/40\nstopped by SIGINT: saved at step 10, run the same command again to continue\n"
    )
    write(folder / "logs/big/train.log", f"{log}launch.sh: exit status 75\n")
    status("big", folder=folder)
    printed = capsys.readouterr().out
    assert "  stopped  train\n" in printed
    assert " left" not in printed
    assert "train.log ends with" not in printed
    write(folder / "logs/big/train.log", f"{log}\njob 2026\n" + "step\n" * 9)
    status("big", folder=folder)
    assert "  failed   train\n" in capsys.readouterr().out


def test_a_run_whose_data_were_replaced_says_so(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(folder, age=7500)
    index_run(folder, "big", sha256="of big")
    line = "  replaced since it was indexed: merged/web-0000_text_document"
    write_dataset(folder, sha256="another", age=60)
    status("big", folder=folder)
    assert line in capsys.readouterr().out.splitlines()
    status(folder=folder, json=True)
    runs = json.loads(capsys.readouterr().out)["runs"]
    replaced = ["merged/web-0000_text_document"]
    assert runs == {"big": {"data_set": "default", "replaced": replaced, "parent": None}}


def test_each_data_set_and_the_one_of_each_run_are_shown(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(folder, age=7500)
    gpt2, merged = DataSet("gpt2"), "results/data/gpt2/batches/merge/web-00000.json"
    report = job("report", output="results/data/gpt2/report.html")
    data = [job("merge", "web-00000", output=merged), job("describe"), report]
    write_jobs([*data, job("weigh", run="small")], gpt2, rules=())
    write(folder / merged, "{}")
    status(folder=folder)
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line[9:22].strip() for line in lines] == [
        *("run big", "data", "run small", "data gpt2", "report", "report gpt2")
    ]
    assert lines[3] == "waiting  data gpt2    1 of 2 jobs done, next: describe"
    status("small", folder=folder)
    assert "  data folder gpt2" in capsys.readouterr().out.splitlines()
    status(folder=folder, json=True)
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert {run: each["data_set"] for run, each in runs.items()} == {
        "big": "default", "small": "gpt2",
    }  # fmt: skip


def test_a_run_names_the_run_that_it_starts_from(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(folder, age=0)
    write(folder / "results/big/run.yaml", yaml.safe_dump({**RUN, "run": "big", "parent": "small"}))
    status("big", folder=folder)
    assert "  starts from run small" in capsys.readouterr().out.splitlines()
    status(folder=folder, json=True)
    assert json.loads(capsys.readouterr().out)["runs"]["big"]["parent"] == "small"


def test_damaged_lines_do_not_stop_status(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(folder, age=0)
    path = folder / "results/big/training/metrics.jsonl"
    damaged = b'ss": 1\n' + b"\0" * 99 + b'\n{"step": 12\n{"step": 13, "loss": "x"}\n'
    path.write_bytes(path.read_bytes() + damaged)
    status("big", folder=folder)
    assert "training step 10 of 50 (20%), loss 4.0000" in capsys.readouterr().out
    (folder / "results/big/run.yaml").write_text("[1")
    status("big", folder=folder)
    printed = capsys.readouterr()
    assert "results/big/run.yaml:1: not valid YAML" in printed.err
    assert "run big\n" in printed.out


def test_slow_ranks_are_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(folder, age=20)
    slow = [{"rank": 5, "host": "n2", "reason": "waits for samples"}]
    write(folder / "results/big/training/ranks.json", json.dumps({"slow": slow}))
    status("big", folder=folder)
    assert "  slow     rank 5 on n2: waits for samples" in capsys.readouterr().out.splitlines()
    status(folder=folder, json=True)
    training = json.loads(capsys.readouterr().out)["training"]["big"]
    assert training["slow_ranks"] == ["rank 5 on n2: waits for samples"]


def test_json_has_jobs_and_training(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(folder, age=10)
    status(folder=folder, json=True)
    report = json.loads(capsys.readouterr().out)
    (failed,) = [job for job in report["jobs"] if job["state"] == "failed"]
    assert failed["last_lines"][-1] == "tokamake tokenize: a.jsonl:3: bad"
    assert failed["product"] == "results/data/batches/tokenize/web-00002.json"
    assert report["training"]["big"]["seconds_left"] == 3600


def test_nan_is_null_in_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(folder, age=10)
    path = folder / "results/big/training/metrics.jsonl"
    lost = {**metric(15, float("nan")), "validation_loss": float("inf")}
    write(path, json.dumps(lost) + "\n")
    status(folder=folder, json=True)

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    training = json.loads(capsys.readouterr().out, parse_constant=refuse)["training"]["big"]
    assert (training["step"], training["loss"], training["validation_loss"]) == (15, None, None)


def test_named_validation_splits_are_shown(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(folder, age=0)
    path = folder / "results/big/training/metrics.jsonl"
    metrics = {"validation_accuracy_at_5": 0.125, "validation_token_accuracy": 0.25}
    losses = [
        {"step": 0, "validation_loss/code": 9.0},
        {"step": 10, "validation_loss": 3.5, "validation_loss/code": 3.0, **metrics},
        {"step": 10, "validation_loss/web": 2.5},
    ]
    lines = [*losses, {**metric(10, 4.0), "step_seconds": 90.0}]
    write(path, "".join(json.dumps(line) + "\n" for line in lines))
    status("big", folder=folder)
    text = "loss 4.0000, validation 3.5000 (25.0% of tokens right, 12.5% in the top 5), code 3.0000"
    assert f"{text}, web 2.5000, " in capsys.readouterr().out
    status(folder=folder, json=True)
    training = json.loads(capsys.readouterr().out)["training"]["big"]
    assert training["validation_losses"] == {"code": 3.0, "web": 2.5}


def test_only_the_end_of_long_metrics_is_read(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokamake.status import runs

    train(folder, age=0)
    path = folder / "results/big/training/metrics.jsonl"
    monkeypatch.setattr(runs, "_TAIL_BYTES", (100, 300))
    write(path, "no JSON at all\n" * 9 + path.read_text())
    status("big", folder=folder)
    assert "step 10 of 50 (20%), loss 4.0000, 110 tokens/s" in capsys.readouterr().out


def test_a_folder_of_an_earlier_version_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    with pytest.raises(
        UserError, match=r"results/data: no jobs\.json, .*; run Snakemake again, wi"
    ):
        status(folder=tmp_path)


def test_a_folder_without_a_workflow_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="neither results nor logs in it; give the folder that"):
        status(folder=tmp_path)


def test_a_killed_training_is_stopped_at_once(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(folder, age=1)
    write(folder / "results/big/.training.owner", this_process())
    killed(folder)
    status(folder=folder)
    again = "the same command continues"
    title, *lines = capsys.readouterr().out.splitlines()
    assert title.startswith("the workflow was killed; first unlock the folder: ")
    assert not any(line.startswith("running  run ") for line in lines)
    status(folder=folder, state="stopped")
    stopped = "stopped at step 10 of 50, nothing saved yet"
    assert f"  {stopped}; {again} from the start\n" in capsys.readouterr().out
    write(folder / "results/big/training/latest", "global_step8\n")
    status("big", folder=folder)
    text = f"  killed at step 10 of 50, saved at step 8; {again} from there\n"
    assert text in capsys.readouterr().out
    write(folder / "results/big/training/latest", "global_step10\n")
    status(folder=folder, state="stopped")
    assert f"stopped at step 10 of 50, saved; {again}\n" in capsys.readouterr().out


def test_a_training_outlives_the_snakemake_that_started_it(folder: Path) -> None:
    train(folder, age=9000)
    killed(folder)
    write(folder / "results/big/.training.owner", this_process())
    group = read_jobs(folder)["run big"]
    found = states(folder, group.jobs, lives=group.lives())
    assert group.lives() is False
    assert [each.state for each in found if each.job.rule == "train"] == ["running"]


def test_a_training_of_another_host_that_is_late_names_the_host(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(folder, age=500)
    elsewhere = this_process().replace(f" {os.uname().nodename} ", " nid0042 ")
    write(folder / "results/big/.training.owner", elsewhere)
    status(folder=folder)
    assert "nid0042" not in capsys.readouterr().out  # a line takes 450 s
    lines = [{**metric(step, 4.0), "step_seconds": 1.0} for step in (5, 10)]
    path = folder / "results/big/training/metrics.jsonl"
    write(path, "".join(json.dumps(line) + "\n" for line in lines), age=500)
    status(folder=folder)
    late = "silent for 8 min 20 s, 5 s is usual: look on nid0042 whether it lives"
    assert late in capsys.readouterr().out


def test_an_unknown_run_is_one_line(folder: Path) -> None:
    train(folder, age=0)
    with pytest.raises(UserError, match=r"^bigg: no run .*; did you mean big\?$"):
        status("bigg", folder=folder)


def test_files_that_are_opened_grow_with_the_runs_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train(folder, age=0)
    one = folder / "results/big"

    def opened(number: int) -> int:
        for n in range(number):
            if not (copy := folder / f"results/big{n}").exists():
                shutil.copytree(one, copy)
        count = 0
        real = io.open

        def counting(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            return real(*arguments, **options)

        monkeypatch.setattr("io.open", counting)  # pathlib opens with it
        status(folder=folder)
        monkeypatch.setattr("io.open", real)
        assert len(capsys.readouterr().out.splitlines()) <= number + 6
        return count

    few, many = opened(10), opened(40)
    assert many - few <= 30 * 9
