"""The live screen of `tokamake status --watch`."""

import io
import json
from base64 import urlsafe_b64encode
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from tests.support.finished_run import RUN, metric
from tests.support.status_folders import train
from tokamake.config.data_set import DataSet
from tokamake.runtime.folder_lock import this_process
from tokamake.status.jobs import DagJob, read_jobs, write_jobs
from tokamake.status.overview import overviews
from tokamake.status.snakemake_internals import read_marks
from tokamake.status.status import status
from tokamake.status.watch import screen, sparkline

TRAIN = DagJob("train", "big", ["results/big/train.json"], [], "logs/big/train.log")
REPORT = DagJob("report", "", ["results/report.html"], [], "logs/report.log")


@pytest.mark.parametrize("width", [80, 160])
def test_watch_draws_bars_jobs_and_losses(
    tmp_path: Path, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_jobs([TRAIN, REPORT], DataSet(), rules=())
    measured = {"step_seconds": 90.0, "model_flops_per_second": 3e12, "mfu": 0.375}
    lines = [{**metric(step, 4.0), **measured} for step in (5, 10)]
    files = {
        "logs/big/train.log": "words\n",
        "results/big/run.yaml": yaml.safe_dump({**RUN, "run": "big"}),
        "results/big/.training.owner": this_process(),
        "results/big/training/metrics.jsonl": "".join(json.dumps(each) + "\n" for each in lines),
    }
    marker = urlsafe_b64encode(TRAIN.outputs[0].encode()).decode()
    files[f".snakemake/incomplete/{marker}"] = '{"external_jobid": "4711.pbs"}'
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = overviews(Path(), read_jobs(Path()))
    stream = io.StringIO()
    console = Console(width=width, file=stream)
    console.print(screen(Path(), found, title="it runs", marks=read_marks(Path())))
    drawn = stream.getvalue()
    assert all(len(line) <= width for line in drawn.splitlines())
    words = " ".join(drawn.split())
    for part in ("10 of 50 steps, 20%", "108 tokens/s", "1 h 00 min left", "job 4711.pbs"):
        assert part in words
    assert "3 TFLOP/s of the model, MFU 38%" in words
    assert "waiting report 0 of 1 job done, next: report" in words


def test_sparkline() -> None:
    assert sparkline([3.0, 2.0, float("nan"), 1.0]) == "█▄▁"
    assert sparkline([1.0] * 3) == "▁▁▁"
    assert len(sparkline([float(n) for n in range(1000)])) <= 40
    assert sparkline([]) == ""


def test_the_screen_outlives_files_that_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: Any, **__: Any) -> None:
        raise FileNotFoundError("[/red]: gone")

    monkeypatch.chdir(tmp_path)
    train(tmp_path, age=0)
    drawn: list[Any] = []
    monkeypatch.setattr("tokamake.status.watch.screen", gone)
    monkeypatch.setattr("tokamake.status.watch.watch", lambda draw: drawn.append(draw()))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    status(watch=True)
    assert drawn[0].plain == "[/red]: gone"
