"""Checkpoints that DeepSpeed itself writes for a tiny Llama, and the states that its ranks held.

Modules have the names and shapes of Megatron-DeepSpeed. Gradients are random numbers.

case = Case(zero_stage=2, precision="bf16")
folder = write_checkpoints(tmp_path, case)[case]  # the argument of `engine.save_checkpoint`
held_states(folder)["language_model.embedding.word_embeddings"]["exp_avg"]
"""

import hashlib
import os
import subprocess
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.deepspeed_engines import build_engine, initialize, save, train_step
from tests.support.deepspeed_models import STEPS, Case, Weight
from tests.support.programs import torch_python
from tests.support.ranks import spawn
from tests.support.shared_folders import made_once
from tokamake.checkpoint.torch_files import torch_archive

KINDS = ("exp_avg", "exp_avg_sq")


def write_checkpoints(folder: Path, *cases: Case) -> dict[Case, Path]:
    """Train and save, in one launch for each world size; folders have `latest` and held.pt."""
    for size in sorted({case.world_size for case in cases}):
        cases_of_size = [case for case in cases if case.world_size == size]
        results = spawn(_train_all, size, folder, cases_of_size, timeout=600)
        for number, case in enumerate(cases_of_size):
            held = merge_ranks(case.tensor, [result[number] for result in results])
            torch.save(held, folder / str(case) / "held.pt")
    return {case: folder / str(case) for case in cases}


def written_once(factory: pytest.TempPathFactory, *cases: Case) -> dict[Case, Path]:
    """Checkpoints of `write_checkpoints` for all workers of a run of pytest; do not change them."""
    name = f"deepspeed-{hashlib.sha256(repr(cases).encode()).hexdigest()[:8]}"

    def make(folder: Path) -> None:
        write_checkpoints(folder, *cases)

    folder = made_once(factory, name, make)
    return {case: folder / str(case) for case in cases}


def _train_all(folder: Path, cases: list[Case]) -> list[dict[str, dict[str, Any]]]:
    """Train and save each case; return the states of this rank."""
    initialize()
    return [_train(folder / str(case), case) for case in cases]


def _train(folder: Path, case: Case) -> dict[str, dict[str, Any]]:
    engine, module = build_engine(case)
    for _ in range(STEPS):
        train_step(engine, case)
    held = dict(rank_states(engine, module))
    if case.fused:
        adam = engine.optimizer.optimizer
        for state in adam.state.values():
            state["step"] = int(state["step"])
        for group in adam.param_groups:
            group["step"] = 0
    save(engine, folder, case)
    return held


def held_states(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the states that the ranks held when they saved.

    For each of Megatron's weights (without `.weight`): `weight` in the model's dtype, `master` in
    fp32, `exp_avg`, `exp_avg_sq` and `step`. Tensors are whole.
    """
    held: dict[str, dict[str, Any]] = torch.load(folder / "held.pt", weights_only=True)
    return held


def universal(folder: Path) -> Path:
    """Universal checkpoint of `convert_to_universal`."""
    return folder / f"global_step{STEPS}_universal"


def convert_to_universal(folder: Path) -> Path:
    """Run DeepSpeed's ds_to_universal, and return the universal checkpoint beside global_step3.

    The program fails if weights are nested, as Megatron's are. So remove them while it runs.
    """
    source, target = folder / f"global_step{STEPS}", universal(folder)
    states = {file: torch.load(file, weights_only=False) for file in source.glob("mp_rank_*")}
    for file, state in states.items():
        torch.save({**state, "module": None}, file)
    command = [torch_python(), "-m", "deepspeed.checkpoint.ds_to_universal"]
    command += ["--input_folder", str(source), "--output_folder", str(target)]
    settings = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    subprocess.run(command, env=settings, check=True, capture_output=True)
    for file, state in states.items():
        torch.save(state, file)
        torch.save(state, target / file.name)
    return target


def load_universal(checkpoint: Path, case: Case) -> dict[str, dict[str, Any]]:
    """Have DeepSpeed load a universal checkpoint; return the ranks' states (`held_states`)."""
    return merge_ranks(case.tensor, spawn(_load, case.world_size, checkpoint, case, timeout=600))


def _load(checkpoint: Path, case: Case) -> dict[str, dict[str, Any]]:
    initialize()
    engine, module = build_engine(case, checkpoint={"load_universal": True})
    path, state = engine.load_checkpoint(str(checkpoint), load_lr_scheduler_states=False)
    assert path is not None
    assert state["iteration"] == STEPS
    return dict(rank_states(engine, module))


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

    Each has a folder with `latest`, the case of its ranks, and whether to load optimizer states.
    Without these, there is no other step. All cases have the same world size.
    """
    (size,) = {case.world_size for _, case, _ in checkpoints}
    results = spawn(_resume_all, size, checkpoints, timeout=600)
    return [
        Resumed(
            merge_ranks(case.tensor, [result[number][0] for result in results]),
            merge_ranks(case.tensor, [result[number][1] for result in results]),
            results[0][number][2],
        )
        for number, (_, case, _) in enumerate(checkpoints)
    ]


def _resume_all(checkpoints: list[tuple[Path, Case, bool]]) -> list[tuple[Any, ...]]:
    initialize()
    return [_resume(*checkpoint) for checkpoint in checkpoints]


def _resume(checkpoint: Path, case: Case, with_states: bool) -> tuple[Any, ...]:
    engine, module = build_engine(case)
    load_state_dict = module.load_state_dict
    if not case.pipeline:
        module.load_state_dict = lambda nested, **options: load_state_dict(  # type: ignore[method-assign]
            dict(torch_archive.leaves(nested)), **options
        )
    path, state = engine.load_checkpoint(str(checkpoint), load_optimizer_states=with_states)
    assert path is not None
    assert state["iteration"] == engine.global_steps == STEPS
    num_steps, weights = engine.lr_scheduler.num_steps, [*weights_in(module)]
    if not with_states:
        return {weight.name: {"weight": gathered(weight.weight)} for weight in weights}, {}, 0
    held = dict(rank_states(engine, module))
    for weight in weights:
        weight.calls = STEPS
    train_step(engine, case)
    return held, dict(rank_states(engine, module)), num_steps


def weights_in(module: nn.Module) -> Iterator[Weight]:
    return (child for child in module.modules() if isinstance(child, Weight))


def rank_states(engine: Any, module: nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the states of each weight on this rank, gathered from its data-parallel peers."""
    optimizer = engine.optimizer
    base = getattr(optimizer, "optimizer", optimizer)
    # With master weights but without ZeRO, DeepSpeed takes a step with zero gradients first.
    (step,) = {int(state["step"]) for state in base.state.values()}
    for weight in weights_in(module):
        parameter = weight.weight
        states = {
            kind: value.detach().clone() for kind, value in _states(optimizer, base, parameter)
        }
        yield weight.name, {**states, "weight": gathered(parameter), "step": step}


def gathered(parameter: Tensor) -> Tensor:
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
        yield from partitioned_states(optimizer, base, parameter)
        return
    fp16, fp32 = (chain(*getattr(optimizer, f"fp{bits}_groups", [])) for bits in (16, 32))
    masters = dict(zip(fp16, fp32, strict=True))
    master = masters.get(parameter, parameter)  # an fp32 weight is its own master
    yield "master", master
    for kind in KINDS:
        yield kind, base.state[master][kind]


def partitioned_states(
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


def merge_ranks(
    tensor_size: int, states: list[dict[str, dict[str, Any]]]
) -> dict[str, dict[str, Any]]:
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
