"""DeepSpeed loads tokamake's files like its own checkpoints, and resumes identically."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.deepspeed_files import KINDS, Resumed, held_states, resume, written_once
from tests.support.deepspeed_models import EMBEDDING, SAMPLES, STEPS, SUB_GROUP_SIZE, Case
from tests.support.grids import cover, field_values, params
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
ZERO_3 = [
    Case(3, "bf16", full=True),
    Case(3, "fp32", full=True),
    Case(3, "fp16", full=True),
    Case(3, "bf16", data=2, tensor=2, full=True),
]
ONLY_WEIGHTS = [case for case in CASES if case.data == 1 and case.precision == "bf16"]
TIED = Case(1, "fp32", data=1, pipeline=2, tied=True, full=True)
"""Its layers have the numbers of BigScience's fork; tokamake writes others."""
COVERED = cover([*CASES, TIED, *ZERO_3], field_values)
"""Cases that `make test` runs."""
DIVISIBLE = 7
"""make_vocab_size_divisible_by of the models."""


def target(case: Case) -> Target:
    layout = ParallelLayout(case.tensor, max(1, case.pipeline), 1, case.data, case.zero_stage)
    return Target(layout, case.precision, make_vocab_size_divisible_by=DIVISIBLE)


def kind(case: Case) -> str:
    return "mds_pipeline" if case.pipeline else "mds"


