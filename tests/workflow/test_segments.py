"""SegmentRules of runs: their ends, inputs, and what a failed workflow reports."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.workflow_configs import read_config, train, wildcards, write_runs
from tokamake.errors import UserError
from tokamake.workflow import segments as segments_module
from tokamake.workflow.segments import SegmentRules, trained_steps

pytestmark = pytest.mark.usefixtures("workspace_here")

EPOCHS = "corpus\tfiles\tepochs\ncode\tresults/raw/code/*\t2\n"
TOKENIZER = {"path": "tokenizer"}


def planned(run: str) -> str:
    return f"results/{run}/segments.json"


def make_segments(
    *, in_job: bool = False, plan: Callable[[str], str] = planned, **settings: Any
) -> SegmentRules:
    """SegmentRules of the run `smoke`, of 40 steps."""
    return SegmentRules(read_config(train=train(**settings)), None if in_job else plan)


def save(step: int, *, run: str = "smoke", folders: tuple[int, ...] | None = None) -> None:
    """Write what training leaves when it saves at a step."""
    training = Path(f"results/{run}/training")
    for folder in (step,) if folders is None else folders:
        (training / f"global_step{folder}").mkdir(parents=True, exist_ok=True)
    training.mkdir(parents=True, exist_ok=True)
    (training / "latest").write_text(f"global_step{step}\n")


def test_most_runs_are_one_segment() -> None:
    segments = make_segments()
    assert segments.ends("smoke") == []
    assert segments.before(wildcards(run="smoke", segment="")) == []
    assert segments.evaluations(wildcards(run="smoke")) == []
    assert segments.open_ended == []


@pytest.mark.parametrize(("segment_steps", "ends"), [(10, [10, 20, 30]), (15, [15, 30]), (40, [])])
def test_the_last_segment_has_no_step_of_its_own(segment_steps: int, ends: list[int]) -> None:
    assert make_segments(segment_steps=segment_steps).ends("smoke") == ends


@pytest.mark.parametrize(
    ("segment", "before"),
    [(".10", []), (".20", ["train.10.json"]), (".30", ["train.20.json"]), ("", ["train.30.json"])],
)
def test_a_segment_follows_the_one_before(segment: str, before: list[str]) -> None:
    segments = make_segments(segment_steps=10)
    files = segments.before(wildcards(run="smoke", segment=segment))
    assert files == [f"results/smoke/{name}" for name in before]


def test_a_step_that_training_has_passed_counts_while_its_checkpoint_exists() -> None:
    save(25, folders=(20,))
    segments = make_segments(segment_steps=10)
    assert segments.ends("smoke") == [20, 30]
    save(30, folders=())
    assert make_segments(segment_steps=10).ends("smoke") == [20]


def test_a_job_depends_on_an_earlier_segment_only_if_its_file_exists() -> None:
    segments = make_segments(segment_steps=10, in_job=True)
    job = wildcards(run="smoke", segment=".20")
    assert segments.before(job) == []
    Path("results/smoke").mkdir(parents=True)
    Path("results/smoke/train.10.json").touch()
    assert segments.before(job) == ["results/smoke/train.10.json"]


@pytest.mark.parametrize("in_job", [False, True])
def test_the_plan_ends_segments_of_a_run_whose_data_decide_its_length(in_job: bool) -> None:
    settings = train(train_steps=None, segment_steps=5, split="80,10,10")
    config = read_config(table=EPOCHS, train=settings)
    calls: list[str] = []

    def plan(run: str) -> str:
        calls.append(run)
        return planned(run)

    segments = SegmentRules(config, None if in_job else plan)
    assert segments.open_ended == ["smoke"]
    assert calls == []
    assert segments.ends("smoke") == []
    Path("results/smoke").mkdir(parents=True)
    Path(planned("smoke")).write_text(json.dumps({"num_steps": 12, "segments": [5, 10]}))
    assert segments.ends("smoke") == [5, 10]
    assert calls == ([] if in_job else ["smoke", "smoke"])


@pytest.mark.parametrize("damaged", ["{}", "[1", "3"])
def test_a_damaged_plan_of_segments_is_named(damaged: str) -> None:
    settings = train(train_steps=None, segment_steps=5, split="80,10,10")
    segments = SegmentRules(read_config(table=EPOCHS, train=settings), planned)
    Path("results/smoke").mkdir(parents=True)
    Path(planned("smoke")).write_text(damaged)
    with pytest.raises(UserError, match=r"smoke/segments\.json: .*; remove it, to plan the"):
        segments.ends("smoke")


def test_a_run_without_segments_is_not_open_ended() -> None:
    config = read_config(table=EPOCHS, train=train(train_steps=None))
    assert SegmentRules(config, planned).open_ended == []


def continued(finetune: bool) -> Any:
    tokenizer = Path("tokenizer")
    tokenizer.mkdir(exist_ok=True)
    (tokenizer / "tokenizer.json").touch()
    settings = train(segment_steps=10, finetune=finetune)
    return read_config(train=settings, model={"checkpoint": "start"}, tokenizer=TOKENIZER)


@pytest.mark.parametrize(("finetune", "ends"), [(False, [30]), (True, [10, 20, 30])])
def test_a_continued_run_has_segments_after_its_start(
    monkeypatch: pytest.MonkeyPatch, finetune: bool, ends: list[int]
) -> None:
    start = SimpleNamespace(progress=SimpleNamespace(iteration=20))
    monkeypatch.setattr(segments_module, "open_any", lambda _: start)
    assert SegmentRules(continued(finetune), planned).ends("smoke") == ends


def test_a_checkpoint_that_cannot_be_read_names_its_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(path: Path) -> None:
        raise UserError(f"{path}: no such folder")

    monkeypatch.setattr(segments_module, "open_any", fail)
    with pytest.raises(UserError, match=r"^model\.checkpoint: start: no such folder$"):
        SegmentRules(continued(False), planned)


def test_a_segment_ends_at_its_step_and_the_last_one_with_the_run() -> None:
    segments = make_segments(segment_steps=10)
    assert segments.end_option(wildcards(run="smoke", segment=".10")) == ["--until-step=10"]
    assert segments.end_option(wildcards(run="smoke", segment="")) == []


def test_the_checkpoint_of_a_segment_or_the_export_is_evaluated() -> None:
    segments = make_segments(segment_steps=10)
    middle, last = wildcards(run="smoke", segment=".10"), wildcards(run="smoke", segment="")
    assert segments.evaluated_model(middle) == "results/smoke/training/global_step10"
    assert segments.evaluated_model(last) == "results/smoke/export"
    assert segments.evaluated_inputs(middle) == "results/{run}/train{segment}.json"
    assert segments.evaluated_inputs(last) == "results/{run}/export"
    expected = [f"results/{{run}}/evaluate.{step}.json" for step in (10, 20, 30)]
    assert segments.evaluations(wildcards(run="smoke")) == expected


def test_each_run_has_its_own_segments() -> None:
    runs = write_runs("run train.segment_steps", "short 20", "long 30")
    segments = SegmentRules(read_config(runs=runs), planned)
    assert {run: segments.ends(run) for run in ("short", "long")} == {"short": [20], "long": [30]}


def test_only_runs_that_trained_and_did_not_end_are_reported() -> None:
    runs = write_runs("run train.train_steps", "idle 40", "stopped 4000", "ended 40")
    save(7, run="idle")
    save(7, run="stopped")
    segments = SegmentRules(read_config(runs=runs), planned)
    assert segments.saved_since_start() == []
    save(1234, run="stopped")
    save(40, run="ended")
    assert segments.saved_since_start() == [
        "tokamake: run stopped is saved at step 1,234; the same command continues from there"
    ]


def test_a_damaged_latest_is_no_step() -> None:
    Path("results/smoke/training").mkdir(parents=True)
    Path("results/smoke/training/latest").write_bytes(b"\xff\xfe")
    assert trained_steps("smoke") == 0


@pytest.mark.parametrize(
    ("latest", "steps"),
    [("global_step12\n", 12), ("global_step0", 0), ("", 0), ("other12", 0), (None, 0)],
)
def test_training_goes_on_at_the_step_that_latest_names(latest: str | None, steps: int) -> None:
    Path("results/smoke/training").mkdir(parents=True)
    if latest is not None:
        Path("results/smoke/training/latest").write_text(latest)
    assert trained_steps("smoke") == steps


@pytest.mark.parametrize(
    ("found", "is_forced"),
    [
        ((object(), "latest: names global_step4: going back to global_step2"), True),
        ((object(), ""), False),
        ((None, ""), False),
    ],
)
def test_a_finished_run_without_its_newest_checkpoint_trains_again(
    monkeypatch: pytest.MonkeyPatch, found: tuple[Any, str], is_forced: bool
) -> None:
    forced: list[str] = []
    monkeypatch.setattr(segments_module, "newest_state", lambda _: found)
    segments = SegmentRules(read_config(), planned, force_job=forced.append)
    segments.before(wildcards(run="smoke", segment=""))
    assert not forced  # it is not finished
    Path("results/smoke").mkdir(parents=True)
    Path("results/smoke/train.json").touch()
    segments.before(wildcards(run="smoke", segment=""))
    assert forced == ["results/smoke/train.json"] * is_forced
