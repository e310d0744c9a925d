"""Checkpoints that DeepSpeed itself writes for a tiny Llama, and the states that its ranks held.

Modules have the names and shapes of Megatron-DeepSpeed. Gradients are random numbers.

case = Case(zero_stage=2, precision="bf16")
folder = write_checkpoints(tmp_path, case)[case]  # the argument of `engine.save_checkpoint`
held_states(folder)["language_model.embedding.word_embeddings"]["exp_avg"]
"""

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

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
    Weight,
    arguments,
    pipeline_module,
    weights_of,
)
from tests.support.ranks import spawn
from tokamake.checkpoint.torch_files import torch_archive

KINDS = ("exp_avg", "exp_avg_sq")


def write_checkpoints(folder: Path, *cases: Case) -> dict[Case, Path]:
    """Train and save. One launch handles all cases of a world size.

    Args:
        folder: where to write a folder for each case.
        cases: checkpoints to write.

    Returns:
        The folders. Each has `latest`, global_step3 and held.pt.
    """
    for size in sorted({case.world_size for case in cases}):
        cases_of_size = [case for case in cases if case.world_size == size]
        results = spawn(_train_all, size, folder, cases_of_size, timeout=600)
        for number, case in enumerate(cases_of_size):
            held = _merged(case.tensor, [result[number] for result in results])
            torch.save(held, folder / str(case) / "held.pt")
    return {case: folder / str(case) for case in cases}


