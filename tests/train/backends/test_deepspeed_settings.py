"""Settings that DeepSpeed cannot train, or gets wrong, are refused."""

from pathlib import Path

import pytest
import torch

from tests.support.deepspeed_runs import zero
from tests.support.layouts import laid_out, parallel
from tests.support.proofs import Changes
from tests.support.runs import make_run
from tokamake.config.resolved_run import read_run
from tokamake.config.training import TrainSettings
from tokamake.errors import UserError
from tokamake.preflight.run import check_precision

LAMB = {"optimizer": {"name": "lamb", "learning_rate": 0.01}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (zero(2) | parallel(pp=2), "zero_stage: 2: DeepSpeed reduces gradients after each"),
        (zero(3) | parallel(pp=2), "zero_stage: 3: DeepSpeed reduces gradients after each"),
        (zero(3, recompute_granularity="selective"), "recompute_granularity: selective"),
        (zero(1) | parallel(replicas=2), "data_parallel_replicate_size: 2"),
        (zero(0, precision="fp16"), "zero_stage: 0: .* no fp32 master weights with fp16; set it"),
        (zero(0, precision="bf16"), "zero_stage: 0: .* no fp32 master weights with bf16; set it"),
    ],
)
def test_settings_that_deepspeed_gets_wrong_are_refused_by_the_config(
    changes: Changes, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        TrainSettings.model_validate(changes)


@pytest.mark.parametrize(
    ("stage", "precision", "message"),
    [
        (1, "fp16", r"precision: fp16: DeepSpeed has no fp16 on the CPU; set it to bf16, or"),
        (0, "bf16", r"zero_stage: 0: DeepSpeed keeps no fp32 master weights with bf16; set it to"),
    ],
)
def test_ranks_check_the_precision_that_their_device_decides(
    stage: int, precision: str, message: str
) -> None:
    train = TrainSettings.model_validate(zero(stage))
    train = train.model_copy(update={"precision": precision})
    with pytest.raises(UserError, match=rf"^train\.{message}"):
        check_precision(train, torch.device("cpu"))


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
        (zero(1) | LAMB, "optimizer.name: lamb: needs whole parameters, but zero_stage 1"),
        (zero(0, optimizer={"name": "muon"}), "optimizer.name: muon: DeepSpeed cannot use it"),
        (zero(0, optimizer={"name": "adamw_8bit"}), "adamw_8bit: DeepSpeed cannot use it"),
    ],
)
def test_optimizers_that_do_not_fit_are_refused_by_the_config(
    changes: Changes, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        TrainSettings.model_validate(changes)
    TrainSettings.model_validate({**changes, "backend": "native", "zero_stage": 0})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (zero(0, offload_optimizer="cpu"), "zero_stage 1 or more"),
        (zero(2, offload_param="cpu"), "zero_stage 3 or more"),
        ({"backend": "native", "zero_stage": 3, "offload_param": "cpu"}, "needs backend deepspeed"),
    ],
)
def test_offloading_needs_something_to_offload(changes: Changes, message: str, root: Path) -> None:
    run = read_run(make_run(root, "run"))
    with pytest.raises(ValueError, match=message):
        laid_out(run, changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (zero(2) | parallel(pp=2), "train: zero_stage: 2: DeepSpeed reduces gradients after each"),
        (zero(1) | LAMB, "optimizer.name: lamb: needs whole parameters"),
    ],
)
def test_resolve_refuses_them_before_any_rank_starts(
    changes: Changes, message: str, root: Path
) -> None:
    with pytest.raises(UserError, match=message):
        make_run(root, "refused", **changes)
    assert not (root / "refused").exists()
