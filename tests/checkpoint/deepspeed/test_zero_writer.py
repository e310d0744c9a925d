"""DeepSpeed loads what is written as its own checkpoints, and trains on as it would from those."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.deepspeed_files import KINDS, Resumed, made, resumed, truth
from tests.support.deepspeed_models import EMBEDDING, SAMPLES, STEPS, SUB_GROUP_SIZE, Case
from tokamake.checkpoint import writer
from tokamake.checkpoint.convert import convert
from tokamake.checkpoint.deepspeed import zero_writer
from tokamake.checkpoint.detect import open_any
from tokamake.checkpoint.tensors.checkpoint import ParallelLayout, Target
from tokamake.checkpoint.torch_files import torch_archive

pytestmark = pytest.mark.ranks

CASES = [
    Case(1, "bf16", full=True),
    Case(1, "fp32", full=True),
    Case(2, "bf16", full=True),
    Case(2, "fp16", full=True),
    Case(1, "bf16", data=1, tensor=2, full=True),
    Case(1, "bf16", data=1, pipeline=2, full=True),
    Case(1, "fp16", data=1, pipeline=2, full=True),
]
SLICED = [
    Case(3, "bf16", full=True),
    Case(3, "fp32", full=True),
    Case(3, "fp16", full=True),
    Case(3, "bf16", data=2, tensor=2, full=True),
]
WEIGHTS_ALONE = [case for case in CASES if case.data == 1 and case.precision == "bf16"]
TIED = Case(1, "fp32", data=1, pipeline=2, tied=True, full=True)
"""Its layers have BigScience's numbers, which are not those that are written."""
DIVISIBLE = 7
"""make_vocab_size_divisible_by of the models."""


def target(case: Case) -> Target:
    layout = ParallelLayout(case.tensor, max(1, case.pipeline), 1, case.data, case.zero_stage)
    return Target(layout, case.precision, make_vocab_size_divisible_by=DIVISIBLE)


def kind(case: Case) -> str:
    return "mds_pipeline" if case.pipeline else "mds"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Path]:
    """What DeepSpeed wrote, of each case; do not write there."""
    return made(tmp_path_factory.mktemp("deepspeed"), *CASES, TIED, *SLICED)


@pytest.fixture(scope="module")
def again(folders: dict[Case, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Path]:
    """The same by way of the trainer's own format, or straight; do not write there."""
    root, found = tmp_path_factory.mktemp("again"), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zero_writer, "SUB_GROUP_SIZE", SUB_GROUP_SIZE)
        for number, (case, folder) in enumerate(folders.items()):
            begin, found[case] = folder, root / str(case)
            if number % 2 == 0:
                convert(source=begin, target=root / f"{case}-native", format="native")
                begin = root / f"{case}-native"
            assert writer.write(found[case], open_any(begin), kind(case), target(case)).left == []
    return found


def test_flat_tensors_of_stage_3_are_as_long_as_deepspeed_makes_them() -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    assert DeepSpeedZeroConfig().sub_group_size == zero_writer.SUB_GROUP_SIZE


def shards(folder: Path) -> dict[str, dict[str, Any]]:
    """Optimizer states in DeepSpeed's files, by name."""
    files = (folder / f"global_step{STEPS}").glob("*_optim_states.pt")
    return {
        file.name: torch.load(file, weights_only=False)["optimizer_state_dict"] for file in files
    }


def flat(state: dict[str, Any]) -> list[tuple[Tensor, ...]]:
    """Of each group masters, moments and step, without padding."""
    masters, base = state["single_partition_of_fp32_groups"], state["base_optimizer_state"]
    found = []
    for number, (master, padding) in enumerate(zip(masters, state["group_paddings"], strict=True)):
        own = base["state"][number]
        size = own["exp_avg"].numel() - padding
        found.append(tuple(each[:size] for each in (master, *(own[k] for k in KINDS))))
        found.append((torch.as_tensor(own["step"]),))
    return found


