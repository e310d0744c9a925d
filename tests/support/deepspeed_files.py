"""Checkpoints that DeepSpeed writes of a tiny Llama of Megatron-DeepSpeed, and what its ranks held.

Modules have Megatron's names and shapes, training is real, gradients are random numbers.

case = Case(zero_stage=2, precision="bf16")
folder = made(tmp_path, case)[case]  # as given to `engine.save_checkpoint`
truth(folder)["language_model.embedding.word_embeddings"]["exp_avg"]
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
    piped,
    weights_of,
)
from tests.support.ranks import spawn
from tokamake.checkpoint.torch_files import torch_archive

KINDS = ("exp_avg", "exp_avg_sq")


def made(folder: Path, *cases: Case) -> dict[Case, Path]:
    """Train and save, all cases of as many ranks in one launch.

    Args:
        folder: to write in, a folder a case.
        cases: what to write.

    Returns:
        Folders that have `latest`, global_step3 and truth.pt.
    """
    for size in sorted({case.world_size for case in cases}):
        some = [case for case in cases if case.world_size == size]
        of_ranks = spawn(_train_all, size, folder, some, timeout=600)
        for number, case in enumerate(some):
            found = _merged(case.tensor, [held[number] for held in of_ranks])
            torch.save(found, folder / str(case) / "truth.pt")
    return {case: folder / str(case) for case in cases}


def truth(folder: Path) -> dict[str, dict[str, Any]]:
    """What ranks held when they saved: of each of Megatron's weights (without `.weight`), whole,
    `weight` as the model had it, `master` in fp32, `exp_avg`, `exp_avg_sq` and `step`.
    """
    found: dict[str, dict[str, Any]] = torch.load(folder / "truth.pt", weights_only=True)
    return found


def universal(folder: Path) -> Path:
    """Have DeepSpeed's own program make a universal checkpoint, beside global_step3.

    It stumbles over weights that are nested as Megatron's; they are set aside meanwhile.
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
    """What DeepSpeed asks Megatron of ranks; those of a tensor follow one another."""
    rank, size = dist.get_rank(), case.tensor
    grid = torch.arange(case.world_size).view(-1, size)
    model = [dist.new_group(each.tolist()) for each in grid][rank // size]
    data = [dist.new_group(each.tolist()) for each in grid.T][rank % size]
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
    """Keeps what Megatron's OptimizerParamScheduler keeps."""

    def __init__(self) -> None:
        self.num_steps = 0

    def step(self, increment: int) -> None:
        """Count samples."""
        self.num_steps += increment

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state in a checkpoint."""
        self.num_steps = state["num_steps"]

    def state_dict(self) -> dict[str, Any]:
        """State in a checkpoint."""
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
    """DeepSpeed's configuration."""
    zero = {
        "stage": case.zero_stage,
        "round_robin_gradients": case.round_robin,
        "overlap_comm": False,
        "sub_group_size": SUB_GROUP_SIZE,
        "stage3_param_persistence_threshold": 0,
    }
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": SAMPLES // STEPS // case.data,
        "gradient_accumulation_steps": 1,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1000,
        "pipeline": {"pipe_partitioned": False, "grad_partitioned": False},
    }
    if case.precision == "bf16":
        found["bf16"] = {"enabled": True}
        found["data_types"] = {"grad_accum_dtype": case.sums}
    if case.precision == "fp16":
        found["fp16"] = {"enabled": True, "loss_scale": 8.0}
    return found


def loaded(checkpoint: Path, case: Case) -> dict[str, dict[str, Any]]:
    """What ranks of DeepSpeed hold once they have loaded a universal checkpoint; see `truth`."""
    return _merged(case.tensor, spawn(_load, case.world_size, checkpoint, case, timeout=600))


def _load(checkpoint: Path, case: Case) -> dict[str, dict[str, Any]]:
    _begin()
    engine, module = _engine(case, checkpoint={"load_universal": True})
    path, state = engine.load_checkpoint(str(checkpoint), load_lr_scheduler_states=False)
    assert path is not None
    assert state["iteration"] == STEPS
    return dict(_held(engine, module))


class Resumed(NamedTuple):
    """What ranks of DeepSpeed have of a checkpoint; tensors as in `truth`."""

    held: dict[str, dict[str, Any]]
    """Once they have loaded it."""
    after: dict[str, dict[str, Any]]
    """After another step."""
    num_steps: int
    """Of the scheduler, when it was loaded."""


