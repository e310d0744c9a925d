"""Suggested layouts: they fit, the trainer accepts them, and the fastest comes first."""

from itertools import pairwise

import pytest

from tests.support.paths import ROOT
from tokamake.config.architecture_files import read_architecture
from tokamake.config.root import Config
from tokamake.config.training import TrainSettings
from tokamake.errors import UserError
from tokamake.estimate.layouts import USABLE_MEMORY, lines, settings, suggested
from tokamake.estimate.run import Allocation
from tokamake.preflight.run import check_ranks
from tokamake.runtime.accelerators import ACCELERATORS, accelerator


def config(model: str, **train: object) -> Config:
    values = {"sequence_length": 2048, "global_batch_size": 512, "train_steps": 10, **train}
    architecture = str(ROOT / f"config/models/{model}.yaml")
    return Config.model_validate({"train": values, "model": {"architecture": architecture}})


def allocation(nodes: int, device: str = "a100-80gb") -> Allocation:
    return Allocation(nodes, 8 * nodes, None, device)


def test_a_small_model_needs_data_parallelism_only() -> None:
    model = read_architecture(ROOT / "config/models/gpt3-1.7b.yaml")
    best = suggested(config("gpt3-1.7b"), model, allocation=allocation(2))[0].layout
    assert (best.tensor, best.pipeline, best.context, best.data) == (1, 1, 1, 16)


def test_a_tiny_model_gets_the_simplest_layout_and_small_units() -> None:
    model = read_architecture(ROOT / "config/models/tiny-llama.yaml")
    model = model.model_copy(update={"vocab_size": 8192})
    run = config("tiny-llama", global_batch_size=16, sequence_length=64)
    best, *_ = suggested(run, model, allocation=allocation(1, "h100-80gb"))
    assert best.layout.tensor * best.layout.pipeline * best.layout.zero == 1
    title, _, row, *_, note = lines("tiny", [best], allocation=allocation(1, "h100-80gb"))[:4]
    assert " on 1 node in bf16, " in title
    assert " MB  " in row
    assert " µs  " in row
    assert note.startswith("such short steps take longer")
    fp32 = config("tiny-llama", global_batch_size=16, sequence_length=64, precision="fp32")
    slower, *_ = suggested(fp32, model, allocation=allocation(1, "h100-80gb"))
    assert slower.step.products == pytest.approx(best.step.products * 989.4 / 66.9)


def test_a_large_model_is_divided_until_it_fits() -> None:
    model, given = read_architecture(ROOT / "config/models/gpt3-175b.yaml"), allocation(64)
    run = config("gpt3-175b", global_batch_size=1536)
    found = suggested(run, model, allocation=given)
    times = [each.step.total for each in found]
    assert all(time < 1.03 * later for time, later in pairwise(times))
    for each in found:
        layout = each.layout
        assert layout.ranks == given.ranks
        assert layout.zero > 1 or layout.tensor * layout.pipeline >= 16
        assert each.memory_bytes <= USABLE_MEMORY * 80e9
        train = TrainSettings.model_validate({**run.train.model_dump(), **settings(layout)})
        check_ranks(train, given.ranks)  # the trainer accepts it
    assert 0.3 < found[0].mfu < 0.7
    shown = lines("large", found, allocation=given)
    assert len(shown) == 2 + len(found) + 1 + len(settings(found[0].layout))
    with pytest.raises(UserError, match="no layout fits 8 ranks of a100-80gb"):
        suggested(run, model, allocation=allocation(1))


def test_more_memory_needs_less_division() -> None:
    model, run = read_architecture(ROOT / "config/models/llama2-70b.yaml"), config("llama2-70b")
    least = {
        device: min(
            each.layout.tensor * each.layout.pipeline
            for each in suggested(run, model, allocation=allocation(16, device))
            if each.layout.zero < 3
        )
        for device in ("a100-40gb", "h200-141gb")
    }
    assert least["h200-141gb"] < least["a100-40gb"]


def test_models_of_several_stacks_and_unknown_devices_are_refused() -> None:
    model = read_architecture(ROOT / "config/models/t5-220m.yaml")
    with pytest.raises(UserError, match="an encoder and a decoder, and the cost model has one"):
        suggested(config("gpt3-1.7b"), model, allocation=allocation(1))
    with pytest.raises(
        UserError, match=r"--device: h100: unknown device; did you mean h100-80gb\?"
    ):
        accelerator("h100", where="--device")
    assert all(each.memory_bandwidth > each.link_bandwidth for each in ACCELERATORS.values())


def test_ranks_divide_experts_where_that_is_faster() -> None:
    model, run = (
        read_architecture(ROOT / "config/models/qwen3-30b-a3b.yaml"),
        config("qwen3-30b-a3b"),
    )
    found = suggested(run, model, allocation=allocation(4))
    sizes = {each.layout.expert for each in found}
    assert sizes - {1}
    for each in found:
        layout = each.layout
        assert 128 % layout.expert == layout.data * layout.context % layout.expert == 0
        assert settings(layout)["parallel"].get("expert_parallel_size", 1) == layout.expert
    shown = lines("experts", found, allocation=allocation(4))
    assert shown[1].split()[3] == "EP"
    assert {int(line.split()[3]) for line in shown[2 : 2 + len(found)]} == sizes
