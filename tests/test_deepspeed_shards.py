"""DeepSpeed loads what is written as its own checkpoints, and trains on as it would from those."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_files import KINDS, Resumed, made, resumed, truth
from deepspeed_models import SAMPLES, STEPS, Case
from torch import Tensor

from tokamake.checkpoint import written
from tokamake.checkpoint.any_format import open_any
from tokamake.checkpoint.convert import convert
from tokamake.checkpoint.opened import Layout, Target

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
WEIGHTS_ALONE = [case for case in CASES if case.data == 1 and case.precision == "bf16"]
TIED = Case(1, "fp32", data=1, pipeline=2, tied=True, full=True)
"""Its layers have BigScience's numbers, which are not those that are written."""
DIVISIBLE = 7
"""make_vocab_size_divisible_by of the models."""


def target(case: Case) -> Target:
    layout = Layout(case.tensor, max(1, case.pipeline), 1, case.data, case.zero_stage)
    return Target(layout, case.precision, make_vocab_size_divisible_by=DIVISIBLE)


def kind(case: Case) -> str:
    return "mds_pipeline" if case.pipeline else "mds"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Path]:
    """What DeepSpeed wrote, of each case; do not write there."""
    return made(tmp_path_factory.mktemp("deepspeed"), *CASES, TIED)


@pytest.fixture(scope="module")
def again(folders: dict[Case, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[Case, Path]:
    """The same by way of the trainer's own format, or straight; do not write there."""
    root, found = tmp_path_factory.mktemp("again"), {}
    for number, (case, folder) in enumerate(folders.items()):
        begin, found[case] = folder, root / str(case)
        if number % 2 == 0:
            convert(source=begin, target=root / f"{case}-native", format="native")
            begin = root / f"{case}-native"
        assert written.write(found[case], open_any(begin), kind(case), target(case)).left == []
    return found


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
        for number, group in enumerate(state["base_optimizer_state"]["param_groups"]):
            mine = ours[name]["base_optimizer_state"]["param_groups"][number]
            shared = group.keys() & mine.keys()
            assert {*shared} >= {"lr", "betas", "eps", "weight_decay", "lr_mult", "wd_mult", "name"}
            assert {key: mine[key] for key in shared} == {key: group[key] for key in shared}


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
    every = [(folder[case], case, True) for case in CASES for folder in (folders, again)]
    for case in WEIGHTS_ALONE:
        plain = replace(target(case).layout, data_parallel_size=1, zero_stage=0)
        found = open_any(folders[case])
        written.write(tmp_path / str(case), found, kind(case), replace(target(case), layout=plain))
        every.append((tmp_path / str(case), case, False))
    found = dict(zip(every, resumed(*every), strict=True))
    for case in CASES:
        own = found[folders[case], case, True]
        assert own.held.keys() == truth(folders[case]).keys()
        moved = (own.after[name]["master"].ne(own.held[name]["master"]).all() for name in own.held)
        assert all(moved)
        assert_same(found[again[case], case, True], own)
    for case in WEIGHTS_ALONE:
        held = found[tmp_path / str(case), case, False].held
        for name, tensors in truth(folders[case]).items():
            assert torch.equal(held[name]["weight"], tensors["weight"]), name
