"""Distributed checkpoints of several ranks of megatron.core, and of its T5."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.torch_dist.conftest import ONE, run
from tests.checkpoint.torch_dist.test_format import assert_same, assert_tensors_of_megatron
from tests.support.dist_cores import Sizes
from tokamake.checkpoint import writer
from tokamake.checkpoint.convert import convert
from tokamake.checkpoint.detect import open_any
from tokamake.checkpoint.tensors.checkpoint import Target

TWO_RANKS = {
    "tensor": (Sizes(2, 1, 1), ("gpt/dp_reshardable", "llama:bf16/plain")),
    "pipeline": (
        Sizes(1, 2, 1),
        ("llama-tied:bf16/dp_reshardable", "qwen3:bf16/fully_reshardable"),
    ),
    "data": (Sizes(1, 1, 2), ("qwen3:bf16/dp_reshardable",)),
    "both": (Sizes(2, 2, 1), ("qwen3:bf16/dp_reshardable", "gpt/dp_reshardable")),
    "experts": (
        Sizes(1, 1, 2, 2),
        (
            *("mixtral/plain", "mixtral-grouped:bf16/fully_reshardable"),
            *("mixtral-grouped/dp_reshardable", "qwen3_moe:bf16/dp_reshardable"),
        ),
    ),
    "tensor-experts": (
        Sizes(2, 1, 2, 2),
        ("mixtral/plain", "mixtral-grouped/dp_reshardable", "qwen3_moe:bf16/dp_reshardable"),
    ),
}
"""Checkpoints of two tensor-parallel ranks, two pipeline ranks, two data-parallel ranks, four ranks
of two kinds, two expert-parallel ranks, and two of these with two tensor-parallel ranks each."""


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns a checkpoint of two ranks, by layout and name; saved when the first one is needed."""
    root = tmp_path_factory.mktemp("dist")

    def of_two_ranks(name: str) -> Path:
        layout, _, _ = name.partition("/")
        if not (root / layout).is_dir():
            sizes, cases = TWO_RANKS[layout]
            run("save", root / layout, sizes, *cases)
        return root / name

    return of_two_ranks


@pytest.mark.grid
@pytest.mark.ranks
@pytest.mark.parametrize(
    "name",
    [
        "tensor/gpt-dp_reshardable",
        "tensor/llama-plain-bf16",
        "pipeline/llama-tied-dp_reshardable-bf16",
        "pipeline/qwen3-fully_reshardable-bf16",
        "data/qwen3-dp_reshardable-bf16",
        "both/qwen3-dp_reshardable-bf16",
        "both/gpt-dp_reshardable",
        "experts/mixtral-plain",
        "experts/mixtral-grouped-fully_reshardable-bf16",
        "experts/mixtral-grouped-dp_reshardable",
        "experts/qwen3_moe-dp_reshardable-bf16",
        "tensor-experts/mixtral-plain",
        "tensor-experts/mixtral-grouped-dp_reshardable",
        "tensor-experts/qwen3_moe-dp_reshardable-bf16",
    ],
)
def test_all_tensors_of_two_ranks_are_those_that_megatron_core_has_saved(
    name: str, two_ranks: Callable[[str], Path]
) -> None:
    saved = two_ranks(name)
    assert_tensors_of_megatron(saved)
    # The classic files of a distributed optimizer lie beside.
    for classic in saved.glob("classic/iter_*"):
        assert_same(open_any(classic), open_any(saved))


@pytest.mark.grid
@pytest.mark.ranks
def test_written_files_of_expert_parallel_ranks_are_those_of_megatron_core(
    two_ranks: Callable[[str], Path], tmp_path: Path
) -> None:
    """Weights, and the states of both optimizers by their numbers."""
    saved = two_ranks("experts/mixtral-plain")
    convert(source=saved, target=tmp_path / "a", format="megatron", expert_parallel_size=2)
    files = sorted(saved.glob("classic/iter_*/mp_rank_*/model_optim_rng.pt"))
    assert len(files) == 2
    for file in files:
        theirs, ours = (
            torch.load(path, weights_only=False)
            for path in (file, tmp_path / "a" / file.relative_to(saved / "classic"))
        )
        # Megatron's layers here are not of Transformer Engine, which fuses a norm.
        weights = {
            name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_"): tensor
            for name, tensor in theirs["model"].items()
            if not name.endswith("_extra_state")
        }
        assert weights.keys() == ours["model"].keys()
        assert all(torch.equal(tensor, ours["model"][name]) for name, tensor in weights.items())
        for first, second in zip(theirs["optimizer"], ours["optimizer"], strict=True):
            assert [len(group["params"]) for group in first["param_groups"]] == [
                len(group["params"]) for group in second["param_groups"]
            ]
            for number, states in first["state"].items():
                for kind in ("exp_avg", "exp_avg_sq"):
                    assert torch.equal(states[kind], second["state"][number][kind])


