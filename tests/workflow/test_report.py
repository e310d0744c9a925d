"""Inputs of the rule `report`: the results of all kinds of runs."""

from typing import Any

import pytest

from tests.support.workflow_configs import wildcards
from tests.support.workflows import CONFIG
from tokamake.workflow.checkpoints import CheckpointRules
from tokamake.workflow.config import read_workflow_config
from tokamake.workflow.report import ReportRules
from tokamake.workflow.retrieval import RetrievalRules
from tokamake.workflow.segments import SegmentRules
from tokamake.workflow.tasks import TaskRules


def rules(**changes: Any) -> ReportRules:
    config = read_workflow_config({**CONFIG, **changes}, ["my.yaml"], is_main_process=False)
    segments = SegmentRules(config, None, force_job=None, checkpoints=CheckpointRules(config))
    return ReportRules(
        config,
        segments=segments,
        tasks=TaskRules(config, segments),
        retrieval=RetrievalRules(config, is_main_process=False),
    )


@pytest.mark.usefixtures("workspace_here")
def test_a_run_has_scores_and_samples() -> None:
    train = {**CONFIG["train"], "train_steps": 40, "segment_steps": 20}
    report = rules(
        train=train, evaluate={"tasks": {"words": {"name": "lambada", "data": ["w.jsonl"]}}}
    )
    assert report.results(wildcards()) == [
        "results/data/metadata.json",
        "results/smoke/index/index.json",
        "results/smoke/train.json",
        "results/smoke/evaluate.json",
        "results/smoke/samples.json",
        "results/smoke/tasks/words.json",
    ]
    assert report.segment_scores(wildcards()) == [
        "results/smoke/evaluate.20.json",
        "results/smoke/tasks/words.20.json",
    ]
