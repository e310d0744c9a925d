"""Settings that DeepSpeed cannot train, or gets wrong, are refused."""

import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.deepspeed_runs import zero
from tests.support.layouts import laid_out, parallel
from tests.support.proofs import Changes
from tests.support.runs import losses, make_run, prepare, train_here
from tokamake.config.resolved_run import read_run
from tokamake.config.training import TrainSettings
from tokamake.errors import UserError
from tokamake.train.backends import _deepspeed_setup as setup
from tokamake.train.backends.checks import deepspeed as checks

LAMB = {"optimizer": {"name": "lamb", "learning_rate": 0.01}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (zero(2) | parallel(pp=2), "zero_stage: 2: DeepSpeed reduces gradients after each"),
        (zero(3) | parallel(pp=2), "zero_stage: 3: DeepSpeed reduces gradients after each"),
        (zero(3, recompute_granularity="selective"), "recompute_granularity: selective"),
        (zero(1) | parallel(replicas=2), "data_parallel_replicate_size: 2"),
        (zero(1) | LAMB, "optimizer.name: lamb: needs whole parameters, but zero_stage 1"),
        *[
            (
                zero(0, precision="fp32", optimizer={"name": name}),
                f"optimizer.name: {name}: DeepSpeed cannot use this optimizer",
            )
            for name in ("muon", "adamw_8bit")
        ],
        (zero(0, precision="fp16"), "precision: fp16: DeepSpeed has no fp16 on the CPU"),
    ],
)
def test_settings_that_deepspeed_gets_wrong_are_refused(
    changes: Changes, message: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = prepare(tmp_path_factory.mktemp("refused"))
    run = read_run(make_run(root, "run"))
    precision = {"precision": changes.pop("precision", "fp32")} if "fp16" in message else {}
    run = laid_out(run, changes)
    run = run.model_copy(update={"train": run.train.model_copy(update=precision)})
    with pytest.raises(UserError, match=rf"^train\.backend: deepspeed: with train\..*{message}"):
        checks.check_run(run, "cpu")


@pytest.mark.parametrize("action", ["skip", "lower_rate"])
def test_spikes_cannot_be_skipped(action: str) -> None:
    settings = {"backend": "deepspeed", "on_bad_step": {"spike": action, "not_finite": action}}
    with pytest.raises(ValueError, match=f"on_bad_step.spike: {action}: DeepSpeed updates"):
        TrainSettings.model_validate(settings)
    settings["on_bad_step"] = {"spike": "rewind", "not_finite": action}
    TrainSettings.model_validate(settings)


def test_bad_steps_cannot_be_recomputed() -> None:
    settings = {"backend": "deepspeed", "on_bad_step": {"recompute": True}}
    with pytest.raises(ValueError, match=r"on_bad_step\.recompute: true: DeepSpeed"):
        TrainSettings.model_validate(settings)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (zero(0, offload_optimizer="cpu"), "zero_stage 1 or more"),
        (zero(2, offload_param="cpu"), "zero_stage 3 or more"),
        ({"backend": "native", "zero_stage": 3, "offload_param": "cpu"}, "needs backend deepspeed"),
    ],
)
def test_offloading_needs_something_to_offload(
    changes: Changes, message: str, tmp_path: Path
) -> None:
    run = read_run(make_run(prepare(tmp_path), "run"))
    with pytest.raises(ValueError, match=message):
        laid_out(run, changes)


def test_resolve_refuses_them_before_any_rank_starts(tmp_path: Path) -> None:
    root = prepare(tmp_path)
    for changes, message in (
        (zero(2) | parallel(pp=2), "train.zero_stage: 2: DeepSpeed reduces gradients after each"),
        (zero(1) | LAMB, "optimizer.name: lamb: needs whole parameters"),
    ):
        with pytest.raises(UserError, match=message):
            make_run(root, "run", **changes)
        assert not (root / "run").exists()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"train_batch_size": 8}, "train_batch_size: remove it, and set train.global_batch_size"),
        ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage: remove it, and set train."),
        ({"bf16": {"enabled": True}}, "bf16: remove it, and set train.precision"),
        (
            {"zero_optimization": {"round_robin_gradients": True}},
            "zero_optimization.round_robin_gradients: is not passed on to DeepSpeed; remove it "
            "(passed on: zero_optimization.reduce_bucket_size, ",
        ),
        (
            {"zero_optimization": {"overlap_comm": True}},
            "zero_optimization.overlap_comm: is not passed on to DeepSpeed",
        ),
        (
            {"zero_optimization": {"stage3_prefetch_bucket_size": 9}},
            "zero_optimization.stage3_prefetch_bucket_size: is not passed on",
        ),
        (
            {"zero_optimization": {"reduce_bucket_size": "many"}},
            "zero_optimization.reduce_bucket_size: 'many': give a whole number",
        ),
        ({"wall_clock_breakdown": 1}, "wall_clock_breakdown: 1: give true or false"),
        ({"zero_optimization": 3}, "zero_optimization: 3: not a section; give its settings"),
        (
            {"zero_optimization": {"offload_param": {"device": "nvme"}}},
            "zero_optimization.offload_param.device: remove it, and set train.offload_param",
        ),
    ],
)
def test_settings_of_the_json_file_that_conflict_are_refused(
    values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"deepspeed: {re.escape(message)}"):
        TrainSettings.model_validate({"backend": "deepspeed", "deepspeed": values})


def test_the_native_back_end_has_no_settings_of_the_json_file() -> None:
    with pytest.raises(ValueError, match="deepspeed: only the back end deepspeed has these"):
        TrainSettings.model_validate({"deepspeed": {"wall_clock_breakdown": True}})


@pytest.mark.usefixtures("lone_rank")
def test_settings_of_the_json_file_reach_deepspeed(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    root = prepare(tmp_path_factory.mktemp("passed"))
    plain = make_run(root, "plain", **zero(2))
    passed = {"zero_optimization": {"reduce_bucket_size": 100, "allgather_bucket_size": 200}}
    config = make_run(root, "passed", **zero(2, deepspeed=passed))
    zero_settings = setup.settings(read_run(config), 1)["zero_optimization"]
    assert passed["zero_optimization"].items() <= zero_settings.items()
    assert zero_settings["stage"] == 2
    assert train_here(plain) == train_here(config) == 0
    assert losses(config) == pytest.approx(losses(plain), rel=1e-6)
    wrong = {"zero_optimization": {"reduce_bucket_size": -1}}
    config = make_run(root, "wrong", **zero(2, deepspeed=wrong))
    with pytest.raises(UserError, match=r"train\.deepspeed: .*reduce_bucket_size: -1: .*; correct"):
        train_here(config)
