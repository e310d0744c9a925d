"""Ranks decide together about a step with bad numbers, and the journal says whose they are."""

import shutil
from functools import partial
from pathlib import Path

import pytest

from tests.support.bad_numbers import NAN, Settings, bad_run, events, poison
from tests.support.forked import train
from tests.support.grids import params
from tests.support.runs import hashes, losses
from tokamake.config.resolved_run import read_run

pytestmark = pytest.mark.usefixtures("lone_rank")

LAYOUTS: dict[str, tuple[Settings, list[int]]] = {
    "data": ({"zero_stage": 2}, [1]),
    "tensor": ({"parallel": {"tensor_parallel_size": 2}}, [0, 1]),
    "pipeline": ({"parallel": {"pipeline_parallel_size": 2}}, [1]),
    "deepspeed-1": ({"backend": "deepspeed", "zero_stage": 1}, [1]),
    "deepspeed-3": ({"backend": "deepspeed", "zero_stage": 3}, [1]),
}


@pytest.mark.ranks
@pytest.mark.parametrize("layout", params(LAYOUTS, ["tensor", "deepspeed-3"]))
def test_ranks_go_back_together_from_bad_numbers_on_one_of_them(root: Path, layout: str) -> None:
    settings, ranks = LAYOUTS[layout]
    config = bad_run(root, layout, {"not_finite": "rewind"}, **settings)
    printed = train(config, ranks=2, fault=partial(poison, config, NAN))
    assert printed.count("going back to") == 1
    (event,) = events(config)
    assert (event["step"], event["ranks"]) == (5, ranks)
    expected = bad_run(root, f"{layout}-left-out", {}, skip_data=[[5, 5]], **settings)
    train(expected, ranks=2)
    assert hashes(config) == hashes(expected)
    shutil.rmtree(read_run(expected).output)


@pytest.mark.ranks
@pytest.mark.grid
@pytest.mark.parametrize("zero_stage", [1, 3])
def test_deepspeed_goes_back_before_a_spike(root: Path, zero_stage: int) -> None:
    """DeepSpeed has updated the weights when it knows the numbers of the step."""
    settings: Settings = {
        "backend": "deepspeed",
        "zero_stage": zero_stage,
        "save_interval": 3,
        "train_steps": 9,
    }
    on_bad_step: Settings = {"spike": "rewind", "spike_window": 4}
    config = bad_run(root, f"deepspeed-spike-{zero_stage}", on_bad_step, **settings)
    train(config, ranks=2, fault=partial(poison, config, {7 * 8: 30.0}))
    assert [(event["step"], event["checkpoint"]) for event in events(config)] == [
        (8, "global_step6")
    ]
    expected = bad_run(
        root, f"deepspeed-left-out-{zero_stage}", on_bad_step, skip_data=[[8, 8]], **settings
    )
    train(expected, ranks=2)
    assert hashes(config, 9) == hashes(expected, 9)
    assert losses(config) == losses(expected)


@pytest.mark.ranks
@pytest.mark.fault("numbers that are not finite")
@pytest.mark.parametrize(
    "settings",
    [
        {"zero_stage": 2},
        pytest.param({"backend": "deepspeed", "zero_stage": 2}, marks=pytest.mark.grid),
        pytest.param({"backend": "deepspeed", "zero_stage": 3}, marks=pytest.mark.grid),
    ],
)
def test_all_ranks_are_named_if_none_knows_whose_gradient_is_bad(
    root: Path, settings: Settings
) -> None:
    name = "gradient-{backend}-{zero_stage}".format(**{"backend": "native", **settings})
    config = bad_run(root, name, {"not_finite": "skip"}, **settings)
    printed = train(config, ranks=2, fault=partial(poison, config, NAN, of_gradients=True))
    (event,) = events(config)
    assert event["reason"].startswith("gradient norm: ")
    assert (event["step"], event["ranks"]) == (5, [0, 1])
    assert "skipped: gradients are not finite" in printed
