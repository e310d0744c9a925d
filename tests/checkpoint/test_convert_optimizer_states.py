"""Optimizer states convert between any numbers of ranks, bit by bit."""

import math
import random as chances
import shutil
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.grids import params
from tests.support.random_layouts import (
    HEADS,
    HOLD_STATES,
    HOLD_WEIGHTS,
    OF_ENCODERS,
    PIPELINES,
    holds_states,
    random_layout,
    refusal,
)
from tokamake import plugins
from tokamake.checkpoint import model_tensors, writer
from tokamake.checkpoint.convert import convert
from tokamake.checkpoint.detect import open_any
from tokamake.checkpoint.tensors.checkpoint import (
    OPTIMIZER_SETTINGS,
    Checkpoint,
    ParallelLayout,
    Progress,
    Target,
)
from tokamake.checkpoint.tensors.source import TensorSource
from tokamake.checkpoint.torch_files import torch_archive
from tokamake.config.architecture import Architecture
from tokamake.errors import UserError

SHAPE: dict[str, Any] = {
    "vocab_size": 13,
    "hidden_size": 8,
    "intermediate_size": 6,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8,
}
FAMILIES = {
    "llama": Architecture(**SHAPE),
    "llama-tied": Architecture(**{**SHAPE, "tie_word_embeddings": True, "num_hidden_layers": 4}),
    "gpt2": Architecture(**{**SHAPE, "family": "gpt"}),
}
WALKED = {
    **FAMILIES,
    "llama-mqa": Architecture(**{**SHAPE, "num_key_value_heads": 1}),
    "gptbigcode": Architecture(**{**SHAPE, "family": "gpt", "num_key_value_heads": 1}),
    "bloom": Architecture(
        **{**SHAPE, "intermediate_size": 32},
        family="gpt",
        position_embedding="alibi",
        embedding_layernorm=True,
    ),
    "qwen3": Architecture(**{**SHAPE, "family": "qwen3", "num_key_value_heads": 1, "head_dim": 6}),
    "qwen2": Architecture(**{**SHAPE, "family": "qwen2"}),
    "mistral": Architecture(**{**SHAPE, "family": "mistral"}),
    "smollm3": Architecture(**{**SHAPE, "family": "smollm3", "no_rope_layer_interval": 2}),
    "phi3": Architecture(
        **{**SHAPE, "family": "phi3", "partial_rotary_factor": 0.5, "head_dim": 4}
    ),
    "bert": Architecture(**{**SHAPE, "family": "bert"}),
    "t5": Architecture(**{**SHAPE, "family": "t5"}),
    "biencoder": Architecture(**{**SHAPE, "family": "biencoder", "projection_dim": 4}),
}
TINY = Architecture(**{**SHAPE, "num_hidden_layers": 1})
KINDS = ("master", "optimizer.exp_avg", "optimizer.exp_avg_sq")
PADDING = 4
"""make_vocab_size_divisible_by."""
STEP = 7.0
SETTINGS = {"lr": 0.25, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def truth(architecture: Architecture) -> dict[str, Tensor]:
    """A run's tensors by key: rounded weights, fp32 weights, moments, and steps."""
    generator = torch.Generator().manual_seed(2)
    tensors: dict[str, Tensor] = {}
    for name, shape in model_tensors.shapes(architecture).items():
        for kind in KINDS:
            tensors[f"{kind}.{name}"] = torch.randn(tuple(shape), generator=generator)
        tensors[f"model.{name}"] = tensors[f"master.{name}"].bfloat16()
        tensors[f"optimizer.step.{name}"] = torch.tensor(STEP)
    return tensors


def in_memory(architecture: Architecture, known: dict[str, Tensor]) -> Checkpoint:
    return Checkpoint(
        "native",
        Path(),
        architecture,
        TensorSource([], {}, in_memory=known),
        progress=Progress(7, 56, 448),
        notes={"loss_scale": (4.0, 0)},
    )


def of_ranks(folder: Path, architecture: Architecture, kind: str, size: int) -> list[Any]:
    """Parts of weights or of states that tensor-parallel ranks of Megatron have, by name."""
    known = {
        f"model.{key.removeprefix(f'{kind}.')}": tensor
        for key, tensor in truth(architecture).items()
        if key.startswith(f"{kind}.")
    }
    target = Target(ParallelLayout(size), make_vocab_size_divisible_by=PADDING)
    writer.write(folder, in_memory(architecture, known), "mds", target)
    files = sorted(folder.glob("*/mp_rank_*"))
    return [
        dict(torch_archive.leaves(torch.load(file, weights_only=False)["module"])) for file in files
    ]


def zero(folder: Path, architecture: Architecture, size: int, data: int, stage: int) -> Path:
    """Write DeepSpeed's ZeRO partitions by its rules alone: two groups, flat, padded, in parts."""
    per_kind = {kind: of_ranks(folder / kind, architecture, kind, size) for kind in KINDS}
    of_ranks(folder / "run", architecture, "model", size)
    (run,) = (folder / "run").glob("global_step*")
    for model, whole in enumerate(per_kind["master"]):
        groups = [
            [name for name, tensor in whole.items() if (tensor.dim() > 1) == decays]
            for decays in (True, False)
        ]
        file = run / f"mp_rank_{model:02d}_model_states.pt"
        state = torch.load(file, weights_only=False)
        state["param_shapes"] = [{name: whole[name].shape for name in group} for group in groups]
        if stage == 3:
            state["module"] = {}
            file.unlink()
            file = run / f"zero_pp_rank_0_{file.name}"
        torch.save(state, file)
        own = {kind: ranks[model] for kind, ranks in per_kind.items()}
        for rank in range(data):
            make = sliced if stage == 3 else cut
            state = make(own, groups, rank, data, stage)
            name = f"bf16_zero_pp_rank_{rank}_mp_rank_{model:02d}_optim_states.pt"
            torch.save({"optimizer_state_dict": state}, run / name)
    return folder / "run"


def base(moments: dict[str, list[Tensor]]) -> dict[str, Any]:
    """State that torch's Adam saves for groups of one parameter each."""
    first, second = (moments[kind] for kind in KINDS[1:])
    state = {
        number: {"step": torch.tensor(STEP), "exp_avg": a, "exp_avg_sq": b}
        for number, (a, b) in enumerate(zip(first, second, strict=True))
    }
    return {
        "state": state,
        "param_groups": [{**SETTINGS, "params": [number]} for number in state],
    }


def cut(
    own: dict[str, dict[str, Tensor]], groups: list[list[str]], rank: int, data: int, stage: int
) -> dict[str, Any]:
    """Stages 1 and 2: each group in one, filled up, in as many parts as ranks."""
    parts: dict[str, list[Tensor]] = {}
    for kind, tensors_of in own.items():
        for group in groups:
            flat = torch.cat([tensors_of[name].flatten() for name in group])
            flat = torch.nn.functional.pad(flat, (0, -len(flat) % (2 * data)), value=9.0)
            parts.setdefault(kind, []).append(flat.view(data, -1)[rank].clone())
    return {
        "zero_stage": stage,
        "partition_count": [data] * len(groups),
        "single_partition_of_fp32_groups": parts["master"],
        "base_optimizer_state": base(parts),
    }


def sliced(
    own: dict[str, dict[str, Tensor]], groups: list[list[str]], rank: int, data: int, stage: int
) -> dict[str, Any]:
    """Stage 3: each parameter filled up and in parts, those of a group one after the other."""
    parts: dict[str, list[Tensor]] = {}
    for kind, tensors_of in own.items():
        for group in groups:
            slices = []
            for name in group:
                flat = tensors_of[name].flatten()
                flat = torch.nn.functional.pad(flat, (0, -len(flat) % data), value=9.0)
                slices.append(flat.view(data, -1)[rank])
            parts.setdefault(kind, []).append(torch.cat(slices))
    return {
        "zero_stage": stage,
        "partition_count": data,
        "fp32_flat_groups": parts["master"],
        "optimizer_state_dict": base(parts),
    }


def assert_has(checkpoint: Checkpoint, architecture: Architecture, *, sliced: bool = False) -> None:
    """Check that every tensor is there, bit by bit."""
    expected = truth(architecture)
    if sliced:
        expected = {key: value for key, value in expected.items() if not key.startswith("model.")}
        expected = {
            key.replace("master.", "model.", 1) if key.startswith("master.") else key: value
            for key, value in expected.items()
        }
    assert {*checkpoint.source} == {*expected}
    for key, tensor in expected.items():
        assert torch.equal(checkpoint.source.read(key), tensor), key
    assert checkpoint.architecture == architecture
    assert checkpoint.progress.iteration == STEP


RANKS = [(1, 1, 1), (1, 2, 1), (2, 3, 2), (2, 1, 1), (1, 4, 3), (2, 6, 3)]
"""Tensor-parallel and data-parallel ranks, and ZeRO stage."""
EACH = [(data, stage) for data in (3, 6, 24) for stage in (1, 2, 3)]
"""Data-parallel ranks and ZeRO stage of chains."""
MANY_RANKS = [(1, 24, 3), (1, 768, 1), (1, 768, 3)]
"""Of most tensors, many or most have nothing but padding."""


PARTITIONED = [*product(FAMILIES, RANKS), *(("tiny", ranks) for ranks in MANY_RANKS)]
QUICK = [*product(["llama"], RANKS), *product(FAMILIES, RANKS[-1:]), ("tiny", MANY_RANKS[0])]


@pytest.mark.parametrize("case", params(PARTITIONED, QUICK), ids=str)
def test_zero_partitions_convert_to_any_ranks(
    case: tuple[str, tuple[int, int, int]], tmp_path: Path
) -> None:
    family, ranks = case
    architecture, (size, data, stage) = FAMILIES.get(family, TINY), ranks
    checkpoint = open_any(zero(tmp_path, architecture, *ranks))
    assert (checkpoint.layout.zero_stage, checkpoint.layout.data_parallel_size) == (stage, data)
    assert checkpoint.layout.tensor_parallel_size == size
    assert_has(checkpoint, architecture, sliced=stage == 3)
    convert(source=tmp_path / "run", target=tmp_path / "native", format="native")
    assert_has(open_any(tmp_path / "native"), architecture, sliced=True)


@pytest.mark.grid
def test_random_chains_of_conversions_of_whole_runs(tmp_path: Path) -> None:
    """Every step keeps every bit of what its format holds; all begin with ranks of ZeRO."""
    random, shared = chances.Random(3), Counter[tuple[int, int]]()
    refused, states = Counter[str](), 0
    pools: dict[str, list[Path]] = {family: [] for family in WALKED}
    for number, family in enumerate(WALKED):
        for ranks in RANKS[number % 3 :: 3]:
            folder = tmp_path / f"{family}-{'-'.join(map(str, ranks))}"
            pools[family].append(zero(folder, WALKED[family], *ranks))
    for number in range(170):
        pool = pools[random.choice([*WALKED])]
        begin, kind = open_any(random.choice(pool)), random.choice(HOLD_STATES + HOLD_WEIGHTS)
        layout, folder = random_layout(random, kind, begin), tmp_path / f"walk-{number}"
        if number < len(EACH):  # chance alone would need many more to have them all
            kind, layout = "mds", ParallelLayout(1, 1, 1, *EACH[number])
        if reason := refusal(kind, layout, begin):
            refused[reason] += 1
            with pytest.raises(UserError, match=reason):
                writer.write(folder, begin, kind, Target(layout))
            continue
        writer.write(folder, begin, kind, Target(layout))
        holds = holds_states(kind, layout)
        assert_moved(begin, open_any(folder), kind, layout)
        states += holds
        shared[layout.data_parallel_size, layout.zero_stage] += 1
        # Walks continue from what holds a run; many ranks take their time to be opened.
        if holds and len(pool) < 20 and layout.data_parallel_size < 7:
            pool.append(folder)
        else:
            shutil.rmtree(folder)
    assert min(refused[HEADS], refused[PIPELINES]) > 2
    assert {*refused} == {HEADS, PIPELINES, OF_ENCODERS}
    assert {*EACH} <= {*shared}
    assert states > 75


def test_chains_cover_every_family() -> None:
    # Tests beside retro and models/common/megatron_experts have the formats of others.
    families = {
        name
        for name in plugins.names("models/*/megatron")
        if name != "retro"
        and not plugins.constant("models/*/model", name, "HAS_ROUTERS", default=False)
    }
    assert {each.family for each in WALKED.values()} == families


@pytest.mark.grid
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_more_ranks_than_elements_are_written_and_read(stage: int, tmp_path: Path) -> None:
    """On most ranks there is nothing but padding."""
    begin = open_any(zero(tmp_path / "begin", TINY, 1, 3, 2 if stage == 1 else 1))
    assert max(math.prod(shape) for shape in begin.source.shapes.values()) < 768
    layout = ParallelLayout(1, 1, 1, 768, stage)
    writer.write(tmp_path / "walk", begin, "mds", Target(layout))
    assert_moved(begin, open_any(tmp_path / "walk"), "mds", layout)


def assert_moved(
    begin: Checkpoint, checkpoint: Checkpoint, kind: str, layout: ParallelLayout
) -> None:
    """Check that a checkpoint has all that its format holds."""
    assert checkpoint.architecture == begin.architecture
    assert checkpoint.layout == layout or kind == "universal"
    is_exact = kind in HOLD_STATES or layout.zero_stage == 3
    for name in model_tensors.shapes(begin.architecture):
        master = f"master.{name}"
        exact = master if is_exact and master in begin.source else f"model.{name}"
        expected = begin.source.read(exact)
        moved = checkpoint.source.read(f"model.{name}")
        assert torch.equal(moved, expected.to(moved.dtype)), name
        has_masters_alone = kind == "universal" or layout.zero_stage == 3
        assert moved.dtype == (torch.float32 if has_masters_alone else expected.dtype)
    if kind != "hf":
        assert checkpoint.progress.iteration == begin.progress.iteration == STEP
    if not holds_states(kind, layout):
        return
    for key in (key for key in begin.source if key.startswith("optimizer.")):
        assert torch.equal(checkpoint.source.read(key), begin.source.read(key)), key
    rounded = layout.zero_stage in (1, 2) or kind == "megatron"
    for key in (key for key in begin.source if rounded and key.startswith("master.")):
        assert torch.equal(checkpoint.source.read(key), begin.source.read(key)), key
    assert checkpoint.notes[OPTIMIZER_SETTINGS] == {**SETTINGS, "betas": [0.9, 0.95]}


@pytest.mark.parametrize("stage", [1, 3])
def test_damaged_partitions_are_reported(stage: int, tmp_path: Path) -> None:
    run = zero(tmp_path, FAMILIES["llama"], 1, 3, stage)
    (folder,) = run.glob("global_step*")
    files = sorted(folder.glob("*_optim_states.pt"))
    states = [torch.load(file, weights_only=False) for file in files]
    kept = files[2].read_bytes()
    files[2].unlink()
    with pytest.raises(UserError, match="no optimizer states of data-parallel rank 2 of 3"):
        open_any(run)
    files[2].write_bytes(kept[: len(kept) // 2])
    with pytest.raises(UserError, match=f"{files[2].name}: damaged"):
        open_any(run)
    torch.save({"optimizer_state_dict": {"partition_count": 3}}, files[2])
    with pytest.raises(UserError, match="optimizer states in an unknown order"):
        open_any(run)
    name = {1: "single_partition_of_fp32_groups", 3: "fp32_flat_groups"}[stage]
    inner = states[2]["optimizer_state_dict"]
    inner[name] = [tensor[:1].clone() for tensor in inner[name]]
    torch.save(states[2], files[2])
    with pytest.raises(UserError, match=r"damaged|elements of tensor|would end at|unknown order"):
        open_any(run)


def without(known: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in known.items() if not key.startswith(f"optimizer.{kind}")}


NORM = "optimizer.step.model.norm.weight"


@pytest.mark.parametrize(
    ("change", "notes", "stage", "kind", "message"),
    [
        (lambda known: without(known, ""), {}, 1, "mds", "has no optimizer states for --zero-sta"),
        (lambda known: without(known, "exp_avg_sq"), {}, 1, "mds", "states exp_avg, step of adamw"),
        (
            dict,
            {"optimizer": "adopt"},
            1,
            "mds",
            "exp_avg, exp_avg_sq, step of adopt, not Adam's states",
        ),
        (lambda known: {**known, NORM: torch.tensor(6.0)}, {}, 1, "mds", "updated 6 to 7 times"),
        (
            dict,
            {OPTIMIZER_SETTINGS: {"lr": 1.0}},
            1,
            "mds",
            "not record its optimizer's betas, epsilon",
        ),
        (
            dict,
            {"optimizer": "adopt"},
            3,
            "mds",
            "exp_avg, exp_avg_sq, step of adopt, not Adam's states",
        ),
        (dict, {}, 2, "mds_pipeline", "--zero-stage 2: DeepSpeed itself refuses stages 2 and 3 wi"),
        (dict, {}, 3, "mds_pipeline", "--zero-stage 3: DeepSpeed itself refuses stages 2 and 3 wi"),
    ],
)
def test_states_that_deepspeed_could_not_load_are_refused(
    change: Any, notes: dict[str, Any], stage: int, kind: str, message: str, tmp_path: Path
) -> None:
    architecture = FAMILIES["llama"]
    begin = in_memory(architecture, change(truth(architecture)))
    begin.notes.update({OPTIMIZER_SETTINGS: {**SETTINGS}, **notes})
    with pytest.raises(UserError, match=message):
        writer.write(tmp_path / "a", begin, kind, Target(ParallelLayout(zero_stage=stage)))
    assert not any(tmp_path.iterdir())