def held_states(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the states that the ranks held when they saved.

    For each of Megatron's weights (without `.weight`): `weight` in the model's dtype, `master` in
    fp32, `exp_avg`, `exp_avg_sq` and `step`. Tensors are whole.
    """
    held: dict[str, dict[str, Any]] = torch.load(folder / "held.pt", weights_only=True)
    return held


def convert_to_universal(folder: Path) -> Path:
    """Run DeepSpeed's ds_to_universal, and return the universal checkpoint beside global_step3.

    The program fails if weights are nested, as Megatron's are. So remove them while it runs.
    """
    source, target = folder / f"global_step{STEPS}", folder / f"global_step{STEPS}_universal"
    kept = {file: torch.load(file, weights_only=False) for file in source.glob("mp_rank_*")}
    for file, state in kept.items():
        torch.save({**state, "module": None}, file)
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"]
    command += ["--input_folder", str(source), "--output_folder", str(target)]
    settings = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=settings, check=True, capture_output=True)
    for file, state in kept.items():
        torch.save(state, file)
        torch.save(state, target / file.name)
    return target


def _mpu(case: Case) -> Any:
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


def load_universal(checkpoint: Path, case: Case) -> dict[str, dict[str, Any]]:
    """Have DeepSpeed load a universal checkpoint; return the ranks' states (`held_states`)."""
    return _merged(case.tensor, spawn(_load, case.world_size, checkpoint, case, timeout=600))


def _load(checkpoint: Path, case: Case) -> dict[str, dict[str, Any]]:
    _begin()
    engine, module = _engine(case, checkpoint={"load_universal": True})
    path, state = engine.load_checkpoint(str(checkpoint), load_lr_scheduler_states=False)
    assert path is not None
    assert state["iteration"] == STEPS
    return dict(_held(engine, module))


class Resumed(NamedTuple):
    """States of the ranks of DeepSpeed, as in `held_states`."""

    held: dict[str, dict[str, Any]]
    """After loading."""
    after: dict[str, dict[str, Any]]
    """After another step."""
    num_steps: int
    """Step count of the scheduler after loading."""


def resume(*checkpoints: tuple[Path, Case, bool]) -> list[Resumed]:
    """Have DeepSpeed load checkpoints that are not universal, and train another step.

    Args:
        checkpoints: folder with `latest`, case of its ranks, and whether to load optimizer states.
            Without these, there is no other step. All cases have the same world size.
    """
    (size,) = {case.world_size for _, case, _ in checkpoints}
    results = spawn(_resume_all, size, checkpoints, timeout=600)
    return [
        Resumed(
            _merged(case.tensor, [result[number][0] for result in results]),
            _merged(case.tensor, [result[number][1] for result in results]),
            results[0][number][2],
        )
        for number, (_, case, _) in enumerate(checkpoints)
    ]


def _resume_all(checkpoints: list[tuple[Path, Case, bool]]) -> list[tuple[Any, ...]]:
    _begin()
    return [_resume(*checkpoint) for checkpoint in checkpoints]


def _resume(checkpoint: Path, case: Case, with_states: bool) -> tuple[Any, ...]:
    engine, module = _engine(case)
    load_state_dict = module.load_state_dict
    if not case.pipeline:
        module.load_state_dict = lambda nested, **options: load_state_dict(  # type: ignore[method-assign]
            dict(torch_archive.leaves(nested)), **options
        )
    path, state = engine.load_checkpoint(str(checkpoint), load_optimizer_states=with_states)
    assert path is not None
    assert state["iteration"] == engine.global_steps == STEPS
    num_steps, weights = engine.lr_scheduler.num_steps, [*_weights(module)]
    if not with_states:
        return {weight.name: {"weight": _gathered(weight.weight)} for weight in weights}, {}, 0
    held = dict(_held(engine, module))
    for weight in weights:
        weight.calls = STEPS
    _step(engine, case)
    return held, dict(_held(engine, module)), num_steps


def _begin() -> None:
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


def _train_all(folder: Path, cases: list[Case]) -> list[dict[str, dict[str, Any]]]:
    """Train and save each case; return the states of this rank."""
    _begin()
    return [_train(folder / str(case), case) for case in cases]


def _engine(case: Case, **settings: Any) -> tuple[Any, nn.Module]:
    """Return DeepSpeed's engine, and the model inside it."""
    import deepspeed

    deepspeed.utils.groups.mpu = None
    mpu = None if case.pipeline else _mpu(case)
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


def _train(folder: Path, case: Case) -> dict[str, dict[str, Any]]:
    engine, module = _engine(case)
    for _ in range(STEPS):
        _step(engine, case)
    held = dict(_held(engine, module))
    if case.fused:
        adam = engine.optimizer.optimizer
        for state in adam.state.values():
            state["step"] = int(state["step"])
        for group in adam.param_groups:
            group["step"] = 0
    _save(engine, folder, case)
    return held


def _step(engine: Any, case: Case) -> None:
    start = torch.zeros(1, dtype=DTYPES[case.precision])
    if case.pipeline:
        engine.train_batch(iter([(start, start)]))
    else:
        engine.backward(engine(start).sum())
        engine.step(lr_kwargs={"increment": SAMPLES // STEPS})


def _save(engine: Any, folder: Path, case: Case) -> None:
    """Save as Megatron-DeepSpeed does."""
    module = engine.module
    state_dict = module.state_dict
    if not case.pipeline:
        module.state_dict = lambda **options: _nested(state_dict(**options))
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


def _nested(flat: dict[str, Tensor]) -> dict[str, Any]:
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


def _weights(module: nn.Module) -> Iterator[Weight]:
    return (child for child in module.modules() if isinstance(child, Weight))


def _held(engine: Any, module: nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the states of each weight on this rank, gathered from its data-parallel peers."""
    optimizer = engine.optimizer
    base = getattr(optimizer, "optimizer", optimizer)
    # With master weights but without ZeRO, DeepSpeed takes a step with zero gradients first.
    (step,) = {int(state["step"]) for state in base.state.values()}
    for weight in _weights(module):
        parameter = weight.weight
        states = {
            kind: value.detach().clone() for kind, value in _states(optimizer, base, parameter)
        }
        yield weight.name, {**states, "weight": _gathered(parameter), "step": step}


def _gathered(parameter: Tensor) -> Tensor:
    """Return the whole weight, also with ZeRO 3."""
    from deepspeed import zero

    with zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
        return parameter.detach().clone()


def _states(optimizer: Any, base: Any, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the master weights and the moments of a parameter."""
    from deepspeed import utils

    if hasattr(parameter, "ds_id"):
        yield "master", utils.safe_get_full_fp32_param(parameter)
        for kind in KINDS:
            yield kind, utils.safe_get_full_optimizer_state(parameter, kind)
        return
    if hasattr(parameter, "_hp_mapping"):
        yield from _partitioned_states(optimizer, base, parameter)
        return
    fp16, fp32 = (chain(*getattr(optimizer, f"fp{bits}_groups", [])) for bits in (16, 32))
    masters = dict(zip(fp16, fp32, strict=True))
    master = masters.get(parameter, parameter)  # an fp32 weight is its own master
    yield "master", master
    for kind in KINDS:
        yield kind, base.state[master][kind]


def _partitioned_states(
    optimizer: Any, base: Any, parameter: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """Yield the same for flat groups, by the address of the parameter in memory.

    DeepSpeed's own functions are wrong with round_robin_gradients, and find no states of a second
    group.
    """
    flats = getattr(optimizer, "bit16_groups_flat", None) or optimizer.bf16_groups_flat
    masters = getattr(optimizer, "single_partition_of_fp32_groups", None)
    for flat, master, group in zip(
        flats,
        masters or optimizer.fp32_groups_flat_partition,
        optimizer.real_dp_process_group,
        strict=True,
    ):
        if flat.untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr():
            continue
        start = parameter.storage_offset()
        # Sorted, because the order of loaded states differs between ranks of DeepSpeed.
        for kind, partition in sorted({"master": master, **base.state[master]}.items()):
            if partition.shape == master.shape:
                parts = [torch.empty_like(partition) for _ in range(dist.get_world_size(group))]
                dist.all_gather(parts, partition.detach(), group=group)
                whole = torch.cat(parts)[start : start + parameter.numel()]
                yield kind, whole.view(parameter.shape)


def _merged(tensor_size: int, states: list[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Return whole tensors from the states of all ranks. Ranks of a tensor are consecutive."""
    merged: dict[str, dict[str, Any]] = {}
    for start in range(0, len(states), tensor_size):
        peers = states[start : start + tensor_size]
        for name in peers[0]:
            kinds = ("weight", "master", *KINDS)
            values = {
                kind: _whole(name, [peer[name][kind] for peer in peers])
                for kind in kinds
                if kind in peers[0][name]
            }
            exact = values.get("master", values["weight"])
            assert torch.equal(exact.to(values["weight"].dtype), values["weight"]), name
            # Other data-parallel ranks, and stages with a tied embedding, hold replicas.
            first = merged.setdefault(name, {**values, "step": peers[0][name].get("step")})
            assert all(torch.equal(first[kind], value) for kind, value in values.items()), name
    return merged


def _whole(name: str, parts: list[Tensor]) -> Tensor:
    """Return the whole tensor from the slices of tensor-parallel ranks."""
    if name.endswith(("norm", "layernorm")):
        assert all(torch.equal(part, parts[0]) for part in parts)
        return parts[0]
    if name.endswith("dense_h_to_4h"):
        halves = [part.chunk(2) for part in parts]
        return torch.cat([half[number] for number in range(2) for half in halves])
    return torch.cat(parts, dim=1 if name.endswith(("dense", "dense_4h_to_h")) else 0)
