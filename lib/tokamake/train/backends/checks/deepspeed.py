"""Checks of the back end `deepspeed` (ZeRO)."""

from typing import TYPE_CHECKING

from tokamake.errors import UserError
from tokamake.train.backends.checks._deepspeed_json import check_json

if TYPE_CHECKING:
    from tokamake.config.resolved_run import Run
    from tokamake.config.training import TrainSettings

PACKAGES = ("deepspeed",)
OFFLOADS = {"offload_optimizer": 1, "offload_param": 3}


def check_settings(train: "TrainSettings") -> None:
    """Check that DeepSpeed supports the settings of a run."""
    if train.precision == "bf16" and train.zero_stage == 0:
        # DeepSpeed would keep only bf16 weights, which round small updates away.
        raise ValueError(
            "zero_stage: 0: DeepSpeed keeps no fp32 master weights; set it to 1, or precision to "
            "fp32"
        )
    if (action := train.on_bad_step.spike) in ("skip", "lower_rate"):
        raise ValueError(
            f"on_bad_step.spike: {action}: DeepSpeed updates the weights before it knows the "
            "gradient norm; set it to rewind, or backend to native"
        )
    if train.on_bad_step.recompute:
        raise ValueError(
            "on_bad_step.recompute: true: DeepSpeed computes gradients in its update alone; set it "
            "to false, or backend to native"
        )
    check_json(train.deepspeed, train)
    if reason := _optimizer_conflict(train):
        raise ValueError(f"{reason}, or backend to native")
    if train.log_layer_norms:
        raise ValueError(
            "log_layer_norms: true: DeepSpeed reports only the norm of the whole gradient; set "
            "backend to native, or this to false"
        )
    if train.compile:
        raise ValueError(
            "compile: true: is not supported by backend deepspeed; set it to false or backend "
            "to native"
        )


def check_run(run: "Run", device_type: str | None) -> None:
    """Check that DeepSpeed can train a run.

    Args:
        device_type: type of this rank's device; None where it is not known yet.
    """
    train, parallel = run.train, run.train.parallel
    stage, precision = train.zero_stage, train.precision
    pipelined, low = parallel.pipeline_parallel_size > 1, precision not in ("fp32", None)
    if pipelined and stage >= 2:
        _refuse(
            f"zero_stage: {stage}: DeepSpeed reduces gradients after each backward pass, so it "
            "cannot use a pipeline; set it to 1, or pipeline_parallel_size to 1"
        )
    if precision == "fp16" and device_type == "cpu":
        _refuse("precision: fp16: DeepSpeed has no fp16 on the CPU; set it to bf16")
    if low and stage == 0:
        _refuse(
            f"zero_stage: 0: DeepSpeed keeps no fp32 master weights with {precision}; set it to 1"
        )
    if stage == 3 and train.recompute_granularity == "selective":
        _refuse(
            "recompute_granularity: selective: it would keep the weights that zero_stage 3 "
            "gathers; set it to full, or zero_stage to 2"
        )
    if parallel.data_parallel_replicate_size > 1:
        _refuse(
            f"parallel.data_parallel_replicate_size: {parallel.data_parallel_replicate_size}: "
            "DeepSpeed shards over all data-parallel ranks; set it to 1"
        )
    if reason := _optimizer_conflict(train):
        _refuse(reason)


def _optimizer_conflict(train: "TrainSettings") -> str:
    """Why DeepSpeed cannot use the optimizer; empty if it can."""
    optimizer, stage = train.optimizer, train.zero_stage
    if not optimizer.facts.flat_buffers:
        return f"optimizer.name: {optimizer.name}: DeepSpeed cannot use it; use another one"
    if stage and not optimizer.facts.elementwise:
        return (
            f"optimizer.name: {optimizer.name}: needs whole parameters, but zero_stage {stage} "
            "splits them; set zero_stage to 0"
        )
    return ""


def _refuse(reason: str) -> None:
    raise UserError(f"train.backend: deepspeed: with train.{reason}, or train.backend to native")