@pytest.mark.parametrize("case", [*CASES, TIED], ids=str)
def test_shards_are_those_that_deepspeed_wrote(
    case: Case, folders: dict[Case, Path], again: dict[Case, Path]
) -> None:
    theirs, ours = shards(folders[case]), shards(again[case])
    assert ours.keys() == theirs.keys()
    for name, state in theirs.items():
        for expected, found in zip(flat(state), flat(ours[name]), strict=True):
            assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
        for key in ("partition_count", "group_paddings"):
            assert ours[name][key] == state[key], key
        sizes = [[each.shape for each in flat(one)[0]] for one in (state, ours[name])]
        assert sizes[0] == sizes[1]
        assert_same_settings(ours[name]["base_optimizer_state"], state["base_optimizer_state"])


def assert_same_settings(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Groups of torch's optimizer are the same."""
    for mine, group in zip(found["param_groups"], expected["param_groups"], strict=True):
        shared = group.keys() & mine.keys()
        assert {*shared} >= {"lr", "betas", "eps", "weight_decay", "lr_mult", "wd_mult", "name"}
        assert {key: mine[key] for key in shared} == {key: group[key] for key in shared}
        assert "params" in shared


def model_states(folder: Path) -> dict[str, dict[str, Any]]:
    """What is in files without optimizer states, by name."""
    files = (folder / f"global_step{STEPS}").glob("*_model_states.pt")
    return {file.name: torch.load(file, weights_only=False) for file in files}


def slices(state: dict[str, Any], sizes: list[int], rank: int, ranks: int) -> Iterator[Tensor]:
    """Masters and moments of a rank's slices of parameters of so many elements, no padding."""
    base, rest = state["optimizer_state_dict"]["state"], iter(sizes)
    for number, master in enumerate(state["fp32_flat_groups"]):
        flat, at = torch.stack([master, *(base[number][kind] for kind in KINDS)]), 0
        while at < master.numel():
            size = next(rest)
            each = math.ceil(size / ranks)
            yield flat[:, at : at + min(each, max(0, size - rank * each))]
            at += each
        assert at == master.numel()
    assert next(rest, None) is None


@pytest.mark.parametrize("case", SLICED, ids=str)
def test_slices_of_stage_3_are_those_that_deepspeed_wrote(
    case: Case, folders: dict[Case, Path], again: dict[Case, Path]
) -> None:
    shapes = model_states(folders[case])["zero_pp_rank_0_mp_rank_00_model_states.pt"]
    sizes = [size.numel() for group in shapes["param_shapes"] for size in group.values()]
    theirs, ours = shards(folders[case]), shards(again[case])
    assert ours.keys() == theirs.keys()
    assert len(theirs) == case.data * case.tensor
    for name, state in theirs.items():
        assert [*state["fp32_flat_groups"]] != [], "there is something to compare"
        for key in ("fp32_flat_groups", "optimizer_state_dict"):
            of_ours, of_theirs = (
                dict(torch_archive.leaves(one[name][key])) for one in (ours, theirs)
            )
            tensors = {key: value for key, value in of_theirs.items() if torch.is_tensor(value)}
            assert {key: (of_ours[key].shape, of_ours[key].dtype) for key in tensors} == {
                key: (value.shape, value.dtype) for key, value in tensors.items()
            }
        rank = int(name.split("rank_")[1].partition("_")[0])
        pair = (slices(one[name], sizes, rank, case.data) for one in (theirs, ours))
        assert all(torch.equal(*each) for each in zip(*pair, strict=True))
        base = "optimizer_state_dict"
        assert_same_settings(ours[name][base], state[base])
        for number, moments in state[base]["state"].items():
            assert ours[name][base]["state"][number]["step"] == moments["step"] == STEPS
        assert ours[name].keys() == state.keys()
        for key in ("zero_stage", "partition_count", "overflow"):
            assert ours[name][key] == state[key], key
        assert ours[name]["loss_scaler"].loss_scale == state["loss_scaler"].loss_scale


@pytest.mark.parametrize("case", SLICED, ids=str)
def test_files_of_stage_3_without_states_are_those_of_deepspeed(
    case: Case, folders: dict[Case, Path], again: dict[Case, Path]
) -> None:
    theirs, ours = model_states(folders[case]), model_states(again[case])
    assert ours.keys() == theirs.keys()
    for name, state in theirs.items():
        assert ours[name]["param_shapes"] == state["param_shapes"]
        assert [[*group] for group in ours[name]["param_shapes"]] == [
            [*group] for group in state["param_shapes"]
        ]
        modules = (dict(torch_archive.leaves(each["module"])) for each in (ours[name], state))
        found, expected = (
            {key: (value.shape, value.dtype) for key, value in module.items()} for module in modules
        )
        assert found == expected
        for key in ("dp_world_size", "mp_world_size", "global_steps", "global_samples"):
            assert ours[name][key] == state[key], key
        for key in ("buffer_names", "shared_params", "iteration", "checkpoint_version"):
            assert ours[name][key] == state[key], key


@pytest.mark.parametrize("case", [SLICED[0], SLICED[1], CASES[1], CASES[2]], ids=str)
def test_zero_to_fp32_puts_our_files_together(
    case: Case, folders: dict[Case, Path], again: dict[Case, Path]
) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    found = get_fp32_state_dict_from_zero_checkpoint(str(again[case]))
    known = {f"{name}.weight": of["master"] for name, of in truth(folders[case]).items()}
    assert found.keys() == known.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in known.items())


