"""Settings of DeepSpeed's JSON file (`train.deepspeed`): passed on, or refused with the reason.

The tables name every setting of DeepSpeed 0.19. Their keys are paths: `zero_optimization.stage`.
"""

import math
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokamake.config.training import TrainSettings

_ZERO = "zero_optimization"
_ALL, _STAGES_1_2, _STAGE_2, _STAGE_3 = (0, 3), (1, 2), (2, 2), (3, 3)

PASSED: dict[str, tuple[type, tuple[int, int]]] = {
    "comms_logger.debug": (bool, _ALL),
    "comms_logger.enabled": (bool, _ALL),
    "comms_logger.prof_all": (bool, _ALL),
    "comms_logger.prof_ops": (list, _ALL),
    "comms_logger.verbose": (bool, _ALL),
    "dump_state": (bool, _ALL),
    "log_level": (str, _ALL),
    "memory_breakdown": (bool, _ALL),
    "steps_per_print": (int, _ALL),
    "wall_clock_breakdown": (bool, _ALL),
    f"{_ZERO}.allgather_bucket_size": (int, _STAGES_1_2),
    f"{_ZERO}.contiguous_gradients": (bool, (1, 3)),
    f"{_ZERO}.enable_sanity_checks": (bool, _STAGE_3),
    f"{_ZERO}.ignore_unused_parameters": (bool, _STAGE_2),
    f"{_ZERO}.log_trace_cache_warnings": (bool, _STAGE_3),
    f"{_ZERO}.offload_optimizer.pin_memory": (bool, (1, 3)),
    f"{_ZERO}.offload_param.pin_memory": (bool, _STAGE_3),
    f"{_ZERO}.overlap_comm": (bool, (2, 3)),
    f"{_ZERO}.parameter_alignment": (bool, _STAGES_1_2),
    f"{_ZERO}.reduce_bucket_size": (int, (1, 3)),
    f"{_ZERO}.reduce_scatter": (bool, (1, 3)),
    f"{_ZERO}.stage3_allgather_sequential": (bool, _STAGE_3),
    f"{_ZERO}.stage3_max_live_parameters": (int, _STAGE_3),
    f"{_ZERO}.stage3_max_reuse_distance": (int, _STAGE_3),
    f"{_ZERO}.stage3_model_persistence_threshold": (int, _STAGE_3),
    f"{_ZERO}.stage3_module_granularity_threshold": (int, _STAGE_3),
    f"{_ZERO}.stage3_param_persistence_threshold": (int, _STAGE_3),
    f"{_ZERO}.stage3_prefetch_bucket_size": (int, _STAGE_3),
    f"{_ZERO}.stage3_use_all_reduce_for_fetch_params": (bool, _STAGE_3),
    f"{_ZERO}.sub_group_size": (int, _STAGE_3),
    f"{_ZERO}.use_multi_rank_bucket_allreduce": (bool, _STAGES_1_2),
}
"""Settings that DeepSpeed gets: type, and the lowest and highest ZeRO stage with an effect."""

OF_BUCKETS = {
    f"{_ZERO}.{name}"
    for name in (
        *("contiguous_gradients", "parameter_alignment", "reduce_bucket_size", "reduce_scatter"),
        "use_multi_rank_bucket_allreduce",
    )
}
"""Settings of gradients in buckets."""
_NO_BUCKETS = (1, "bf16", "none")
"""ZeRO stage, precision and offload of DeepSpeed's optimizer without buckets."""

OWN = {
    "activation_checkpointing": "recompute_granularity",
    "bf16": "precision",
    "bfloat16": "precision",
    "comet": "trackers",
    "compile": "compile",
    "csv_monitor": "trackers",
    "data_efficiency": "skip_data or the table of corpora",
    "dataloader_drop_last": "drop_last_partial_sequence",
    "flops_profiler": "profile_steps",
    "fp16": "precision and loss_scaling",
    "gradient_accumulation_steps": "global_batch_size",
    "gradient_clipping": "gradient_clipping",
    "optimizer": "optimizer",
    "pipeline": "parallel",
    "scheduler": "schedule",
    "sequence_parallel_size": "parallel.context_parallel_size",
    "tensor_parallel": "parallel.tensor_parallel_size",
    "tensorboard": "log_style",
    "torch_autocast": "precision",
    "train_batch_size": "global_batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "wandb": "trackers",
    f"{_ZERO}.cpu_offload": "offload_optimizer",
    f"{_ZERO}.cpu_offload_param": "offload_param",
    f"{_ZERO}.offload_optimizer.device": "offload_optimizer",
    f"{_ZERO}.offload_param.device": "offload_param",
    f"{_ZERO}.stage": "zero_stage",
}
"""Setting of `train` in place of one of DeepSpeed's."""