@pytest.mark.grid
@pytest.mark.ranks
def test_megatron_core_loads_states_that_are_written_for_expert_parallel_ranks(
    folder: Path, tmp_path: Path
) -> None:
    starts = {
        "mixtral": "mixtral-grouped-fully_reshardable-bf16",
        "qwen3_moe-bf16": "qwen3_moe-dp_reshardable",
    }
    for name, start in starts.items():
        dtype: Any = "bf16" if name.endswith("bf16") else "fp32"
        options: Any = {"format": "torch-dist", "expert_parallel_size": 2, "dtype": dtype}
        convert(source=folder / start, target=tmp_path / name, **options)
    kinds = ("plain", "fully_reshardable")
    loads = [str(tmp_path / name / kind) for name in starts for kind in kinds]
    run("load", tmp_path / "back", Sizes(1, 1, 2, 2), *loads)
    for name, kind in product(starts, kinds):
        assert_same(open_any(tmp_path / name), open_any(tmp_path / "back" / name / kind))


@pytest.mark.grid
@pytest.mark.ranks
@pytest.mark.parametrize("sizes", [(2, 1, 1), (1, 2, 1), (1, 1, 2)])
def test_megatron_core_loads_what_is_written_at_any_layout(
    sizes: tuple[int, int, int], folder: Path, tmp_path: Path
) -> None:
    starts = {
        "gpt": "gpt-plain",
        "qwen3-bf16": "qwen3-fully_reshardable-bf16",
        "llama-tied-bf16": "llama-tied-plain-fp16",
    }
    kinds = ("none", "plain", "fully_reshardable")
    for name, start in starts.items():
        dtype: Any = "bf16" if name.endswith("bf16") else None
        convert(source=folder / start, target=tmp_path / name, format="torch-dist", dtype=dtype)
    # One start of the ranks for all: to import megatron.core takes longest.
    loads = [str(tmp_path / name / kind) for name in starts for kind in kinds]
    run("load", tmp_path / "back", Sizes(*sizes), *loads)
    for name in starts:
        first = open_any(tmp_path / name)
        for kind in kinds:
            second = open_any(tmp_path / "back" / name / kind)
            if kind != "none":
                assert_same(first, second)
                continue
            for key in second.source:
                assert torch.equal(first.source.read(key), second.source.read(key)), key


@pytest.mark.grid
def test_t5s_of_megatron_core_are_read_and_loaded_again(tmp_path: Path) -> None:
    saved = run("save", tmp_path / "saved", ONE, "t5/none", "t5/fully_reshardable", "t5/plain")
    known = open_any(saved / "t5-fully_reshardable/classic/iter_0000007")
    for kind in ("fully_reshardable", "plain"):
        checkpoint = open_any(saved / f"t5-{kind}")
        assert checkpoint.architecture == known.architecture
        assert not checkpoint.unread
        for key in known.source:
            if key.startswith("model."):
                name = key.removeprefix("model.")
                assert torch.equal(checkpoint.source.read(key), known.source.read(key)), key
                assert f"optimizer.exp_avg.{name}" in {*checkpoint.source}
    for kind in ("none", "plain"):
        checkpoint = open_any(saved / f"t5-{kind}")
        writer.write(tmp_path / kind / "t5", checkpoint, "torch_dist", Target())
    sources = [f"{tmp_path / kind / 't5'}/{kind}" for kind in ("none", "plain")]
    loaded = run("load", tmp_path / "loaded", ONE, *sources)
    for kind in ("none", "plain"):
        checkpoint, again = open_any(saved / f"t5-{kind}"), open_any(loaded / f"t5/{kind}")
        assert {*again.source} == {*checkpoint.source}
        for key in checkpoint.source:
            if checkpoint.source.shapes[key]:
                assert torch.equal(again.source.read(key), checkpoint.source.read(key)), key
