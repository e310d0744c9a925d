"""Optimizer states of Megatron-LM: tokamake reads them, and Megatron-LM loads written ones."""

import shutil
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.grids import cover, params
from tests.support.megatron_names import remove_tokamake_arguments
from tests.support.megatron_optimizers import (
    BETAS,
    FAMILIES,
    LR,
    PADDING,
    SCALE,
    SCHEDULER,
    Grouping,
    as_apex,
    assert_loads,
    assert_trained,
    decays_last,
    in_memory,
    on_cpu,
    random,
    separate_embeddings,
    trained,
)
from tokamake.checkpoint import writer
from tokamake.checkpoint.convert import convert
from tokamake.checkpoint.detect import open_any
from tokamake.checkpoint.inspect import inspect
from tokamake.checkpoint.megatron_model.optimizer_states import LR_SCHEDULER
from tokamake.checkpoint.tensors.checkpoint import OPTIMIZER_SETTINGS, ParallelLayout, Target
from tokamake.checkpoint.torch_files import torch_archive


@pytest.fixture(scope="module")
def megatron() -> Any:
    """megatron.core's optimizers."""
    return on_cpu()


@pytest.fixture(scope="module")
def made(megatron: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a llama on two ranks in bf16; do not write here."""
    folder = tmp_path_factory.mktemp("made")
    return trained(megatron, folder, FAMILIES["llama"], ParallelLayout(2), "bf16")


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Path:
    """A copy of `made` to write in."""
    return Path(shutil.copytree(made, tmp_path / "copied"))


LAYOUTS = [
    ParallelLayout(1),
    ParallelLayout(2),
    ParallelLayout(1, 2),
    ParallelLayout(2, 2),
    ParallelLayout(2, 2, 2),
    ParallelLayout(1, 2, 2),
]


STATES = [*product(FAMILIES, ("fp32", "bf16", "fp16"), (LAYOUTS[0], LAYOUTS[4]))]


@pytest.mark.parametrize("case", params(STATES, cover(STATES, enumerate)), ids=str)
def test_states_of_megatrons_optimizers_are_read_bit_by_bit(
    case: tuple[str, str, ParallelLayout], megatron: Any, tmp_path: Path
) -> None:
    family, dtype, layout = case
    architecture = FAMILIES[family]
    checkpoint = open_any(trained(megatron, tmp_path, architecture, layout, dtype))
    assert checkpoint.layout == layout
    assert_trained(checkpoint, architecture)
    assert checkpoint.notes[LR_SCHEDULER] == SCHEDULER
    if dtype == "fp16":
        assert checkpoint.notes["loss_scale"] == (SCALE, 5)


@pytest.mark.parametrize("grouping", [decays_last, separate_embeddings])
@pytest.mark.parametrize("change", [None, as_apex])
def test_parameter_groups_of_other_megatron_versions_are_read(
    grouping: Grouping, change: Any, megatron: Any, tmp_path: Path
) -> None:
    architecture, layout = FAMILIES["llama-tied"], ParallelLayout(2, 2)
    folder = trained(
        megatron, tmp_path, architecture, layout, "bf16", grouping=grouping, change=change
    )
    assert_trained(open_any(folder), architecture)


def test_keys_of_early_megatron_versions_are_read(megatron: Any, tmp_path: Path) -> None:
    def rename(state: dict[str, Any]) -> None:
        saved = state["optimizer"]
        state["optimizer"] = {
            "optimizer_state_dict": saved["optimizer"],
            "fp32_from_fp16": saved["fp32_from_fp16_params"],
        }

    folder = trained(megatron, tmp_path, FAMILIES["gpt2"], ParallelLayout(1, 2), "bf16")
    assert_trained(open_any(changed(folder, rename)), FAMILIES["gpt2"])


DTYPES = {"llama": "bf16", "llama-tied": "fp32", "gpt2": "fp16"}
"""Dtype for each family."""


@pytest.fixture(scope="module", params=DTYPES)
def sources(
    request: pytest.FixtureRequest, megatron: Any, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, list[Path]]:
    """A family, and a checkpoint of it in the formats `megatron`, `native` and `universal`."""
    family, root = request.param, tmp_path_factory.mktemp(request.param)
    megatron_folder = trained(
        megatron, root / "megatron", FAMILIES[family], ParallelLayout(2, 2, 2), DTYPES[family]
    )
    convert(source=megatron_folder, target=root / "native", format="native")
    convert(source=root / "native", target=root / "universal", format="universal")
    return family, [megatron_folder, root / "native", root / "universal"]


@pytest.mark.parametrize("layout", params(LAYOUTS, LAYOUTS[-1:]), ids=str)
def test_megatrons_optimizers_load_written_states(
    sources: tuple[str, list[Path]], layout: ParallelLayout, megatron: Any, tmp_path: Path
) -> None:
    """The sources are of all three formats. tokamake reads the written states back, too."""
    family, folders = sources
    architecture, dtype = FAMILIES[family], DTYPES[family]
    expected = trained(megatron, tmp_path / "expected", architecture, layout, dtype)
    source = folders[LAYOUTS.index(layout) % len(folders)]
    target = tmp_path / "written"
    writer.write(target, open_any(source), "megatron", Target(layout, dtype))
    checkpoint = open_any(target)
    assert checkpoint.layout == layout
    assert_trained(checkpoint, architecture)
    for file in target.rglob("model_optim_rng.pt"):
        expected_file = expected / file.relative_to(target)
        assert_loads(megatron, file, torch.load(expected_file, weights_only=False))


@pytest.mark.parametrize("format", ["native", "universal", "mds"])
def test_weights_and_states_of_megatron_convert_to_other_formats(
    sources: tuple[str, list[Path]], format: str, tmp_path: Path
) -> None:
    family, folders = sources
    layout = ParallelLayout(2, 1, 1, 3, 1) if format == "mds" else ParallelLayout()
    writer.write(tmp_path / "a", open_any(folders[0]), format, Target(layout))
    assert_trained(open_any(tmp_path / "a"), FAMILIES[family])


def test_inspect_checks_the_values_of_weights_and_states(
    sources: tuple[str, list[Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    """This includes step counts, which have no dimensions."""
    _, folders = sources
    for folder in folders:
        inspect(folder, values=True)
        printed = capsys.readouterr().out
        assert "exp_avg, exp_avg_sq, step" in printed
        assert "values        all finite" in printed


def test_vocab_size_removes_the_padding_of_states(megatron: Any, tmp_path: Path) -> None:
    folder = trained(megatron, tmp_path, FAMILIES["llama-tied"], ParallelLayout(2, 2), "bf16")
    remove_tokamake_arguments(folder, vocab_size=None)
    name = "optimizer.exp_avg.model.embed_tokens.weight"
    assert open_any(folder).source.shapes[name] == (256, 8)
    convert(source=folder, target=tmp_path / "a", format="universal", vocab_size=250)
    source = open_any(tmp_path / "a").source
    for key, exact in random(FAMILIES["llama-tied"]).items():
        name = key.removeprefix("model.")
        assert torch.equal(source.read(f"optimizer.exp_avg.{name}"), exact / 2), name


def test_fp32_weights_are_the_master_weights_of_a_bf16_run(made: Path, tmp_path: Path) -> None:
    convert(source=made, target=tmp_path / "a", format="megatron", dtype="fp32")
    checkpoint = open_any(tmp_path / "a")
    assert not any(key.startswith("master.") for key in checkpoint.source)
    assert_trained(checkpoint, FAMILIES["llama"])


def padding(checkpoint: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the padding rows of moments and master weights in a checkpoint's only file."""
    (file,) = checkpoint.rglob("model_optim_rng.pt")
    for name, value in torch_archive.leaves(torch.load(file, weights_only=False)["optimizer"]):
        if isinstance(value, Tensor) and value.shape[:1] == (256,):
            yield name, value[-PADDING:]


def test_padding_has_zero_moments_and_the_mean_as_master_weights(
    made: Path, tmp_path: Path
) -> None:
    convert(source=made, target=tmp_path / "a", format="megatron")
    exact = random(FAMILIES["llama"])
    means = [
        exact[f"model.{name}.weight"].double().mean(0).float()
        for name in ("model.embed_tokens", "lm_head")
    ]
    tensors = [*padding(tmp_path / "a")]
    assert len(tensors) == 6
    for name, rows in tensors:
        if "fp32_from" in name:
            mean = means.pop(0)
            assert torch.equal(rows, mean.expand(PADDING, -1))
        else:
            assert not rows.any(), name


def changed(folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    for file in folder.rglob("model_optim_rng.pt"):
        state = torch.load(file, weights_only=False)
        change(state)
        torch.save(state, file)
    return folder


def swap(state: dict[str, Any]) -> None:
    """Swap two parameters of different shapes, an order that no Megatron version has."""
    numbers = state["optimizer"]["optimizer"]["param_groups"][0]["params"]
    numbers[0], numbers[1] = numbers[1], numbers[0]


def lose(state: dict[str, Any]) -> None:
    state["optimizer"]["optimizer"]["state"].pop(3)


def lose_master(state: dict[str, Any]) -> None:
    state["optimizer"]["fp32_from_fp16_params"][0].pop()


def add_master(state: dict[str, Any]) -> None:
    state["optimizer"]["fp32_from_fp16_params"][1].append(torch.zeros(8))


def chain(state: dict[str, Any]) -> None:
    state["optimizer"] = [state["optimizer"]] * 2


def add_kind(state: dict[str, Any]) -> None:
    first = state["optimizer"]["optimizer"]["state"][0]
    first["more"] = first["exp_avg"]


@pytest.mark.parametrize("change", [swap, lose, lose_master, add_master, chain, add_kind])
def test_states_in_an_unknown_order_are_reported_as_unread(
    change: Any, copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = changed(copied, change)
    checkpoint = open_any(folder)
    assert {key.partition(".")[0] for key in checkpoint.source} == {"model"}
    file = folder / "iter_0000001/mp_rank_00/model_optim_rng.pt"
    description = f"optimizer states in an unknown order ({file})"
    assert checkpoint.unread == (description,)
    convert(source=folder, target=tmp_path / "hf", format="hf")
    assert f"left behind: {description}" in capsys.readouterr().out


def test_buffers_of_another_model_are_reported_as_unread(copied: Path) -> None:
    def remove_states(state: dict[str, Any]) -> None:
        state["optimizer"]["optimizer"].pop("state")

    folder = changed(copied, remove_states)
    for rank in range(2):
        torch.save({}, folder / f"iter_0000001/mp_rank_{rank:02d}/distrib_optim.pt")
    checkpoint = open_any(folder)
    assert {key.partition(".")[0] for key in checkpoint.source} == {"model"}
    file = folder / "iter_0000001/mp_rank_00/distrib_optim.pt"
    assert checkpoint.unread == (f"states of Megatron-LM's distributed optimizer ({file})",)


def test_a_checkpoint_before_the_first_step_has_no_states(megatron: Any, tmp_path: Path) -> None:
    def remove_states(state: dict[str, Any]) -> None:
        state["optimizer"]["state"] = {}

    folder = changed(
        trained(megatron, tmp_path, FAMILIES["llama"], ParallelLayout(1), "fp32"), remove_states
    )
    checkpoint = open_any(folder)
    assert {key.partition(".")[0] for key in checkpoint.source} == {"model"}
    assert checkpoint.unread == ()


def without_step(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value for key, value in tensors.items() if ".step." not in key}


@pytest.mark.parametrize(
    ("edit", "notes", "message"),
    [
        (dict, {"optimizer": "adopt"}, "has states exp_avg, exp_avg_sq, step of adopt, not Adam"),
        (without_step, {}, "has states exp_avg, exp_avg_sq of adamw, not Adam's states"),
        (
            dict,
            {OPTIMIZER_SETTINGS: {"lr": 1.0}},
            "does not record its optimizer's betas, epsilon, weight d",
        ),
    ],
)
def test_states_that_megatron_cannot_resume_from_are_left_out_with_a_warning(
    edit: Any,
    notes: dict[str, Any],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    architecture, exact = FAMILIES["llama"], random(FAMILIES["llama"])
    tensors = dict(exact)
    for key, tensor in exact.items():
        name = key.removeprefix("model.")
        for kind, value in (
            ("exp_avg", tensor),
            ("exp_avg_sq", tensor),
            ("step", torch.tensor(7.0)),
        ):
            tensors[f"optimizer.{kind}.{name}"] = value
    settings = {OPTIMIZER_SETTINGS: {"lr": LR, "betas": [*BETAS], "eps": 1e-8, "weight_decay": 0.1}}
    checkpoint = in_memory(architecture, edit(tensors), **{**settings, **notes})
    writer.write(tmp_path / "native", checkpoint, "native", Target())
    convert(source=tmp_path / "native", target=tmp_path / "a", format="megatron")
    printed = capsys.readouterr()
    assert message in printed.err
    assert "Megatron-LM cannot resume from its states" in printed.err
    assert "left behind: optimizer.exp_avg, optimizer.exp_avg_sq" in printed.out
    source = open_any(tmp_path / "a").source
    assert {key.partition(".")[0] for key in source} == {"model"}
