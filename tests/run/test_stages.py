"""Counts of a workflow's stages."""

from typing import Any

from tokamake.run.stages import Stages


def begin(number: int, rule: str, reason: str = "", **wildcards: str) -> dict[str, Any]:
    fields = {"reason": reason, "output": [f"{rule}-{number}"], "log": []}
    return {"kind": "begin", "jobid": number, "rule": rule, "wildcards": wildcards, **fields}


def test_a_stage_ends_with_its_last_job_and_a_failed_one_may_run_again() -> None:
    stages = Stages()
    stages.plan({"merge": 2, "total": 2})
    stages.begin(begin(1, "merge"))
    stages.begin(begin(2, "merge"))
    assert stages.finish(9) is None  # a job of a group that was not shown
    stages.fail(1)
    stage = stages.finish(2)
    assert stage is not None
    assert (stage.done, stage.total, stage.failed, stage.is_done) == (1, 2, 1, False)
    assert stage.seconds_left() is not None
    stages.begin(begin(1, "merge"))
    stages.finish(1)
    assert stage.is_done
    assert not stages.running
    assert stages.outputs == ["merge-1", "merge-2"]
    assert (stages.num_done, stages.num_planned) == (2, 2)


def test_runs_have_stages_of_their_own() -> None:
    stages = Stages()
    stages.plan({"train": 3, "total": 3})
    for number, run in enumerate(("small", "large", "small")):
        stages.begin(begin(number, "train", run=run))
    assert [(stage.name, stage.total) for stage in stages] == [
        ("train small", 2),
        ("train large", 1),
    ]
    assert stages.runs == ["small", "large"]


def test_reasons_have_no_files() -> None:
    reason = "Missing output files: a, b; Input files updated by another job: c"
    assert Stages().begin(begin(1, "merge", reason)).reasons == ["Missing output files"]
    alone = "Input files updated by another job: c"
    assert Stages().begin(begin(1, "merge", alone)).reasons == [alone.partition(":")[0]]