_CHECKPOINTS = "tokamake writes checkpoints"
_FP32_SUMS = "sums of gradients are always fp32"
_UNSCALED = f"{_FP32_SUMS}, which do not overflow"
_NO_MOE = "no model of tokamake has experts for it"
_NO_NVME = "tokamake offloads to host memory, not to NVMe"
_OPTIMIZER = "it needs DeepSpeed's own optimizer for the CPU, which would be compiled at start"
_MODULES = "it changes how DeepSpeed builds modules, and tokamake builds them"
_REMOVED = "DeepSpeed 0.19 has no such feature"
REFUSED = {
    "aio": _NO_NVME,
    "amp": _REMOVED,
    "autotuning": "`tokamake benchmark-train` measures layouts",
    "checkpoint": _CHECKPOINTS,
    "communication_data_type": _FP32_SUMS,
    "compression_training": _REMOVED,
    "curriculum_learning": _REMOVED,
    "data_types": _FP32_SUMS,
    "datastates_ckpt": _CHECKPOINTS,
    "disable_allgather": "DeepSpeed reads it, but does not use it",
    "disable_python_gc": "no one would collect garbage",
    "eigenvalue": _REMOVED,
    "elasticity": _REMOVED,
    "expert_parallel": _NO_MOE,
    "gradient_allreduce_op": "tokamake scales gradients for a mean",
    "gradient_predivide_factor": _UNSCALED,
    "graph_harvesting": _REMOVED,
    "hybrid_engine": "it is for reinforcement learning",
    "managed_gradient_accumulation": "tokamake counts micro batches",
    "nebula": _REMOVED,
    "prescale_gradients": _UNSCALED,
    "progressive_layer_drop": _REMOVED,
    "quantize_training": _REMOVED,
    "seq_parallel_communication_data_type": "sequence parallelism is tokamake's",
    "sparse_attention": _REMOVED,
    "sparse_gradients": _REMOVED,
    "timers": "the log and metrics.jsonl have the throughput",
    "use_data_before_expert_parallelism": _NO_MOE,
    "vocabulary_size": "tokamake pads the vocabulary",
    "weight_quantization": "it is for inference",
    "zero_allow_untested_optimizer": "tokamake sets it",
    "zero_force_ds_cpu_optimizer": "tokamake sets it",
    **{
        f"{_ZERO}.{name}": reason
        for name, reason in {
            "allgather_partitions": "DeepSpeed reads it, but does not use it",
            "compute_grad_norm": "checks of bad steps need the gradient norm",
            "cpu_offload_use_pin_memory": "DeepSpeed deprecates it; use offload_*.pin_memory",
            "elastic_checkpoint": _CHECKPOINTS,
            "leaf_module": _NO_MOE,
            "legacy_stage1": _REMOVED,
            "load_from_fp32_weights": _CHECKPOINTS,
            "memory_efficient_linear": _MODULES,
            "mics_hierarchical_params_gather": _REMOVED,
            "mics_shard_size": _REMOVED,
            "offload_optimizer.buffer_count": _NO_NVME,
            "offload_optimizer.cpuadam_cores_perc": _OPTIMIZER,
            "offload_optimizer.fast_init": _NO_NVME,
            "offload_optimizer.nvme_path": _NO_NVME,
            "offload_optimizer.pipeline_read": _NO_NVME,
            "offload_optimizer.pipeline_write": _NO_NVME,
            "offload_optimizer.ratio": _OPTIMIZER,
            "offload_optimizer.super_offload": _OPTIMIZER,
            "offload_param.buffer_count": _NO_NVME,
            "offload_param.buffer_size": _NO_NVME,
            "offload_param.max_in_cpu": _NO_NVME,
            "offload_param.nvme_path": _NO_NVME,
            "override_module_apply": _MODULES,
            "pipeline_loading_checkpoint": _CHECKPOINTS,
            "round_robin_gradients": "checkpoints need the parameters in their usual order",
            "save_muon_momentum_buffer_in_memory": _NO_NVME,
            "stage3_gather_16bit_weights_on_model_save": _CHECKPOINTS,
            "stage3_gather_fp16_weights_on_model_save": _CHECKPOINTS,
            "zenflow": "it updates weights with gradients of earlier steps",
            "zero_hpz_partition_size": "it keeps a second copy of weights, which would stay empty",
            "zero_quantized_gradients": _FP32_SUMS,
            "zero_quantized_nontrainable_weights": "tokamake trains all weights",
            "zero_quantized_weights": "it computes with other weights than a checkpoint has",
            "zeropp_loco_param": _REMOVED,
        }.items()
    },
}
"""Reason why DeepSpeed does not get a setting."""

