"""Runs that continue another run or take its weights: which are refused, and what the others do."""

import re
import shlex
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.support import hf_folder
from tests.support.forked import killed_in_backward, train
from tests.support.grids import params
from tests.support.optimizers import LOW_BIT
from tests.support.random_tensors import random_tensors
from tests.support.runs import ARCHITECTURE, hashes, losses, make_run, summary, train_here
from tokamake import plugins
from tokamake.checkpoint.convert import convert
from tokamake.checkpoint.detect import open_any
from tokamake.checkpoint.native import training_state
from tokamake.checkpoint.torch_files import dcp_metadata
from tokamake.config.optimization import OptimizerSettings
from tokamake.config.resolved_run import read_run
from tokamake.errors import UserError
from tokamake.preflight.initial_checkpoint import state_keys
from tokamake.report.describe_run import start_of
from tokamake.train.trials.benchmark_train import benchmark_train

Settings = dict[str, Any]


@pytest.fixture(scope="module")
def first(root: Path) -> Path:
    """Run of one process, with checkpoints at steps 2, 4 and 6; do not write here."""
    config = make_run(root, "first")
    train(config)
    return config


def step(config: Path, number: int) -> Path:
    return read_run(config).output / f"global_step{number}"


# Checkpoints that a run may start from.


def refused(root: Path, start: Path, **changes: Any) -> str:
    """Error message for an initial checkpoint; no run.yaml is written."""
    with pytest.raises(UserError) as error:
        make_run(root, "refused", start=start, **changes)
    assert not (root / "refused" / "run.yaml").exists()
    return str(error.value)


MISFITS: dict[str, Settings] = {
    "global_step4: is at step 4 already, and the run ends at step 4; raise train.train_steps, or "
    "set train.finetune to true to load only its weights": {"train_steps": 4},
    "global_step4: has consumed 32 samples in 4 steps, with train.global_batch_size and "
    "rampup_batch_size it would be 16; set these as they were, or": {"global_batch_size": 4},
    "global_step4: has optimizer states of adamw, not of lion; set train.optimizer.name to adamw, "
    "or set train.load_optimizer to false for a new": {"optimizer": {"name": "lion"}},
}


@pytest.mark.parametrize("expected", MISFITS)
def test_checkpoints_that_cannot_be_continued_are_refused(
    root: Path, first: Path, expected: str
) -> None:
    message = refused(root, step(first, 4), finetune=False, **MISFITS[expected])
    assert expected in message
    assert "\n" not in message


def test_states_of_another_optimizer_are_recognized_by_their_names(
    root: Path, first: Path, tmp_path: Path
) -> None:
    """A universal checkpoint of DeepSpeed itself does not name its optimizer."""
    convert(source=step(first, 4), target=tmp_path / "universal", format="universal")
    file = tmp_path / "universal/global_step4_universal/mp_rank_00_model_states.pt"
    state = torch.load(file, weights_only=False)
    assert state.pop("tokamake")["optimizer"] == "adamw"
    torch.save(state, file)
    convert(source=tmp_path / "universal", target=tmp_path / "a", format="native")
    for name, expected in (
        ("lion", r"lion does not use its optimizer\.exp_avg_sq\.\S+ and \d+ more"),
        ("muon", r"has no optimizer\.momentum_buffer\.\S+ and \d+ more, so its optimizer was not"),
    ):
        message = refused(root, tmp_path / "a", finetune=False, optimizer={"name": name})
        assert re.search(expected, message)
    run = read_run(make_run(root, "converted", start=tmp_path / "a", finetune=False))
    assert (run.step, run.consumed_samples) == (4, 32)


def test_a_universal_checkpoint_names_its_optimizer(
    root: Path, first: Path, tmp_path: Path
) -> None:
    convert(source=step(first, 4), target=tmp_path / "a", format="universal")
    text = refused(root, tmp_path / "a", finetune=False, optimizer={"name": "lion"})
    assert "has optimizer states of adamw, not of lion; set train.optimizer.name to adamw" in text


def test_a_checkpoint_without_optimizer_states_cannot_be_continued(root: Path) -> None:
    expected = "start/global_step0: has no optimizer states of adamw to continue with; set train.l"
    assert expected in refused(root, root / "start", finetune=False)


def test_a_trained_checkpoint_needs_the_setting_finetune(root: Path, first: Path) -> None:
    message = refused(root, read_run(first).output)
    assert "train.finetune: missing, but " in message
    assert "global_step6 is at step 6; add true" in message