def resumed(*checkpoints: tuple[Path, Case, bool]) -> list[Resumed]:
    """Have DeepSpeed load checkpoints as it has written them, not universal ones, and train on.

    Args:
        checkpoints: folders with `latest`, whose ranks load them, and whether also optimizer
            states, without which there is no other step; of one world size.
    """
    (size,) = {case.world_size for _, case, _ in checkpoints}
    of_ranks = spawn(_resume_all, size, checkpoints, timeout=600)
    return [
        Resumed(
            _merged(case.tensor, [held[number][0] for held in of_ranks]),
            _merged(case.tensor, [held[number][1] for held in of_ranks]),
            of_ranks[0][number][2],
        )
        for number, (_, case, _) in enumerate(checkpoints)
    ]


def _resume_all(checkpoints: list[tuple[Path, Case, bool]]) -> list[tuple[Any, ...]]:
    _begin()
    return [_resume(*each) for each in checkpoints]


def _resume(checkpoint: Path, case: Case, with_states: bool) -> tuple[Any, ...]:
    engine, module = _engine(case)
    plain = module.load_state_dict
    if not case.pipeline:
        module.load_state_dict = lambda nested, **options: plain(  # type: ignore[method-assign]
            dict(torch_archive.leaves(nested)), **options
        )
    path, state = engine.load_checkpoint(str(checkpoint), load_optimizer_states=with_states)
    assert path is not None
    assert state["iteration"] == engine.global_steps == STEPS
    num_steps, weights = engine.lr_scheduler.num_steps, [*_weights(module)]
    if not with_states:
        return {each.name: {"weight": _gathered(each.weight)} for each in weights}, {}, 0
    held = dict(_held(engine, module))
    for weight in weights:
        weight.calls = STEPS
    _step(engine, case)
    return held, dict(_held(engine, module)), num_steps


def _begin() -> None:
    """Ready a rank's process."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ.setdefault("LOCAL_RANK", "0")
    import deepspeed

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled
    # A CPU without instructions for it computes fp16 slowly, not wrongly.
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True
    deepspeed.init_distributed(dist_backend="gloo", dist_init_required=False)


def _train_all(folder: Path, cases: list[Case]) -> list[dict[str, dict[str, Any]]]:
    """Train, save and tell this rank's part of the truth, of each case."""
    _begin()
    return [_train(folder / str(case), case) for case in cases]