_FROM_1 = {
    "steps_per_print",
    *(f"{_ZERO}.{name}_size" for name in ("allgather_bucket", "reduce_bucket", "sub_group")),
}
"""Whole numbers that must not be 0."""
_LOG_LEVELS = ("debug", "info", "warning", "error", "critical")
_KNOWN = {*PASSED, *OWN, *REFUSED}
_SECTIONS = {key[:end] for key in _KNOWN for end, letter in enumerate(key) if letter == "."}
_TYPES = {bool: "true or false", int: "a whole number", list: "a list", str: "text"}


def check_json(values: dict[str, Any], train: "TrainSettings", *, prefix: str = "") -> None:
    """Refuse settings of DeepSpeed's JSON file that it does not get, and values of other types.

    Args:
        values: settings of a section, by name; numbers such as 5e8 become whole ones.
        prefix: path of the section, with a dot at its end; empty at the top.
    """
    for name, value in values.items():
        key = f"{prefix}{name}"
        if key in _SECTIONS:
            if not isinstance(value, dict):
                raise ValueError(f"deepspeed: {key}: {value!r}: not a section; give its settings")
            check_json(value, train, prefix=f"{key}.")
        elif own := OWN.get(key):
            raise ValueError(f"deepspeed: {key}: remove it, and set train.{own}")
        elif reason := REFUSED.get(key):
            raise ValueError(f"deepspeed: {key}: DeepSpeed does not get it: {reason}; remove it")
        elif key not in PASSED:
            close = get_close_matches(key, sorted(_KNOWN | _SECTIONS), 1)
            remedy = f"did you mean {close[0]}?" if close else "remove it"
            raise ValueError(f"deepspeed: {key}: DeepSpeed has no such setting; {remedy}")
        else:
            values[name] = _whole(value) if PASSED[key][0] is int else value
            _check_value(key, values[name], train=train)


def _whole(value: Any) -> Any:
    """A whole number that is written as in DeepSpeed's documentation, such as 5e8; else the value.

    YAML reads 5e8 as text, and JSON as a fraction.
    """
    try:
        number = float(value) if isinstance(value, str | float) else math.nan
    except ValueError:
        return value
    return int(number) if number.is_integer() else value


def _check_value(key: str, value: Any, *, train: "TrainSettings") -> None:
    kind, (low, high) = PASSED[key]
    if not low <= train.zero_stage <= high:
        stages = f"zero_stage {low}" if low == high else f"zero_stage {low} to {high}"
        raise ValueError(
            f"deepspeed: {key}: has no effect with zero_stage {train.zero_stage}; remove it, or "
            f"set {stages}"
        )
    section = key.removeprefix(f"{_ZERO}.").partition(".")[0]
    if section.startswith("offload_") and getattr(train, section) == "none":
        raise ValueError(
            f"deepspeed: {key}: has no effect without train.{section}; set that, or remove this"
        )
    has_buckets = (train.zero_stage, train.precision, train.offload_optimizer) != _NO_BUCKETS
    if key in OF_BUCKETS and not has_buckets:
        raise ValueError(
            f"deepspeed: {key}: has no effect with zero_stage 1 in bf16, which has no buckets; "
            "remove it, or set zero_stage 2"
        )
    if type(value) is not kind:
        raise ValueError(f"deepspeed: {key}: {value!r}: give {_TYPES[kind]}")
    if isinstance(value, int) and value < (least := int(key in _FROM_1)):
        raise ValueError(f"deepspeed: {key}: {value}: too small; give {least} or more")
    if key == "log_level" and value not in _LOG_LEVELS:
        raise ValueError(f"deepspeed: {key}: {value!r}: give one of {', '.join(_LOG_LEVELS)}")
