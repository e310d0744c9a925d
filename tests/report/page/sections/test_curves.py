"""Curves of training on the page: events, accuracies, legends."""

import json
from pathlib import Path

import yaml

from tests.support.finished_run import make_results
from tests.support.report_pages import after, shown


def test_spikes_and_phases_are_events(results: Path) -> None:
    event = {"step": 20, "case": "spike", "reason": "loss 9 is high", "action": "skip"}
    (results / "trial/training/events.jsonl").write_text(json.dumps(event) + "\n")
    run = yaml.safe_load((results / "trial/run.yaml").read_text())
    run["train"]["finetune"] = False
    changed = {**run, "parent": "first", "step": 10}
    (results / "trial/run.yaml").write_text(yaml.safe_dump(changed))
    texts = shown(results).sections["curves"]
    assert after(texts, "time", 6) == [
        *("trial", "10", "continues run first", "trial", "20", "spike: loss 9 is high (skip)")
    ]


def test_encoders_have_accuracies(results: Path) -> None:
    shares = {"validation_token_accuracy": 0.25, "validation_accuracy_at_5": 0.5}
    with (results / "trial/training/metrics.jsonl").open("a") as metrics:
        metrics.write(json.dumps({"step": 50, **shares}) + "\n")
    texts = shown(results).sections["curves"]
    assert after(texts, "Accuracy in validation", 2) == ["tokens", "in the top 5"]


def test_memory_and_utilization_are_drawn(results: Path) -> None:
    with (results / "trial/training/metrics.jsonl").open("a") as metrics:
        for step in (45, 50):
            metrics.write(json.dumps({"step": step, "mfu": 0.4, "peak_memory_bytes": 3e9}) + "\n")
    texts = shown(results).sections["curves"]
    assert "Utilization of the devices (MFU)" in texts
    place = texts.index("Peak memory of rank 0")
    assert texts[place:].count("3") >= 4  # GB: first, lowest, highest, last


def test_many_runs_share_a_legend(tmp_path: Path) -> None:
    results = make_results(tmp_path / "results", [f"run{number}" for number in range(7)])
    texts = shown(results).sections["curves"]
    assert after(texts, "Hide or show a run in all figures of this section:", 1) == ["run0"]
    # In the legend, in the table of each figure, and in the choice of a step.
    assert texts.count("run0") == texts.count("Numbers") + 2
