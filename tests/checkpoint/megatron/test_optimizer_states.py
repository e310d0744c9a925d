"""Optimizer states in Megatron-LM's classic files: its own are read, and it loads ours."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.megatron_names import as_others_write
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
    trained,
    words_apart,
)
from tokamake.checkpoint import writer
from tokamake.checkpoint.convert import convert
from tokamake.checkpoint.deepspeed.folder import LR_SCHEDULER
from tokamake.checkpoint.detect import open_any
from tokamake.checkpoint.inspect import inspect as tell
from tokamake.checkpoint.tensors.checkpoint import OPTIMIZER_SETTINGS, ParallelLayout, Target
from tokamake.checkpoint.torch_files import torch_archive


@pytest.fixture(scope="module")
def megatron() -> Any:
    """megatron.core's optimizers."""
    return on_cpu()


LAYOUTS = [
    ParallelLayout(1),
    ParallelLayout(2),
    ParallelLayout(1, 2),
    ParallelLayout(2, 2),
    ParallelLayout(2, 2, 2),
    ParallelLayout(1, 2, 2),
]


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[4]], ids=str)
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_megatrons_own_optimizers_save_is_read_bit_by_bit(
    family: str, dtype: str, layout: ParallelLayout, megatron: Any, tmp_path: Path
) -> None:
    architecture = FAMILIES[family]
    found = open_any(trained(megatron, tmp_path, architecture, layout, dtype))
    assert found.layout == layout
    assert_trained(found, architecture)
    assert found.notes[LR_SCHEDULER] == SCHEDULER
    if dtype == "fp16":
        assert found.notes["loss_scale"] == (SCALE, 5)


@pytest.mark.parametrize("grouping", [decays_last, words_apart])
@pytest.mark.parametrize("change", [None, as_apex])
def test_groups_of_other_megatrons_are_read(
    grouping: Grouping, change: Any, megatron: Any, tmp_path: Path
) -> None:
    architecture, layout = FAMILIES["llama-tied"], ParallelLayout(2, 2)
    folder = trained(
        megatron, tmp_path, architecture, layout, "bf16", grouping=grouping, change=change
    )
    assert_trained(open_any(folder), architecture)


def test_names_of_the_first_megatrons_are_read(megatron: Any, tmp_path: Path) -> None:
    def rename(state: dict[str, Any]) -> None:
        saved = state["optimizer"]
        state["optimizer"] = {
            "optimizer_state_dict": saved["optimizer"],
            "fp32_from_fp16": saved["fp32_from_fp16_params"],
        }

    folder = trained(megatron, tmp_path, FAMILIES["gpt2"], ParallelLayout(1, 2), "bf16")
    assert_trained(open_any(changed(folder, rename)), FAMILIES["gpt2"])


WAYS = {"llama": "bf16", "llama-tied": "fp32", "gpt2": "fp16"}
"""Families and number formats."""


@pytest.fixture(scope="module", params=WAYS)
def ways(
    request: pytest.FixtureRequest, megatron: Any, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, list[Path]]:
    """A family, and one run of it by Megatron, in native and in universal."""
    family, root = request.param, tmp_path_factory.mktemp(request.param)
    begin = trained(
        megatron, root / "begin", FAMILIES[family], ParallelLayout(2, 2, 2), WAYS[family]
    )
    convert(source=begin, target=root / "native", format="native")
    convert(source=root / "native", target=root / "universal", format="universal")
    return family, [begin, root / "native", root / "universal"]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_megatrons_own_optimizers_load_what_is_written(
    ways: tuple[str, list[Path]], layout: ParallelLayout, megatron: Any, tmp_path: Path
) -> None:
    """From Megatron's format, native and universal; all is there when it is read again."""
    family, sources = ways
    architecture, dtype = FAMILIES[family], WAYS[family]
    expected = trained(megatron, tmp_path / "own", architecture, layout, dtype)
    source = sources[LAYOUTS.index(layout) % len(sources)]
    target = tmp_path / "written"
    writer.write(target, open_any(source), "megatron", Target(layout, dtype))
    found = open_any(target)
    assert found.layout == layout
    assert_trained(found, architecture)
    for file in target.rglob("model_optim_rng.pt"):
        other = expected / file.relative_to(target)
        assert_loads(megatron, file, torch.load(other, weights_only=False))


@pytest.mark.parametrize("format", ["native", "universal", "mds"])
def test_whole_runs_go_from_megatron_to_other_formats(
    ways: tuple[str, list[Path]], format: str, tmp_path: Path
) -> None:
    family, sources = ways
    layout = ParallelLayout(2, 1, 1, 3, 1) if format == "mds" else ParallelLayout()
    writer.write(tmp_path / "a", open_any(sources[0]), format, Target(layout))
    assert_trained(open_any(tmp_path / "a"), FAMILIES[family])


