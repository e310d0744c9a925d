"""States for Megatron-LM's distributed optimizer: megatron.core loads them; tokamake reads them.

Those of the other optimizers are tested in `test_optimizer_reader.py`.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.torch_dist.conftest import ONE, run
from tests.support.dist_cores import Sizes
from tests.support.grids import params
from tests.support.megatron_optimizers import (
    BETAS,
    FAMILIES,
    PADDING,
    SCALE,
    assert_trained,
    on_cpu,
    random,
    trained,
)
from tokamake.checkpoint import writer
from tokamake.checkpoint.convert import convert
from tokamake.checkpoint.detect import open_any
from tokamake.checkpoint.tensors.checkpoint import ParallelLayout, Target
from tokamake.checkpoint.torch_files import torch_archive
from tokamake.errors import UserError

DISTRIBUTED = "distrib_optim.pt"


@pytest.fixture(scope="module")
def megatron() -> Any:
    """megatron.core's optimizers."""
    return on_cpu()


def distributed(
    megatron: Any, folder: Path, family: str, dtype: str, layout: ParallelLayout
) -> Path:
    """Write a trained checkpoint for the distributed optimizer."""
    start = trained(megatron, folder / "start", FAMILIES[family], ParallelLayout(1), dtype)
    target = Target(replace(layout, zero_stage=1), dtype)
    writer.write(folder / "distributed", open_any(start), "megatron", target)
    return folder / "distributed"


LAYOUTS = [ParallelLayout(1), ParallelLayout(2), ParallelLayout(1, 2), ParallelLayout(2, 2, 2)]


CASES = [("llama", "bf16"), ("llama-tied", "fp32"), ("gpt2", "fp16")]


BUFFERS = [(*case, layout) for case in CASES for layout in LAYOUTS]


@pytest.mark.parametrize("case", params(BUFFERS, BUFFERS[::3]), ids=str)
def test_buffers_are_read_bit_by_bit(
    case: tuple[str, str, ParallelLayout], megatron: Any, tmp_path: Path
) -> None:
    family, dtype, layout = case
    folder = distributed(megatron, tmp_path, family, dtype, layout)
    checkpoint = open_any(folder)
    assert checkpoint.layout == replace(layout, zero_stage=1)
    assert_trained(checkpoint, FAMILIES[family])
    if dtype == "fp16":
        assert checkpoint.notes["loss_scale"] == (SCALE, 5)
    # On to the files of the other optimizers, and to the trainer.
    for format in ("megatron", "native"):
        convert(source=folder, target=tmp_path / format, format=format)
        assert_trained(open_any(tmp_path / format), FAMILIES[family])


def assert_holds(held: dict[str, dict[str, torch.Tensor]], vocabulary: int) -> None:
    """Check the states by parameter: moments are those of a step with the weights as gradients."""
    for name, states in held.items():
        weight, exact = states["weight"], states["param"].view_as(states["weight"])
        # Padding rows have zero moments, and means as weights.
        rows = slice(vocabulary if len(weight) == vocabulary + PADDING else None)
        assert torch.equal(weight[rows], exact[rows].to(weight.dtype)), name
        first = states["exp_avg"].view_as(weight)
        assert torch.equal(first[rows], exact[rows] * (1 - BETAS[0])), name
        second = states["exp_avg_sq"].view_as(weight)
        assert torch.equal(second[rows], exact[rows] ** 2 * (1 - BETAS[1])), name


@pytest.mark.grid
@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_megatron_core_loads_buffers_and_holds_the_states_of_each_parameter(
    family: str, dtype: str, megatron: Any, tmp_path: Path
) -> None:
    """Of one stage, and of two stages on a rank of a pipeline."""
    for number, layout in enumerate([ParallelLayout(1), ParallelLayout(1, 2, 2)]):
        folder = distributed(megatron, tmp_path / f"{number}", family, dtype, layout)
        for file in folder.rglob("model_optim_rng.pt"):
            loaded = run("classic", tmp_path / f"{number}-{file.parent.name}", ONE, str(file))
            state = torch.load(loaded / "0.pt", weights_only=False)
            assert_holds(state["held"], FAMILIES[family].vocab_size or 0)
            weights = torch.load(file, weights_only=False)
            models = [weights[key] for key in weights if key.startswith("model")]
            assert len(state["held"]) == sum(len([*torch_archive.leaves(each)]) for each in models)
            groups = state["optimizer"]["optimizer"]["param_groups"]
            assert {group["step"] for group in groups} == {1.0}


@pytest.mark.grid
@pytest.mark.ranks
def test_two_data_parallel_ranks_load_the_same_buffers(megatron: Any, tmp_path: Path) -> None:
    folder = distributed(megatron, tmp_path, "llama", "bf16", ParallelLayout(1))
    (file,) = folder.rglob("model_optim_rng.pt")
    loaded = run("classic", tmp_path / "loaded", Sizes(1, 1, 2), str(file))
    first = torch.load(file.with_name(DISTRIBUTED), weights_only=False)
    second = torch.load(loaded / DISTRIBUTED, weights_only=False)
    assert {*first} == {*second} == {0, "buckets_coalesced"}
    ((key, buffers),) = first[0].items()
    assert {*second[0]} == {key} == {(torch.bfloat16, torch.float32)}
    for kind, value in buffers.items():
        if kind == "numel_unpadded":
            assert second[0][key][kind] == value
        else:
            assert torch.equal(second[0][key][kind], value), kind


def test_states_that_are_not_adams_are_refused(megatron: Any, tmp_path: Path) -> None:
    start = open_any(trained(megatron, tmp_path, FAMILIES["llama"], ParallelLayout(1), "bf16"))
    tensors = {key: start.source.read(key) for key in start.source if "exp_avg_sq" not in key}
    lion = replace(start, source=type(start.source)([], {}, in_memory=tensors))
    with pytest.raises(UserError, match=r"has states .* not Adam's .*; leave --zero-stage out"):
        writer.write(tmp_path / "a", lion, "megatron", Target(ParallelLayout(zero_stage=1)))


def test_weights_in_several_dtypes_are_refused(megatron: Any, tmp_path: Path) -> None:
    start = trained(megatron, tmp_path, FAMILIES["llama"], ParallelLayout(1), "bf16")
    checkpoint = open_any(start)
    tensors = {key: checkpoint.source.read(key) for key in checkpoint.source}
    norm = next(key for key in tensors if key.startswith("model.") and "norm" in key)
    tensors[norm] = random(FAMILIES["llama"])[norm]
    mixed = replace(checkpoint, source=type(checkpoint.source)([], {}, in_memory=tensors))
    with pytest.raises(
        UserError, match=r"--zero-stage 1: weights in bf16 and fp32: .*give --dtype"
    ):
        writer.write(tmp_path / "a", mixed, "megatron", Target(ParallelLayout(zero_stage=1)))
    assert not (tmp_path / "a").exists()
