"""Lines of a display from events, also of trainings."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tokamake.run.display import Display
from tokamake.status.runs import TrainingProgress

PROGRESS = TrainingProgress(0, 40, 9.0, 9.1, {}, {}, 100.0, 60.0, 0.0, [], [], None, None, None)


def begin(number: int, rule: str, *, output: str = "", **wildcards: str) -> dict[str, Any]:
    fields = {"reason": "Missing output files: x", "output": [output], "log": []}
    return {"kind": "begin", "jobid": number, "rule": rule, "wildcards": wildcards, **fields}


def lines_of(stream: io.StringIO) -> list[str]:
    return stream.getvalue().splitlines()


def test_documents_of_finished_batches_are_counted(tmp_path: Path) -> None:
    stream = io.StringIO()
    display = Display(stream)
    display.show({"kind": "plan", "counts": {"tokenize": 3, "total": 3}})
    for number in range(3):
        path = tmp_path / f"batches/tokenize/web-{number}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        member = {"documents": 10, "tokens": 1000, "bytes": {"bin": 2000}}
        path.write_text(json.dumps({"members": [member, member]}) if number else "{")
        display.show(begin(number, "tokenize", output=str(path), batch=f"web-{number}"))
    for number in range(3):
        assert len(lines_of(stream)) == 1
        display.show({"kind": "finish", "jobid": number})
    line = lines_of(stream)[1]
    assert line.startswith(
        "tokenize             done: 3 jobs, 40 documents, 4,000 tokens, 8.0 kB, "
    )


def test_a_training_has_a_tenth_of_its_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = iter(range(0, 41))
    monkeypatch.setattr(
        "tokamake.status.runs.read_training",
        lambda *_, **__: PROGRESS._replace(step=next(steps), silent_seconds=-1.0),
    )
    monkeypatch.setattr("tokamake.run.display._POLL_SECONDS", 0.0)
    stream = io.StringIO()
    display = Display(stream)
    display.show(begin(1, "train", run="tiny"))
    for _ in range(40):
        display.tick()
    display.show({"kind": "finish", "jobid": 1})
    *lines, last = lines_of(stream)
    shown = [line.split(" of ")[0].split()[-1] for line in lines]
    assert shown == [str(step) for step in range(0, 41, 4)]
    assert lines[1].startswith(
        "train tiny           step 4 of 40 (10%), loss 9.0000, validation 9.1"
    )
    assert last.startswith("train tiny           done: ")


@pytest.mark.parametrize(("width", "lines"), [(80, 2), (160, 1)])
def test_the_bar_of_a_training_says_all_at_any_width(
    monkeypatch: pytest.MonkeyPatch, width: int, lines: int
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(width))
    now = PROGRESS._replace(step=20, silent_seconds=-1.0)
    monkeypatch.setattr("tokamake.status.runs.read_training", lambda *_, **__: now)
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True)
    display = Display(stream, is_live=True)
    display.show(begin(1, "train", run="tiny"))
    display.tick()
    drawn = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", stream.getvalue()).splitlines()
    bar = next(place for place, line in enumerate(drawn) if "━" in line and "step 20" in line)
    text = " ".join(" ".join(drawn[bar : bar + lines]).split())
    assert "step 20 of 40 (50%), loss 9.0000, validation 9.1000" in text
    assert text.endswith(" left")
    assert all(len(line) <= width - len("^C") for line in drawn)
    display.close()


def test_lines_of_an_earlier_start_are_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    old = PROGRESS._replace(step=20, silent_seconds=1e6)
    monkeypatch.setattr("tokamake.status.runs.read_training", lambda *_, **__: old)
    stream = io.StringIO()
    display = Display(stream)
    display.show(begin(1, "train", run="tiny"))
    display.tick()
    assert lines_of(stream) == []


@pytest.mark.parametrize("is_dry_run", [False, True])
def test_a_terminal_has_bars_but_not_in_a_dry_run(
    monkeypatch: pytest.MonkeyPatch, is_dry_run: bool
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: True)
    display = Display(stream, is_live=True, is_dry_run=is_dry_run)
    display.show({"kind": "plan", "counts": {"merge": 2}})
    for number in range(2):
        display.show(begin(number, "merge"))
    display.close()
    assert ("━" in stream.getvalue()) != is_dry_run
    assert ("2 jobs would run" in stream.getvalue()) == is_dry_run


def test_messages_of_snakemake_pass_unless_the_lines_say_more() -> None:
    stream = io.StringIO()
    display = Display(stream)
    provenance = "Some jobs were triggered by provenance information, see above.\nIf you prefer"
    silent = ("Building DAG of jobs...", "Complete log(s): a.log", provenance, "")
    for text in (*silent, "LockException: locked"):
        display.show({"kind": "message", "level": "INFO", "text": text})
    display.output("step 3/40 | loss 9.0")
    decision = "train.train_steps 40 -> 60. train.on_change is continue: training continues"
    display.output(f"tokamake: run mine: {decision}")
    display.output(f"results/mine/training: {decision}")
    display.output(f"results/mine/training: {decision}; moved to results/mine/training.1")
    schedule = "old: the schedules differ. train.on_change is continue: as in the config"
    display.output(f"tokamake: run mine: {schedule}")
    display.output(schedule)
    display.output("rank 1 on node2 is slow")
    assert lines_of(stream) == [
        *("LockException: locked", f"tokamake: run mine: {decision}"),
        "results/mine/training: moved to results/mine/training.1",
        *(f"tokamake: run mine: {schedule}", "rank 1 on node2 is slow"),
    ]


def test_after_a_stop_a_real_failure_is_shown(tmp_path: Path) -> None:
    stream, logs = io.StringIO(), [tmp_path / "full.log", tmp_path / "asked.log"]
    logs[0].write_text("tokamake merge: a.bin: No space left on device\n")
    logs[1].write_text("tokamake tokenize: stopped; the same command continues\n")
    display = Display(stream)
    display.is_stopping = True
    for number, log in enumerate(logs):
        event = {"kind": "fail", "jobid": number, "rule": log.stem, "log": [str(log)], "aux": {}}
        display.show(event)
    for text in ("Terminating processes on user request, now", "LockException: locked"):
        display.show({"kind": "message", "level": "INFO", "text": text})
    display.output("rank 1: closing signal SIGINT")
    assert display.failures == ["full"]
    assert [line.split(";")[0].strip() for line in lines_of(stream)] == [
        f"{'full':20} FAILED",
        "tokamake merge: a.bin: No space left on device",
        "likely remedy: free some space",
        "LockException: locked",
    ]