@pytest.mark.parametrize("case", SLICED, ids=str)
def test_what_is_written_for_stage_3_is_read_whole(
    case: Case, folders: dict[Case, Path], again: dict[Case, Path]
) -> None:
    theirs, ours = open_any(folders[case]), open_any(again[case])
    assert {*ours.source} == {*theirs.source}
    assert all(torch.equal(ours.source.read(k), theirs.source.read(k)) for k in theirs.source)
    assert (ours.layout, ours.progress) == (theirs.layout, theirs.progress)
    embedding = ours.source.read("model.model.embed_tokens.weight")
    assert torch.equal(embedding, truth(folders[case])[EMBEDDING]["master"])


def assert_same(found: Resumed, expected: Resumed) -> None:
    """Every bit is the same, also after another step."""
    for there, here in zip(expected[:2], found[:2], strict=True):
        assert here.keys() == there.keys()
        for name, tensors in there.items():
            assert here[name].pop("step") == tensors.pop("step")
            assert all(torch.equal(here[name][each], tensors[each]) for each in tensors), name
    assert found.num_steps == expected.num_steps == SAMPLES


def test_deepspeed_goes_on_as_from_its_own(
    folders: dict[Case, Path], again: dict[Case, Path], tmp_path: Path
) -> None:
    """It loads weights alone, too, of checkpoints without shards."""
    cases = [*CASES, *(case for case in SLICED if case.world_size == 2)]
    every = [(folder[case], case, True) for case in cases for folder in (folders, again)]
    for case in WEIGHTS_ALONE:
        plain = replace(target(case).layout, data_parallel_size=1, zero_stage=0)
        found = open_any(folders[case])
        writer.write(tmp_path / str(case), found, kind(case), replace(target(case), layout=plain))
        every.append((tmp_path / str(case), case, False))
    every.append((again[SLICED[0]], SLICED[0], False))
    found = dict(zip(every, resumed(*every), strict=True))
    for case in cases:
        own = found[folders[case], case, True]
        assert own.held.keys() == truth(folders[case]).keys()
        assert_moved(own)
        assert_same(found[again[case], case, True], own)
    for folder, case, _ in (each for each in every if not each[2]):
        held = found[folder, case, False].held
        for name, tensors in truth(folders[case]).items():
            assert torch.equal(held[name]["weight"], tensors["weight"]), name


def assert_moved(own: Resumed) -> None:
    """The other step has changed every weight, so that it tells what a rank had."""
    assert all(own.after[name]["master"].ne(own.held[name]["master"]).all() for name in own.held)


def test_ranks_that_share_data_and_tensors_of_stage_3_go_on_as_from_their_own(
    folders: dict[Case, Path], again: dict[Case, Path]
) -> None:
    case = SLICED[3]
    own, found = resumed(*((folder[case], case, True) for folder in (folders, again)))
    assert_moved(own)
    assert_same(found, own)