def _engine(case: Case, **settings: Any) -> tuple[Any, nn.Module]:
    """DeepSpeed's engine of a case's ranks, and the model that was given to it."""
    import deepspeed

    deepspeed.utils.groups.mpu = None
    mpu = None if case.pipeline else _mpu(case)
    rank = dist.get_rank()
    weights = weights_of(case, rank % case.tensor, rank // case.tensor % case.data)
    module = piped(weights, case) if case.pipeline else Chain(weights)
    kinds: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in module.parameters():
        kinds[parameter.dim() > 1].append(parameter)
    groups = [
        {"name": "wd_no_scale_lr", "wd_mult": 1.0, "lr_mult": 1.0, "params": kinds[True]},
        {"name": "no_wd_no_scale_lr", "wd_mult": 0.0, "lr_mult": 1.0, "params": kinds[False]},
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
    plain = module.state_dict
    if not case.pipeline:
        module.state_dict = lambda **options: _nested(plain(**options))
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
    module.state_dict = plain


def _nested(flat: dict[str, Tensor]) -> dict[str, Any]:
    """A state as Megatron's state_dict_for_save_checkpoint nests it."""
    encoder = "language_model.encoder."
    model: dict[str, Any] = {
        "embedding": {"word_embeddings": {"weight": flat[f"{EMBEDDING}.weight"]}},
        "encoder": {n.removeprefix(encoder): t for n, t in flat.items() if n.startswith(encoder)},
    }
    if f"{HEAD}.weight" in flat:
        model["output_layer"] = {"weight": flat[f"{HEAD}.weight"]}
    return {"language_model": model}


def _universal_info(case: Case) -> dict[str, Any]:
    """What DeepSpeed's conversion to universal checkpoints asks Megatron of names."""
    if case.pipeline:
        of_layers, norm = r"\d+.", r"\d+.weight"
        words = [r"\d+.word_embeddings", r"\d+.lm_head"]
        words = ["tied_modules.embed.word_embeddings"] if case.tied else words
    else:
        of_layers, norm = LAYERS + r"\d+.", f"{NORM}.weight"
        words = [EMBEDDING, *([] if case.tied else [HEAD])]
    found: dict[str, Any] = {
        "universal_checkpoint_version": 0.2,
        "padded_vocab_size": PADDED,
        "original_vocab_size": PADDED if case.full else VOCAB,
        "vocabulary_parameter_patterns": [f"{name}.weight" for name in words],
        "parameter_with_2_sub_params_cat_dim_0": [f"{of_layers}mlp.dense_h_to_4h.weight"],
    }
    if case.pipeline and case.tied:
        found["pipeline_replicated_parameter_patterns"] = [f"{words[0]}.weight"]
    if case.tensor > 1:
        names = ("input_layernorm", "post_attention_layernorm")
        copies = [f"{of_layers}{name}.weight" for name in names]
        found["tp_replicated_parameter_patterns"] = [*copies, norm]
        names = ("mlp.dense_4h_to_h", "self_attention.dense")
        columns = [f"{of_layers}{name}.weight" for name in names]
        found["parameter_with_row_parallelism_patterns"] = columns
    return found


def _weights(module: nn.Module) -> Iterator[Weight]:
    return (each for each in module.modules() if isinstance(each, Weight))


def _held(engine: Any, module: nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    """What this rank has of each weight, its data-parallel peers' shares included."""
    optimizer = engine.optimizer
    base = getattr(optimizer, "optimizer", optimizer)
    # DeepSpeed takes a step of zeros before the first one where it has no ZeRO, but masters.
    (step,) = {int(state["step"]) for state in base.state.values()}
    for weight in _weights(module):
        parameter = weight.weight
        states = _states(optimizer, base, parameter)
        found = {kind: value.detach().clone() for kind, value in states}
        yield weight.name, {**found, "weight": _gathered(parameter), "step": step}


def _gathered(parameter: Tensor) -> Tensor:
    """A whole weight, also where ranks share it."""
    from deepspeed import zero

    with zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
        return parameter.detach().clone()


def _states(optimizer: Any, base: Any, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Master and moments of a parameter."""
    from deepspeed import utils

    if hasattr(parameter, "ds_id"):
        yield "master", utils.safe_get_full_fp32_param(parameter)
        for kind in KINDS:
            yield kind, utils.safe_get_full_optimizer_state(parameter, kind)
        return
    if hasattr(parameter, "_hp_mapping"):
        yield from _of_partitions(optimizer, base, parameter)
        return
    ours, theirs = (chain(*getattr(optimizer, f"fp{bits}_groups", [])) for bits in (16, 32))
    masters = dict(zip(ours, theirs, strict=True))
    master = masters.get(parameter, parameter)  # in fp32 it is the weight itself
    yield "master", master
    for kind in KINDS:
        yield kind, base.state[master][kind]


def _of_partitions(optimizer: Any, base: Any, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The same where ranks share flat groups, found by where the parameter lies in memory.

    DeepSpeed's own functions are wrong for round_robin_gradients, and find no states of a second
    group.
    """
    flats = getattr(optimizer, "bit16_groups_flat", None) or optimizer.bf16_groups_flat
    own = getattr(optimizer, "single_partition_of_fp32_groups", None)
    for flat, master, group in zip(
        flats,
        own or optimizer.fp32_groups_flat_partition,
        optimizer.real_dp_process_group,
        strict=True,
    ):
        if flat.untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr():
            continue
        start = parameter.storage_offset()
        # Sorted: DeepSpeed's order of what it has loaded differs between ranks.
        for kind, partition in sorted({"master": master, **base.state[master]}.items()):
            if partition.shape == master.shape:
                parts = [torch.empty_like(partition) for _ in range(dist.get_world_size(group))]
                dist.all_gather(parts, partition.detach(), group=group)
                whole = torch.cat(parts)[start : start + parameter.numel()]
                yield kind, whole.view(parameter.shape)


def _merged(tensor: int, of_ranks: list[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Whole tensors of all ranks' parts; those of a tensor follow one another."""
    found: dict[str, dict[str, Any]] = {}
    for start in range(0, len(of_ranks), tensor):
        peers = of_ranks[start : start + tensor]
        for name in peers[0]:
            kinds = ("weight", "master", *KINDS)
            values = {
                kind: _whole(name, [peer[name][kind] for peer in peers])
                for kind in kinds
                if kind in peers[0][name]
            }
            exact = values.get("master", values["weight"])
            assert torch.equal(exact.to(values["weight"].dtype), values["weight"]), name
            # Other data-parallel ranks, and stages with the same embedding, hold the same.
            known = found.setdefault(name, {**values, "step": peers[0][name].get("step")})
            assert all(torch.equal(known[kind], value) for kind, value in values.items()), name
    return found


def _whole(name: str, parts: list[Tensor]) -> Tensor:
    """One tensor of what tensor-parallel ranks have."""
    if name.endswith(("norm", "layernorm")):
        assert all(torch.equal(part, parts[0]) for part in parts)
        return parts[0]
    if name.endswith("dense_h_to_4h"):
        halves = [part.chunk(2) for part in parts]
        return torch.cat([half[number] for number in range(2) for half in halves])
    return torch.cat(parts, dim=1 if name.endswith(("dense", "dense_4h_to_h")) else 0)
