"""Checks of the back end `deepspeed` (ZeRO)."""

from typing import TYPE_CHECKING

from tokamake.train.backends.checks._deepspeed_json import check_json

if TYPE_CHECKING:
    from tokamake.config.training import TrainSettings

PACKAGES = ("deepspeed",)
OFFLOADS = {"offload_optimizer": 1, "offload_param": 3}


def check_settings(train: "TrainSettings") -> None:
    """Check that DeepSpeed supports the settings of a run."""
    _check_layout(train)
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
    _check_optimizer(train)
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


def check_precision(train: "TrainSettings", device_type: str | None) -> None:
    """Check that DeepSpeed can train in the precision of a run."""
    if train.precision == "fp16" and device_type == "cpu":
        raise ValueError(
            "precision: fp16: DeepSpeed has no fp16 on the CPU; set it to bf16, or backend to "
            "native"
        )
    if train.precision not in ("fp32", None) and train.zero_stage == 0:
        # DeepSpeed would keep only 16-bit weights, which round small updates away.
        raise ValueError(
            f"zero_stage: 0: DeepSpeed keeps no fp32 master weights with {train.precision}; set it "
            "to 1, or precision to fp32"
        )


def _check_layout(train: "TrainSettings") -> None:
    stage, parallel = train.zero_stage, train.parallel
    if parallel.pipeline_parallel_size > 1 and stage >= 2:
        raise ValueError(
            f"zero_stage: {stage}: DeepSpeed reduces gradients after each backward pass, so it "
            "cannot use a pipeline; set it to 1, or parallel.pipeline_parallel_size to 1, or "
            "backend to native"
        )
    if stage == 3 and train.recompute_granularity == "selective":
        raise ValueError(
            "recompute_granularity: selective: DeepSpeed would keep the weights that zero_stage 3 "
            "gathers; set it to full, or zero_stage to 2, or backend to native"
        )
    if (size := parallel.data_parallel_replicate_size) > 1:
        raise ValueError(
            f"parallel.data_parallel_replicate_size: {size}: DeepSpeed shards over all "
            "data-parallel ranks; set it to 1, or backend to native"
        )
    if (size := parallel.expert_parallel_size) > 1:
        raise ValueError(
            f"parallel.expert_parallel_size: {size}: DeepSpeed divides only experts of its own "
            "layers, by groups that it makes itself; set it to 1, or backend to native"
        )


def _check_optimizer(train: "TrainSettings") -> None:
    optimizer, stage = train.optimizer, train.zero_stage
    if not optimizer.facts.flat_buffers:
        raise ValueError(
            f"optimizer.name: {optimizer.name}: DeepSpeed cannot use it; use another one, or "
            "backend to native"
        )
    if stage and not optimizer.facts.elementwise:
        raise ValueError(
            f"optimizer.name: {optimizer.name}: needs whole parameters, but zero_stage {stage} "
            "splits them; set zero_stage to 0, or backend to native"
        )
