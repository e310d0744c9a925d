"""Last lines of `tokamake run` beside the results of a run."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.finished_run import RUN, TRAINED, scores
from tokamake.run.closing import interrupted, summary
from tokamake.run.stages import Stages


def stages_of(*jobs: tuple[str, str, str]) -> Stages:
    stages = Stages()
    for number, (rule, run, output) in enumerate(jobs):
        event: dict[str, Any] = {"wildcards": {"run": run} if run else {}, "reason": "", "log": []}
        stages.begin({"jobid": number, "rule": rule, "output": [output], **event})
        stages.finish(number)
    return stages


@pytest.fixture(autouse=True)
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, loss in (("small", 3.5), ("large", 3.25)):
        folder = Path("results", name)
        folder.mkdir(parents=True)
        (folder / "run.yaml").write_text(yaml.safe_dump({**RUN, "run": name}))
        losses = [{"step": 50, "validation_loss": loss}]
        (folder / "train.json").write_text(
            json.dumps({**TRAINED, "run": name, "validation_losses": losses})
        )
        (folder / "evaluate.json").write_text(json.dumps({"overall": scores(3.0), "corpora": {}}))


def test_a_run_has_five_lines() -> None:
    Path("results/large/export").mkdir()
    stages = stages_of(
        ("train", "large", "results/large/train.json"), ("report", "", "a/report.html")
    )
    assert summary(stages, config=Path("my.yaml"), seconds=65.0) == [
        "run         large: loss 3.123, validation loss 3.25, perplexity 3 at step 50",
        "model       training/global_step50, results/large/export for transformers",
        "report      a/report.html: open it in a browser",
        "time        1 min 05 s for 2 jobs",
        "next        tokamake serve results/large/training",
    ]


def test_the_best_of_several_runs_is_named() -> None:
    stages = stages_of(("train", "small", "s"), ("train", "large", "l"), ("plot", "none", "p"))
    first, *_ = summary(stages, config=Path("my.yaml"), seconds=1.0)
    assert first.startswith("run         large, the best of 2 runs: ")


def test_data_alone_lead_to_training() -> None:
    lines = summary(stages_of(("tokenize", "", "a")), config=Path("my.yaml"), seconds=1.0)
    assert lines == ["time        1.0 s for 1 job", "next        tokamake run my.yaml train"]


def test_a_stop_without_a_checkpoint_keeps_jobs() -> None:
    assert (
        interrupted(["small"], again="tokamake run a.yaml")
        == "stopped: finished jobs are kept; continue: tokamake run a.yaml"
    )
