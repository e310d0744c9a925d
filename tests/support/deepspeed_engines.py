"""DeepSpeed's engine on a tiny Llama: set-up, a step on random gradients, a checkpoint."""

import os
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.deepspeed_models import (
    DTYPES,
    EMBEDDING,
    HEAD,
    LAYERS,
    NORM,
    PADDED,
    SAMPLES,
    STEPS,
    SUB_GROUP_SIZE,
    TOKENS,
    VOCAB,
    Case,
    Chain,
    arguments,
    pipeline_module,
    weights_of,
)


def initialize() -> None:
    """Prepare the process of a rank."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("LOCAL_RANK", "0")
    import deepspeed

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # DeepSpeed would compile it
    # Without fp16 instructions, a CPU is slow but correct.
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    deepspeed.init_distributed(dist_backend="gloo", dist_init_required=False)


def build_engine(case: Case, **settings: Any) -> tuple[Any, nn.Module]:
    """Return DeepSpeed's engine, and the model inside it."""
    import deepspeed

    deepspeed.utils.groups.mpu = None
    mpu = None if case.pipeline else mpu_of(case)
    rank = dist.get_rank()
    weights = weights_of(case, rank % case.tensor, rank // case.tensor % case.data)
    module = pipeline_module(weights, case) if case.pipeline else Chain(weights)
    matrices = [parameter for parameter in module.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in module.parameters() if parameter.dim() <= 1]
    groups: list[dict[str, Any]] = [
        {"name": "wd_no_scale_lr", "wd_mult": 1.0, "lr_mult": 1.0, "params": matrices},
        {"name": "no_wd_no_scale_lr", "wd_mult": 0.0, "lr_mult": 1.0, "params": vectors},
    ]
    groups[1]["weight_decay"] = 0.0
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1),
        lr_scheduler=Scheduler(),
        mpu=mpu,
        config=_settings(case) | settings,
    )
    return engine, module


