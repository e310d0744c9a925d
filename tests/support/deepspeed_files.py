"""Checkpoints that DeepSpeed itself writes for a tiny Llama, and the states that its ranks held.

Modules have the names and shapes of Megatron-DeepSpeed. Gradients are random numbers.

case = Case(zero_stage=2, precision="bf16")
folder = write_checkpoints(tmp_path, case)[case]  # the argument of `engine.save_checkpoint`
held_states(folder)["language_model.embedding.word_embeddings"]["exp_avg"]
"""

import hashlib
import os
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.support.deepspeed_engines import build_engine, initialize, save, train_step
from tests.support.deepspeed_models import STEPS, Case
from tests.support.deepspeed_states import KINDS as KINDS
from tests.support.deepspeed_states import gathered, merge_ranks, rank_states, weights_in
from tests.support.programs import torch_python
from tests.support.ranks import spawn
from tests.support.shared_folders import made_once
from tokamake.checkpoint.torch_files import torch_archive


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

    Args:
        checkpoints: folder with `latest`, case of its ranks, and whether to load optimizer states.
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