def test_values_of_whole_runs_are_looked_at(
    ways: tuple[str, list[Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps, too, which have no dimensions."""
    _, sources = ways
    for source in sources:
        tell(source, values=True)
        printed = capsys.readouterr().out
        assert "exp_avg, exp_avg_sq, step" in printed
        assert "values        all finite" in printed


def test_a_given_vocabulary_leaves_the_padding_of_states_behind(
    megatron: Any, tmp_path: Path
) -> None:
    begin = trained(megatron, tmp_path, FAMILIES["llama-tied"], ParallelLayout(2, 2), "bf16")
    as_others_write(begin, vocab_size=None)
    name = "optimizer.exp_avg.model.embed_tokens.weight"
    assert open_any(begin).source.shapes[name] == (256, 8)
    convert(source=begin, target=tmp_path / "a", format="universal", vocab_size=250)
    found = open_any(tmp_path / "a")
    for key, exact in random(FAMILIES["llama-tied"]).items():
        name = key.removeprefix("model.")
        assert torch.equal(found.source.read(f"optimizer.exp_avg.{name}"), exact / 2), name


def test_fp32_weights_are_those_that_the_optimizer_had(megatron: Any, tmp_path: Path) -> None:
    """Not what bf16 has of them: a run goes on in fp32 where it was."""
    begin = trained(megatron, tmp_path, FAMILIES["llama"], ParallelLayout(2), "bf16")
    convert(source=begin, target=tmp_path / "a", format="megatron", dtype="fp32")
    found = open_any(tmp_path / "a")
    assert not any(key.startswith("master.") for key in found.source)
    assert_trained(found, FAMILIES["llama"])


def padding(checkpoint: Path) -> Iterator[tuple[str, Tensor]]:
    """Rows of padding in moments and fp32 weights of a file."""
    (file,) = checkpoint.rglob("model_optim_rng.pt")
    for name, value in torch_archive.leaves(torch.load(file, weights_only=False)["optimizer"]):
        if isinstance(value, Tensor) and value.shape[:1] == (256,):
            yield name, value[-PADDING:]


def test_padding_has_no_moments_and_the_mean_as_fp32_weights(megatron: Any, tmp_path: Path) -> None:
    begin = trained(megatron, tmp_path, FAMILIES["llama"], ParallelLayout(2), "bf16")
    convert(source=begin, target=tmp_path / "a", format="megatron")
    exact = random(FAMILIES["llama"])
    means = [
        exact[f"model.{name}.weight"].double().mean(0).float()
        for name in ("model.embed_tokens", "lm_head")
    ]
    found = [*padding(tmp_path / "a")]
    assert len(found) == 6
    for name, rows in found:
        if "fp32_from" in name:
            mean = means.pop(0)
            assert torch.equal(rows, mean.expand(PADDING, -1))
        else:
            assert not rows.any(), name


# What is left.


def changed(folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    for file in folder.rglob("model_optim_rng.pt"):
        state = torch.load(file, weights_only=False)
        change(state)
        torch.save(state, file)
    return folder


def swap(state: dict[str, Any]) -> None:
    """As no Megatron counts: two parameters of different shapes change places."""
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
def test_states_in_an_unknown_order_are_left_and_told(
    change: Any, megatron: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = changed(
        trained(megatron, tmp_path, FAMILIES["llama"], ParallelLayout(2), "bf16"), change
    )
    found = open_any(folder)
    assert {key.partition(".")[0] for key in found.source} == {"model"}
    file = folder / "iter_0000001/mp_rank_00/model_optim_rng.pt"
    told = f"optimizer states in an unknown order ({file})"
    assert found.unread == (told,)
    convert(source=folder, target=tmp_path / "hf", format="hf")
    assert f"left behind: {told}" in capsys.readouterr().out


def test_states_of_the_distributed_optimizer_are_left_and_told(
    megatron: Any, tmp_path: Path
) -> None:
    def share(state: dict[str, Any]) -> None:
        state["optimizer"]["optimizer"].pop("state")

    folder = changed(
        trained(megatron, tmp_path, FAMILIES["llama"], ParallelLayout(2), "bf16"), share
    )
    for rank in range(2):
        torch.save({}, folder / f"iter_0000001/mp_rank_{rank:02d}/distrib_optim.pt")
    found = open_any(folder)
    assert {key.partition(".")[0] for key in found.source} == {"model"}
    assert found.unread == ("states of Megatron-LM's distributed optimizer (distrib_optim.pt)",)


def test_a_checkpoint_before_the_first_step_has_no_states(megatron: Any, tmp_path: Path) -> None:
    def begin(state: dict[str, Any]) -> None:
        state["optimizer"]["state"] = {}

    folder = changed(
        trained(megatron, tmp_path, FAMILIES["llama"], ParallelLayout(1), "fp32"), begin
    )
    found = open_any(folder)
    assert {key.partition(".")[0] for key in found.source} == {"model"}
    assert found.unread == ()


def without_step(known: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: value for key, value in known.items() if ".step." not in key}


@pytest.mark.parametrize(
    ("edit", "notes", "told"),
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
def test_states_that_megatron_could_not_go_on_with_are_left_and_told(
    edit: Any, notes: dict[str, Any], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    architecture, exact = FAMILIES["llama"], random(FAMILIES["llama"])
    known = dict(exact)
    for key, tensor in exact.items():
        name = key.removeprefix("model.")
        for kind, value in (
            ("exp_avg", tensor),
            ("exp_avg_sq", tensor),
            ("step", torch.tensor(7.0)),
        ):
            known[f"optimizer.{kind}.{name}"] = value
    settings = {OPTIMIZER_SETTINGS: {"lr": LR, "betas": [*BETAS], "eps": 1e-8, "weight_decay": 0.1}}
    begin = in_memory(architecture, edit(known), **{**settings, **notes})
    writer.write(tmp_path / "native", begin, "native", Target())
    convert(source=tmp_path / "native", target=tmp_path / "a", format="megatron")
    printed = capsys.readouterr()
    assert told in printed.err
    assert "Megatron-LM cannot resume from its states" in printed.err
    assert "left behind: optimizer.exp_avg, optimizer.exp_avg_sq" in printed.out
    found = open_any(tmp_path / "a")
    assert {key.partition(".")[0] for key in found.source} == {"model"}