def train_step(engine: Any, case: Case) -> None:
    start = torch.zeros(1, dtype=DTYPES[case.precision])
    if case.pipeline:
        engine.train_batch(iter([(start, start)]))
    else:
        engine.backward(engine(start).sum())
        engine.step(lr_kwargs={"increment": SAMPLES // STEPS})


def save(engine: Any, folder: Path, case: Case) -> None:
    """Save as Megatron-DeepSpeed does."""
    module = engine.module
    state_dict = module.state_dict
    if not case.pipeline:
        module.state_dict = lambda **options: nested(state_dict(**options))
    state = {
        "args": arguments(case),
        "checkpoint_version": 3.0,
        "iteration": STEPS,
        "tokens": TOKENS,
        "universal_checkpoint_info": _universal_info(case),
        "rng_state": [
            {
                "random_rng_state": random.getstate(),
                "np_rng_state": np.random.get_state(),
                "torch_rng_state": torch.get_rng_state(),
                "cuda_rng_state": torch.get_rng_state(),
                "rng_tracker_states": {"model-parallel-rng": torch.get_rng_state()},
            }
        ],
    }
    engine.save_checkpoint(str(folder), client_state=state)
    module.state_dict = state_dict


def nested(flat: dict[str, Tensor]) -> dict[str, Any]:
    """Nest a state as Megatron's state_dict_for_save_checkpoint does."""
    encoder = "language_model.encoder."
    model: dict[str, Any] = {
        "embedding": {"word_embeddings": {"weight": flat[f"{EMBEDDING}.weight"]}},
        "encoder": {n.removeprefix(encoder): t for n, t in flat.items() if n.startswith(encoder)},
    }
    if f"{HEAD}.weight" in flat:
        model["output_layer"] = {"weight": flat[f"{HEAD}.weight"]}
    return {"language_model": model}


def _universal_info(case: Case) -> dict[str, Any]:
    """Return the patterns of parameter names that ds_to_universal needs."""
    if case.pipeline:
        layers, norm = r"\d+.", r"\d+.weight"
        embeddings = [r"\d+.word_embeddings", r"\d+.lm_head"]
        embeddings = ["tied_modules.embed.word_embeddings"] if case.tied else embeddings
    else:
        layers, norm = LAYERS + r"\d+.", f"{NORM}.weight"
        embeddings = [EMBEDDING, *([] if case.tied else [HEAD])]
    info: dict[str, Any] = {
        "universal_checkpoint_version": 0.2,
        "padded_vocab_size": PADDED,
        "original_vocab_size": PADDED if case.full else VOCAB,
        "vocabulary_parameter_patterns": [f"{name}.weight" for name in embeddings],
        "parameter_with_2_sub_params_cat_dim_0": [f"{layers}mlp.dense_h_to_4h.weight"],
    }
    if case.pipeline and case.tied:
        info["pipeline_replicated_parameter_patterns"] = [f"{embeddings[0]}.weight"]
    if case.tensor > 1:
        names = ("input_layernorm", "post_attention_layernorm")
        copies = [f"{layers}{name}.weight" for name in names]
        info["tp_replicated_parameter_patterns"] = [*copies, norm]
        names = ("mlp.dense_4h_to_h", "self_attention.dense")
        columns = [f"{layers}{name}.weight" for name in names]
        info["parameter_with_row_parallelism_patterns"] = columns
    return info


def mpu_of(case: Case) -> Any:
    """Return Megatron's `mpu` as DeepSpeed uses it. Ranks of a tensor are consecutive."""
    rank, size = dist.get_rank(), case.tensor
    grid = torch.arange(case.world_size).view(-1, size)
    model = [dist.new_group(ranks.tolist()) for ranks in grid][rank // size]
    data = [dist.new_group(ranks.tolist()) for ranks in grid.T][rank % size]
    return SimpleNamespace(
        get_model_parallel_group=lambda: model,
        get_model_parallel_rank=lambda: rank % size,
        get_model_parallel_world_size=lambda: size,
        get_tensor_model_parallel_group=lambda: model,
        get_tensor_model_parallel_rank=lambda: rank % size,
        get_tensor_model_parallel_world_size=lambda: size,
        get_pipeline_model_parallel_rank=lambda: 0,
        get_pipeline_model_parallel_world_size=lambda: 1,
        get_data_parallel_group=lambda: data,
        get_data_parallel_rank=lambda: rank // size,
        get_data_parallel_world_size=lambda: case.data,
    )


class Scheduler:
    """Scheduler with the state of Megatron's OptimizerParamScheduler."""

    def __init__(self) -> None:
        self.num_steps = 0

    def step(self, increment: int) -> None:
        self.num_steps += increment

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_steps = state["num_steps"]

    def state_dict(self) -> dict[str, Any]:
        return {
            "max_lr": 0.01,
            "lr_warmup_steps": 0,
            "num_steps": self.num_steps,
            "lr_decay_style": "cosine",
            "lr_decay_steps": 1000,
            "min_lr": 0.001,
            "start_wd": 0.1,
            "end_wd": 0.1,
            "wd_incr_style": "constant",
            "wd_incr_steps": 0,
        }


def _settings(case: Case) -> dict[str, Any]:
    """Return DeepSpeed's configuration."""
    zero = {
        "stage": case.zero_stage,
        "round_robin_gradients": case.round_robin,
        "overlap_comm": False,
        "sub_group_size": SUB_GROUP_SIZE,
        "stage3_param_persistence_threshold": 0,
    }
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": SAMPLES // STEPS // case.data,
        "gradient_accumulation_steps": 1,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1000,
        "pipeline": {"pipe_partitioned": False, "grad_partitioned": False},
    }
    if case.precision == "bf16":
        settings["bf16"] = {"enabled": True}
        settings["data_types"] = {"grad_accum_dtype": case.accumulation}
    if case.precision == "fp16":
        settings["fp16"] = {"enabled": True, "loss_scale": 8.0}
    return settings
