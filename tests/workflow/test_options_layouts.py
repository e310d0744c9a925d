"""How the ranks that a profile gives to jobs share models; the dry run tests the rest."""

from typing import Any

import pytest

from tests.support.workflow_configs import read_config, train, wildcards
from tokamake.workflow.options import RunSettings

pytestmark = pytest.mark.usefixtures("workspace_here")

SMOKE = wildcards(run="smoke")
PARALLEL = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}


def options(tasks: Any, **changes: Any) -> list[str]:
    settings = RunSettings(read_config(train=train(**changes)))
    return settings.inference_options(SMOKE, [], resources={"tasks": tasks})


def test_ranks_share_a_model_as_in_training() -> None:
    sizes = ["--tensor-parallel-size=2", "--pipeline-parallel-size=2"]
    assert options(8, parallel=PARALLEL, zero_stage=0) == sizes
    assert options(8, parallel=PARALLEL, zero_stage=3) == [*sizes, "--fsdp"]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ranks_share_the_weights_unless_each_had_all_in_training(stage: int) -> None:
    """A model that its training sharded may be too large for one device, in fp32 at least."""
    assert options(2, zero_stage=stage) == (["--fsdp"] if stage else [])


@pytest.mark.parametrize("tasks", [1, "1", "<TBD>"])
def test_one_rank_has_the_whole_model(tasks: Any) -> None:
    assert options(tasks, parallel=PARALLEL, zero_stage=3) == []


def test_ranks_that_the_layout_does_not_fit_share_the_weights() -> None:
    assert options(6, parallel=PARALLEL) == ["--fsdp"]


def test_evaluation_has_the_batch_size_of_the_config() -> None:
    settings = RunSettings(read_config(evaluate={"batch_size": 32}))
    alone = settings.evaluation_options(SMOKE, [], resources={"tasks": 1})
    assert alone == ["--batch-size=32"]
