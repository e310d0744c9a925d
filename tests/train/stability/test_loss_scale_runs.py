"""Runs in fp16: settings of the loss scale, and overflows at the lowest one."""

from pathlib import Path

import pytest

from tests.support.bad_numbers import Settings, bad_run, events
from tests.support.runs import hashes, losses, records, train_here
from tokamake.errors import UserError

pytestmark = pytest.mark.usefixtures("lone_rank")


def test_settings_of_the_loss_scale_act_are_logged_and_resume(root: Path) -> None:
    scaling = {"initial_scale": 2.0**21, "hysteresis": 2, "window": 2}
    settings: Settings = {"precision": "fp16", "loss_scaling": scaling, "train_steps": 9}
    config, again = (bad_run(root, name, {}, **settings) for name in ("scaled", "scaled-again"))
    assert train_here(config) == 0
    scales = losses(config, "loss_scale")
    overflows = ["grad_norm" not in record for record in records(config) if "loss" in record]
    assert scales[:4] == [2.0**21, 2.0**21, 2.0**20, 2.0**19]  # the first overflow is tolerated
    assert overflows[:4] == [True] * 3 + [False]
    for until_step in (2, 5, None):
        assert train_here(again, until_step=until_step) == 0
    assert losses(again, "loss_scale") == scales
    assert hashes(again, 9) == hashes(config, 9)


def test_overflows_at_the_lowest_scale_are_bad_steps(root: Path) -> None:
    scaling = {"initial_scale": 2.0**31, "min_scale": 2.0**30}
    settings: Settings = {"precision": "fp16", "loss_scaling": scaling}
    config = bad_run(root, "lowest", {}, **settings)
    with pytest.raises(
        UserError, match=r"step 2: gradient norm: .* at a loss scale of 1\.07374e\+09"
    ):
        train_here(config)
    config = bad_run(root, "lowest-skipped", {"not_finite": "skip"}, **settings)
    # A run that has trained nothing is no success, also if it is started again at its end.
    for _ in range(2):
        with pytest.raises(UserError, match=r"no step has updated the weights: gradients always"):
            train_here(config)
        assert [event["step"] for event in events(config)] == [2, 3, 4, 5, 6]
        assert not config.with_name("train.json").exists()