@pytest.fixture(scope="module")
def folders(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[Case, Path]:
    """Checkpoints of DeepSpeed for the selected tests, which must not change them."""
    own = [item for item in request.session.items if item.path == Path(__file__)]
    runs_grid = any(item.get_closest_marker("grid") for item in own)
    return written_once(tmp_path_factory, *([*CASES, TIED, *ZERO_3] if runs_grid else COVERED))


@pytest.fixture(scope="module")
def converted(
    folders: dict[Case, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[Case, Path]:
    """The same checkpoints after tokamake has written them, half of them through `native`."""
    root, targets = tmp_path_factory.mktemp("converted"), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zero_writer, "SUB_GROUP_SIZE", SUB_GROUP_SIZE)
        for number, (case, folder) in enumerate(folders.items()):
            source, targets[case] = folder, root / str(case)
            if number % 2 == 0:
                convert(source=source, target=root / f"{case}-native", format="native")
                source = root / f"{case}-native"
            result = writer.write(targets[case], open_any(source), kind(case), target(case))
            assert result.left == []
    return targets


def test_sub_group_size_is_the_default_of_deepspeed() -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    assert DeepSpeedZeroConfig().sub_group_size == zero_writer.SUB_GROUP_SIZE


def optimizer_states(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the optimizer states in DeepSpeed's files, by file name."""
    files = (folder / f"global_step{STEPS}").glob("*_optim_states.pt")
    return {
        file.name: torch.load(file, weights_only=False)["optimizer_state_dict"] for file in files
    }


def flat(state: dict[str, Any]) -> list[tuple[Tensor, ...]]:
    """Return master weights and moments, then the step count, of each group without padding."""
    masters, base = state["single_partition_of_fp32_groups"], state["base_optimizer_state"]
    tensors = []
    for number, (master, padding) in enumerate(zip(masters, state["group_paddings"], strict=True)):
        group = base["state"][number]
        size = group["exp_avg"].numel() - padding
        tensors.append(tuple(tensor[:size] for tensor in (master, *(group[k] for k in KINDS))))
        tensors.append((torch.as_tensor(group["step"]),))
    return tensors


@pytest.mark.parametrize("case", params([*CASES, TIED], COVERED), ids=str)
def test_partitions_of_stages_1_and_2_equal_those_of_deepspeed(
    case: Case, folders: dict[Case, Path], converted: dict[Case, Path]
) -> None:
    expected, written = optimizer_states(folders[case]), optimizer_states(converted[case])
    assert written.keys() == expected.keys()
    for name, state in expected.items():
        for tensors, references in zip(flat(written[name]), flat(state), strict=True):
            assert all(torch.equal(*pair) for pair in zip(tensors, references, strict=True))
        for key in ("partition_count", "group_paddings"):
            assert written[name][key] == state[key], key
        sizes = [[tensor.shape for tensor in flat(s)[0]] for s in (state, written[name])]
        assert sizes[0] == sizes[1]
        assert_same_settings(written[name]["base_optimizer_state"], state["base_optimizer_state"])


def assert_same_settings(written: dict[str, Any], expected: dict[str, Any]) -> None:
    """Check that the groups of torch's optimizer agree in their common settings."""
    for group, reference in zip(written["param_groups"], expected["param_groups"], strict=True):
        shared = reference.keys() & group.keys()
        assert {*shared} >= {"lr", "betas", "eps", "weight_decay", "lr_mult", "wd_mult", "name"}
        assert {key: group[key] for key in shared} == {key: reference[key] for key in shared}
        assert "params" in shared


def model_states(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the contents of the files without optimizer states, by file name."""
    files = (folder / f"global_step{STEPS}").glob("*_model_states.pt")
    return {file.name: torch.load(file, weights_only=False) for file in files}


def slices(state: dict[str, Any], sizes: list[int], rank: int, ranks: int) -> Iterator[Tensor]:
    """Yield master weights and moments of a rank's slice of each parameter, without padding."""
    base, remaining = state["optimizer_state_dict"]["state"], iter(sizes)
    for number, master in enumerate(state["fp32_flat_groups"]):
        flat, offset = torch.stack([master, *(base[number][kind] for kind in KINDS)]), 0
        while offset < master.numel():
            size = next(remaining)
            slice_size = math.ceil(size / ranks)
            yield flat[:, offset : offset + min(slice_size, max(0, size - rank * slice_size))]
            offset += slice_size
        assert offset == master.numel()
    assert next(remaining, None) is None


@pytest.mark.parametrize("case", params(ZERO_3, COVERED), ids=str)
def test_partitions_of_stage_3_equal_those_of_deepspeed(
    case: Case, folders: dict[Case, Path], converted: dict[Case, Path]
) -> None:
    shapes = model_states(folders[case])["zero_pp_rank_0_mp_rank_00_model_states.pt"]
    sizes = [size.numel() for group in shapes["param_shapes"] for size in group.values()]
    expected, written = optimizer_states(folders[case]), optimizer_states(converted[case])
    assert written.keys() == expected.keys()
    assert len(expected) == case.data * case.tensor
    for name, state in expected.items():
        assert [*state["fp32_flat_groups"]] != [], "there is something to compare"
        for key in ("fp32_flat_groups", "optimizer_state_dict"):
            values, references = (
                dict(torch_archive.leaves(states[name][key])) for states in (written, expected)
            )
            tensors = {key: value for key, value in references.items() if torch.is_tensor(value)}
            assert {key: (values[key].shape, values[key].dtype) for key in tensors} == {
                key: (value.shape, value.dtype) for key, value in tensors.items()
            }
        rank = int(name.split("rank_")[1].partition("_")[0])
        pairs = zip(
            slices(written[name], sizes, rank, case.data),
            slices(state, sizes, rank, case.data),
            strict=True,
        )
        assert all(torch.equal(*pair) for pair in pairs)
        base = "optimizer_state_dict"
        assert_same_settings(written[name][base], state[base])
        for number, moments in state[base]["state"].items():
            assert written[name][base]["state"][number]["step"] == moments["step"] == STEPS
        assert written[name].keys() == state.keys()
        for key in ("zero_stage", "partition_count", "overflow"):
            assert written[name][key] == state[key], key
        assert written[name]["loss_scaler"].loss_scale == state["loss_scaler"].loss_scale


@pytest.mark.parametrize(("noted", "scale"), [({}, 2.0**16), ({"loss_scale": (512.0, 3)}, 512.0)])
def test_stage_3_in_fp16_has_a_loss_scale(
    noted: dict[str, Any], scale: float, converted: dict[Case, Path], tmp_path: Path
) -> None:
    opened = open_any(next(iter(converted.values())))
    notes = {key: value for key, value in opened.notes.items() if key != "loss_scale"}
    opened = replace(opened, notes=notes | noted)
    writer.write(tmp_path / "a", opened, "mds", target(Case(3, "fp16", full=True)))
    for state in optimizer_states(tmp_path / "a").values():
        assert state["loss_scaler"].cur_scale == scale


@pytest.mark.parametrize("case", params(ZERO_3, COVERED), ids=str)
def test_model_states_of_stage_3_equal_those_of_deepspeed(
    case: Case, folders: dict[Case, Path], converted: dict[Case, Path]
) -> None:
    expected, written = model_states(folders[case]), model_states(converted[case])
    assert written.keys() == expected.keys()
    for name, state in expected.items():
        assert written[name]["param_shapes"] == state["param_shapes"]
        assert [[*group] for group in written[name]["param_shapes"]] == [
            [*group] for group in state["param_shapes"]
        ]
        modules = [dict(torch_archive.leaves(s["module"])) for s in (written[name], state)]
        shapes, expected_shapes = (
            {key: (value.shape, value.dtype) for key, value in module.items()} for module in modules
        )
        assert shapes == expected_shapes
        for key in ("dp_world_size", "mp_world_size", "global_steps", "global_samples"):
            assert written[name][key] == state[key], key
        for key in ("buffer_names", "shared_params", "iteration", "checkpoint_version"):
            assert written[name][key] == state[key], key


@pytest.mark.grid
@pytest.mark.parametrize("case", [ZERO_3[0], ZERO_3[1], CASES[1], CASES[2]], ids=str)
def test_zero_to_fp32_of_deepspeed_reads_written_files(
    case: Case, folders: dict[Case, Path], converted: dict[Case, Path]
) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    weights = get_fp32_state_dict_from_zero_checkpoint(str(converted[case]))
    held = held_states(folders[case])
    masters = {f"{name}.weight": states["master"] for name, states in held.items()}
    assert weights.keys() == masters.keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in masters.items())


@pytest.mark.parametrize("case", params(ZERO_3, COVERED), ids=str)
def test_written_stage_3_is_read_back_completely(
    case: Case, folders: dict[Case, Path], converted: dict[Case, Path]
) -> None:
    expected, written = open_any(folders[case]), open_any(converted[case])
    assert {*written.source} == {*expected.source}
    for key in expected.source:
        assert torch.equal(written.source.read(key), expected.source.read(key)), key
    assert (written.layout, written.progress) == (expected.layout, expected.progress)
    embedding = written.source.read("model.model.embed_tokens.weight")
    assert torch.equal(embedding, held_states(folders[case])[EMBEDDING]["master"])


def assert_same(resumed: Resumed, expected: Resumed) -> None:
    """Check that every bit is the same after loading, and after another step."""
    for states, references in zip(resumed[:2], expected[:2], strict=True):
        assert states.keys() == references.keys()
        for name, tensors in references.items():
            assert states[name].pop("step") == tensors.pop("step")
            assert all(torch.equal(states[name][kind], tensors[kind]) for kind in tensors), name
    assert resumed.num_steps == expected.num_steps == SAMPLES


@pytest.mark.grid
def test_deepspeed_resumes_as_from_its_own_checkpoints(
    folders: dict[Case, Path], converted: dict[Case, Path], tmp_path: Path
) -> None:
    """DeepSpeed also loads only the weights, of checkpoints with and without partitions."""
    cases = [*CASES, *(case for case in ZERO_3 if case.world_size == 2)]
    runs = [(paths[case], case, True) for case in cases for paths in (folders, converted)]
    for case in ONLY_WEIGHTS:
        layout = replace(target(case).layout, data_parallel_size=1, zero_stage=0)
        path, checkpoint = tmp_path / str(case), open_any(folders[case])
        writer.write(path, checkpoint, kind(case), replace(target(case), layout=layout))
        runs.append((path, case, False))
    runs.append((converted[ZERO_3[0]], ZERO_3[0], False))
    results = dict(zip(runs, resume(*runs), strict=True))
    for case in cases:
        expected = results[folders[case], case, True]
        assert expected.held.keys() == held_states(folders[case]).keys()
        assert_all_weights_changed(expected)
        assert_same(results[converted[case], case, True], expected)
    for path, case, _ in (run for run in runs if not run[2]):
        held = results[path, case, False].held
        for name, tensors in held_states(folders[case]).items():
            assert torch.equal(held[name]["weight"], tensors["weight"]), name


def assert_all_weights_changed(run: Resumed) -> None:
    """Check that the other step depends on every weight's state."""
    assert all(run.after[name]["master"].ne(run.held[name]["master"]).all() for name in run.held)


@pytest.mark.grid
def test_deepspeed_resumes_stage_3_on_tensor_parallel_ranks(
    folders: dict[Case, Path], converted: dict[Case, Path]
) -> None:
    case = ZERO_3[3]
    expected, resumed = resume(*((paths[case], case, True) for paths in (folders, converted)))
    assert_all_weights_changed(expected)
    assert_same(resumed, expected)