def test_other_formats_must_be_converted_first(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf_folder.write(tmp_path / "hf", ARCHITECTURE, random_tensors(ARCHITECTURE, 5))
    message = refused(root, tmp_path / "hf", finetune=True)
    start = f"{tmp_path}/hf: is a checkpoint of Hugging Face, which training does not read; convert"
    assert message.startswith(start)
    command = re.search(r"`?(tokamake convert .*)$", message)
    assert command
    _, _, _, source, _, target, _, format = shlex.split(command[1])
    assert format == "native"
    convert(source=Path(source), target=Path(target), format="native")
    run = read_run(make_run(root, "converted-hf", start=Path(target), finetune=True))
    # A folder of one step: `latest` may name another one later.
    assert run.checkpoint == Path(target) / "global_step0"
    convert(source=root / "start", target=tmp_path / "mds", format="mds", tensor_parallel_size=2)
    message = refused(root, tmp_path / "mds", finetune=True)
    assert "is a checkpoint of Megatron-DeepSpeed, without pipeline, which training does" in message


def write_yaml(path: Path, **changes: Any) -> Path:
    value = ARCHITECTURE.model_dump(mode="json", exclude_defaults=True)
    path.write_text(yaml.safe_dump({**value, **changes}))
    return path


def test_another_architecture_is_reported_field_by_field(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_state, "fill", lambda *_, **__: pytest.fail("reads tensors"))
    path = write_yaml(tmp_path / "a.yaml", hidden_size=64, num_hidden_layers=3)
    first, *table = refused(root, root / "start", architecture=path).splitlines()
    assert "start/global_step0: does not match model.architecture;" in first
    assert table == [
        f"hidden_size: checkpoint 32, config 64 ({path})",
        f"num_hidden_layers: checkpoint 2, config 3 ({path})",
    ]
    for changes in ({}, {"vocab_size": None}, {"initializer_range": 0.5}):
        path = write_yaml(tmp_path / "a.yaml", **changes)
        run = read_run(make_run(root, "same-architecture", architecture=path))
        assert run.architecture == ARCHITECTURE


OPTIMIZERS: list[Any] = [
    *({"name": name} for name in plugins.names("optim") if name != "adamw_8bit"),
    {"name": "sgd", "momentum": 0.0},
    pytest.param({"name": "adamw_8bit"}, marks=LOW_BIT),
]


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_state_keys_match_the_states_of_each_optimizer(root: Path, optimizer: Settings) -> None:
    changes = {"optimizer": optimizer, "train_steps": 2, "schedule": {"name": "constant"}}
    config = make_run(root, f"states-{len(optimizer)}-{optimizer['name']}", **changes)
    assert train_here(config) == 0
    saved = {key for key in dcp_metadata.read(step(config, 2)) if key.startswith("optimizer.")}
    assert state_keys(ARCHITECTURE, OptimizerSettings(**optimizer)) == saved
    assert bool(saved) == (optimizer.get("momentum") != 0.0)


# Runs that continue.


def assert_continued(config: Path, whole: Path, *, rel: float = 0.0) -> None:
    """Compare steps 3 to 6, and the weights at the end."""
    for key, count in (("loss", 2), ("grad_norm", 2), ("validation_loss", 1)):
        expected = losses(whole, key)[count:]
        assert expected
        assert losses(config, key) == (pytest.approx(expected, rel=rel) if rel else expected)
    if not rel:
        assert hashes(config) == hashes(whole)


def report_text(config: Path) -> str:
    """Start of a run in the report."""
    return dict(start_of(read_run(config)))["start"]


WAYS: dict[str, Settings] = {
    "native": {"zero_stage": 3},
    "deepspeed": {"backend": "deepspeed", "zero_stage": 2},
}
LAYOUTS: list[Settings] = [
    {"parallel": {"tensor_parallel_size": 2}},
    {"zero_stage": 3},
    {"backend": "deepspeed", "zero_stage": 1},
]


@pytest.fixture(scope="module")
def whole_run(root: Path) -> Callable[[str], Path]:
    """A finished run of two ranks, for each of `WAYS`; do not write here."""

    @cache
    def trained(way: str) -> Path:
        config = make_run(root, f"whole-{way}", **WAYS[way])
        train(config, ranks=2)
        return config

    return trained


@pytest.mark.ranks
@pytest.mark.parametrize("way", params(WAYS, ["native"]))
def test_a_run_continues_another_bit_by_bit_even_after_a_kill(
    root: Path, whole_run: Callable[[str], Path], way: str
) -> None:
    whole = whole_run(way)
    changes = {"finetune": False, "save_interval": 1, **WAYS[way]}
    config = make_run(root, f"continued-{way}", start=step(whole, 2), **changes)
    printed = train(config, ranks=2, fault=killed_in_backward, code=-9)
    expected = f"start     {step(whole, 2)}, continued at step 2: weights, optimizer states, loss"
    assert expected in printed
    assert not step(config, 6).exists()
    printed = train(config, ranks=2)
    assert re.search(r"start .*/training/global_step[345], where this run continues", printed)
    assert_continued(config, whole)
    assert f"{step(whole, 2)}, continued at step 2" in report_text(config)
    continued, uninterrupted = summary(config), summary(whole)
    assert continued["consumed_samples"] == uninterrupted["consumed_samples"] == 48
    assert continued["tokens_per_second"] == pytest.approx(4 * 8 * 16 / continued["seconds"])


@pytest.mark.grid
@pytest.mark.ranks
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_other_layouts_continue_a_run(root: Path, first: Path, layout: Settings) -> None:
    name = f"continued-{LAYOUTS.index(layout)}"
    config = make_run(root, name, start=step(first, 2), finetune=False, **layout)
    train(config, ranks=2)
    assert_continued(config, first, rel=1e-5)


@pytest.mark.ranks
def test_one_rank_continues_a_run_of_two_ranks(
    root: Path, whole_run: Callable[[str], Path], tmp_path: Path
) -> None:
    whole = whole_run("native")
    # Through a conversion, which must not change anything.
    convert(source=step(whole, 2), target=tmp_path / "a", format="native")
    config = make_run(root, "continued-by-one", start=tmp_path / "a", finetune=False)
    train(config)
    assert_continued(config, whole, rel=1e-5)


def test_a_run_continues_at_its_step_with_a_new_optimizer(root: Path, first: Path) -> None:
    changes = {"start": step(first, 4), "finetune": False, "load_optimizer": False}
    config = make_run(root, "new-optimizer", **changes)
    printed = train(config)
    assert "continued at step 4: weights with a new optimizer, 32 samples" in printed
    # It begins with the same weights and samples, and then takes other steps.
    assert losses(config)[0] == losses(first)[4]
    assert losses(config)[1] != losses(first)[5]
    source = open_any(step(config, 6)).source
    counts = {source.read(key).item() for key in source if key.startswith("optimizer.step.")}
    assert counts == {2}
    assert f"{step(first, 4)}, continued at step 4 with a new optimizer" in report_text(config)
    other = make_run(root, "other-optimizer", optimizer={"name": "lion"}, **changes)
    assert train_here(other) == 0


def test_a_finetune_run_starts_at_step_0_and_resumes_after_a_kill(root: Path, first: Path) -> None:
    runs = [make_run(root, name, start=step(first, 4), finetune=True) for name in ("a", "b")]
    printed = train(runs[0])
    assert f"start     {step(first, 4)}, finetuned: weights alone, at step 0" in printed
    train(runs[1], fault=killed_in_backward, code=-9)
    assert "continuing at step 2" in train(runs[1])
    assert losses(runs[1]) == losses(runs[0])
    assert hashes(runs[1]) == hashes(runs[0])
    assert len(losses(runs[0])) == 6
    # The optimizer is new, other than at step 4.
    assert losses(runs[0])[0] != losses(first)[4]
    assert losses(runs[0], "validation_loss")[0] != losses(first, "validation_loss")[0]


def test_continued_and_finetuned_runs_differ(root: Path, first: Path) -> None:
    config = make_run(root, "both", start=step(first, 4), finetune=True, train_steps=6)
    train(config)
    continued = {"start": step(first, 4), "finetune": False, "train_steps": 6}
    make_run(root, "both", **continued, on_change="restart")
    printed = train(config)
    assert "train.finetune True -> False" in printed
    assert losses(config) == losses(first)[4:]


def test_an_initial_checkpoint_that_has_changed_is_refused(root: Path, first: Path) -> None:
    config = make_run(root, "moved", start=step(first, 2), finetune=False)
    text = config.read_text()
    config.write_text(text.replace("global_step2", "global_step4"))
    message = train(config, code=2)
    assert "global_step4: is not at the step or of the architecture that the run was" in message
    config.write_text(text.replace(str(step(first, 2)), str(root / "start")))
    assert "has no optimizer states of adamw to continue with" in train(config, code=2)


def test_trials_take_weights_without_optimizer_states(
    root: Path, first: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_run(root, "tried", start=step(first, 2), finetune=False)
    benchmark_train(config=config, steps=1, warmup_steps=0)
    assert f"{step(first, 2)}, finetuned: weights alone, at step 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("way", "title"),
    [
        pytest.param({"format": "universal"}, "DeepSpeed universal", marks=pytest.mark.grid),
        pytest.param(
            {"format": "mds", "tensor_parallel_size": 2, "data_parallel_size": 3, "zero_stage": 2},
            "Megatron-DeepSpeed, without pipeline",
            marks=pytest.mark.grid,
        ),
        (
            {"format": "megatron", "tensor_parallel_size": 2, "pipeline_parallel_size": 2},
            "Megatron-LM, classic",
        ),
    ],
)
def test_a_run_continues_after_conversion_through_megatron_formats(
    way: Settings, title: str, root: Path, first: Path, tmp_path: Path
) -> None:
    """Equal losses show that step, samples, schedule and optimizer states were converted."""
    begin = read_run(make_run(root, "begin", start=step(first, 2), finetune=False))
    convert(source=step(first, 2), target=tmp_path / "a", **way)
    message = refused(root, tmp_path / "a", finetune=False)
    assert f"is a checkpoint of {title}, which training does not read; convert" in message
    convert(source=tmp_path / "a", target=tmp_path / "b", format="native")
    config = make_run(root, f"continued-{way['format']}", start=tmp_path / "b", finetune=False)
    run = read_run(config)
    assert (run.step, run.consumed_samples) == (begin.step, begin.consumed_samples) == (2, 16)
    train(config)
    assert losses(config) == losses(first)[2:]
    assert hashes(config) == hashes(first)
