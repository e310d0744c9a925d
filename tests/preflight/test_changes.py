"""Runs whose settings or data change: refused, continued or started again, and nothing is lost."""

import shutil
from pathlib import Path

import pytest

from tests.support.forked import killed_in_backward, train
from tests.support.grids import params
from tests.support.interrupted_runs import (
    CONTINUE,
    LOWER,
    Settings,
    output,
    stop_at,
    stopped,
)
from tests.support.random_tensors import random_tensors
from tests.support.runs import (
    ARCHITECTURE,
    hashes,
    losses,
    make_run,
    records,
    summary,
    train_here,
    write_start,
)
from tokamake import files
from tokamake.config.resolved_run import read_run
from tokamake.errors import UserError
from tokamake.preflight import changes


def content(folder: Path) -> dict[Path, str]:
    return {path: files.sha256(path) for path in folder.rglob("*") if path.is_file()}


def test_a_changed_run_is_refused_and_keeps_everything(root: Path) -> None:
    config = stopped(root, "refused")
    before = content(output(config))
    make_run(root, "refused", **LOWER, gradient_clipping=1.0)
    message = train(config, code=2).splitlines()[-1]
    assert message == (
        "tokamake train: train.optimizer.learning_rate 0.01 -> 0.002, "
        f"train.gradient_clipping 0.5 -> 1.0; 4 steps are trained in {output(config)}. "
        "train.on_change is refuse: set it to 'continue' (keeps them) or to 'restart' (starts at "
        "step 0), undo the change, or give the run another name"
    )
    assert content(output(config)) == before
    make_run(root, "refused")
    assert "continuing at step 4" in train(config)


def test_a_run_restarts_if_the_user_says_so(root: Path) -> None:
    config = stopped(root, "restarted")
    make_run(root, "restarted", **LOWER, on_change="restart")
    printed = train(config)
    (aside,) = config.parent.glob("training.*")
    assert (
        "train.optimizer.learning_rate 0.01 -> 0.002; 4 steps are trained. train.on_cha" in printed
    )
    assert f"moved to {aside}" in printed
    assert (aside / "global_step4").is_dir()
    assert [record["step"] for record in records(config) if "loss" in record] == [*range(1, 7)]


def test_a_run_that_has_not_changed_resumes_in_the_same_way(root: Path) -> None:
    plain, continued = stopped(root, "plain"), stopped(root, "continued")
    make_run(root, "continued", **CONTINUE)
    assert "train.on_change is" not in train(continued)
    train(plain)
    assert hashes(continued) == hashes(plain)
    assert summary(continued)["digest"] == summary(plain)["digest"]


CHANGES: dict[str, Settings] = {
    "learning rate": LOWER,
    "hyperparameters": {"optimizer": {"learning_rate": 0.01, "beta1": 0.5, "weight_decay": 0.3}},
    "schedule": {"schedule": {"name": "linear", "warmup_steps": 1, "min_ratio": 0.5}},
    "clipping": {"gradient_clipping": 0.1},
    "length": {"train_steps": 8},
    "precision": {"precision": "bf16"},
    "packing": {"drop_last_partial_sequence": True, "gradient_clipping": 0.0},
}
LAYOUTS: dict[str, tuple[int, Settings]] = {
    "one rank": (1, {}),
    "two ranks": (2, {"zero_stage": 3}),
    "deepspeed": (2, {"backend": "deepspeed", "zero_stage": 2}),
}


QUICK = ("learning rate", "precision")
CASES = [
    *((change, "one rank") for change in QUICK),
    pytest.param("learning rate", "two ranks", marks=pytest.mark.grid),
    *(
        pytest.param(change, "one rank", marks=pytest.mark.grid)
        for change in CHANGES
        if change not in QUICK
    ),
    pytest.param("learning rate", "deepspeed", marks=pytest.mark.grid),
]


@pytest.mark.ranks
@pytest.mark.parametrize(("change", "layout"), CASES)
def test_a_continued_run_is_one_that_starts_from_the_checkpoint(
    root: Path, change: str, layout: str
) -> None:
    """`finetune: false` is another way to the same steps: a new run from the checkpoint."""
    ranks, settings = LAYOUTS[layout]
    name = f"{change}-{layout}".replace(" ", "-")
    config = stopped(root, name, ranks=ranks, **settings)
    before = losses(config)
    changed = {**settings, **CHANGES[change]}
    start = output(config) / "global_step4"
    by_hand = make_run(root, f"{name}-by-hand", start=start, finetune=False, **changed)
    train(by_hand, ranks=ranks)
    make_run(root, name, **changed, **CONTINUE)
    printed = train(config, ranks=ranks)
    assert "train.on_change is continue: training continues at step 4 with the change" in printed
    last = changed.get("train_steps", 6)
    assert hashes(config, last) == hashes(by_hand, last)
    assert losses(config)[4:] == losses(by_hand)
    assert losses(config)[:4] == before[:4]
    if change != "precision":
        # The weights and samples of the step after the change are those of the run before.
        assert losses(config)[4] == before[4]
    assert losses(config, "learning_rate")[4:] == losses(by_hand, "learning_rate")


def test_the_checkpoint_names_the_change_and_later_jobs_resume(root: Path) -> None:
    config = stopped(root, "lineage")
    first = files.read_json(output(config) / "global_step4/state.json", "")
    make_run(root, "lineage", **LOWER, **CONTINUE, save_interval=1)
    train(config)
    stop_at(config, 5)
    make_run(root, "lineage", **LOWER, save_interval=1)  # the default again
    printed = train(config)
    assert "continuing at step 5" in printed
    assert "train.on_change" not in printed
    state = files.read_json(output(config) / "global_step6/state.json", "")
    assert state["digest"] == summary(config)["digest"] != first["digest"]
    assert state["lineage"] == [
        {
            "step": 4,
            "consumed_samples": 32,
            "digest": first["digest"],
            "changed": ["train.optimizer.learning_rate 0.01 -> 0.002"],
        }
    ]
    assert read_run(output(config) / "global_step6/run.yaml").train.optimizer.learning_rate == 0.002
    assert [record["step"] for record in records(config) if "loss" in record] == [*range(1, 7)]


def test_a_finished_run_goes_on_with_more_steps(root: Path) -> None:
    config = make_run(root, "longer")
    train(config)
    before = losses(config)
    make_run(root, "longer", train_steps=8)
    message = train(config, code=2)
    assert "train.train_steps 6 -> 8; 6 steps are trained" in message
    make_run(root, "longer", train_steps=8, **CONTINUE)
    train(config)
    assert losses(config)[:6] == before
    assert summary(config)["step"] == 8


# Batch sizes: the run keeps its length in samples.


@pytest.mark.parametrize(
    ("size", "train_steps", "steps"),
    [
        # 48 samples, 32 of them consumed: 4 steps of 4
        pytest.param(4, 12, 8, marks=pytest.mark.grid),
        (16, 5, 7),  # 80 samples: 3 steps of 16
        pytest.param(8, 8, 8, marks=pytest.mark.grid),
    ],
)
def test_a_changed_batch_size_divides_the_samples_that_are_left(
    root: Path, size: int, train_steps: int, steps: int
) -> None:
    config = stopped(root, f"batch-{size}")
    settings = {"global_batch_size": size, "train_steps": train_steps, "save_interval": 1}
    make_run(root, f"batch-{size}", **settings, **CONTINUE)
    train(config, fault=killed_in_backward, code=-9)
    printed = train(config)
    assert f"step {steps}/{steps} | loss" in printed
    consumed = [32 + size * number for number in range(1, steps - 3)]
    trained = [record for record in records(config) if "loss" in record][4:]
    assert [record["consumed_samples"] for record in trained] == consumed
    assert summary(config)["step"] == steps
    # Another change, later on, leaves the same number of steps.
    stop_at(config, steps - 1)
    make_run(root, f"batch-{size}", **settings, **LOWER, **CONTINUE)
    assert f"step {steps}/{steps} | loss" in train(config)
    assert summary(config)["consumed_samples"] == consumed[-1]
    state = files.read_json(output(config) / f"global_step{steps}/state.json", "")
    assert [change["step"] for change in state["lineage"]] == [4, steps - 1]


# Changes that a run cannot continue with.

FIXED: dict[str, tuple[Settings, str]] = {
    "optimizer": (
        {"optimizer": {"name": "lion"}},
        "train.optimizer.name: an optimizer cannot use the states of another one",
    ),
    "length": (
        {"train_steps": 3},
        "train.train_steps: no step is left after step 4; raise it",
    ),
    "batch": (
        {"global_batch_size": 4},
        "train.train_steps: no step is left after step 4; raise it",
    ),
}


@pytest.mark.parametrize("change", FIXED)
def test_what_is_not_defined_is_refused_with_the_reason(root: Path, change: str) -> None:
    settings, reason = FIXED[change]
    config = stopped(root, f"fixed-{change}")
    before = content(output(config))
    make_run(root, f"fixed-{change}", **settings, **CONTINUE)
    message = train(config, code=2).splitlines()[-1]
    assert f"but the run cannot continue ({reason}): set train.on_change to 'restart'" in message
    assert content(output(config)) == before


def test_another_initial_checkpoint_and_seed_are_refused(root: Path, tmp_path: Path) -> None:
    config = stopped(root, "fixed-start")
    write_start(tmp_path / "other", ARCHITECTURE, random_tensors(ARCHITECTURE, 6))
    make_run(root, "fixed-start", start=tmp_path / "other", **CONTINUE)
    message = train(config, code=2)
    assert "the initial checkpoint; 4 steps are trained" in message
    assert "the run cannot continue (the run starts from another checkpoint)" in message
    make_run(root, "fixed-start", **CONTINUE)
    config.write_text(config.read_text().replace("seed: 11", "seed: 12"))
    assert "seed 11 -> 12" in (message := train(config, code=2))
    assert "(seed: the order of samples follows from it)" in message


@pytest.mark.parametrize(
    "damaged",
    [None, *(pytest.param(text, marks=pytest.mark.grid) for text in ("{}", "[1, 2", "\0"))],
)
def test_a_run_without_a_record_of_its_data_continues_after_it_was_resumed_once(
    root: Path, damaged: str | None
) -> None:
    name = f"no-record-{len(damaged or '')}"
    config = stopped(root, name)
    (path,) = (output(config) / "inputs").iterdir()
    shutil.rmtree(path.parent) if damaged is None else path.write_text(damaged)
    make_run(root, name, **LOWER, **CONTINUE)
    with pytest.raises(UserError, match=f"{path} is lost, damaged, .*; train once with"):
        train_here(config)
    make_run(root, name)
    train_here(config)
    make_run(root, name, **LOWER, **CONTINUE, train_steps=7)
    train_here(config)
    assert summary(config)["step"] == 7


@pytest.mark.parametrize("damaged", params([None, "{}", "\0"], ["\0"]))
def test_the_settings_of_a_run_are_also_those_of_its_checkpoint_before(
    root: Path, damaged: str | None
) -> None:
    config = stopped(root, f"no-run-yaml-{len(damaged or '')}")
    path = output(config) / "global_step4/run.yaml"
    path.unlink() if damaged is None else path.write_text(damaged)
    make_run(root, config.parent.name, **LOWER, **CONTINUE)
    train_here(config)
    assert summary(config)["step"] == 6


def test_checkpoints_of_another_program_are_refused(root: Path) -> None:
    config = make_run(root, "foreign")
    (output(config) / "global_step9").mkdir(parents=True)
    (output(config) / "latest").write_text("global_step9")
    for settings in ({}, CONTINUE):
        make_run(root, "foreign", **settings)
        assert "settings (the checkpoint states none)" in train(config, code=2)
    make_run(root, "foreign", on_change="restart")
    train(config)
    assert (config.with_name("training.unknown") / "global_step9").is_dir()


# Jobs of a chain, damaged checkpoints, and the note of the workflow.


@pytest.mark.grid
@pytest.mark.usefixtures("lone_rank")
def test_a_chain_of_jobs_continues_after_a_change(root: Path) -> None:
    whole = stopped(root, "chain-whole")
    make_run(root, "chain-whole", **LOWER, **CONTINUE)
    train(whole)
    config = make_run(root, "chain", save_interval=1)
    for until_step in (3, 4):
        assert train_here(config, until_step=until_step) == 0
    first = config.with_name("train.3.json")
    before = first.read_bytes()
    make_run(root, "chain", **LOWER, **CONTINUE, save_interval=1)
    assert train_here(config, until_step=5) == 0
    # Snakemake repeats the job of an earlier segment, since run.yaml is new.
    first.unlink()
    assert train_here(config, until_step=3) == 0
    assert first.read_bytes() == before
    assert train_here(config) == 0
    assert hashes(config) == hashes(whole)


@pytest.mark.grid
def test_a_damaged_checkpoint_after_a_change_goes_back_before_it(root: Path) -> None:
    whole = stopped(root, "damaged-whole")
    make_run(root, "damaged-whole", **LOWER, **CONTINUE)
    train(whole)
    config = stopped(root, "damaged")
    make_run(root, "damaged", **LOWER, **CONTINUE)
    train(config)
    largest = max(
        (output(config) / "global_step6").glob("*.distcp"), key=lambda p: p.stat().st_size
    )
    largest.write_bytes(largest.read_bytes()[:-100])
    config.with_name("train.json").unlink()
    make_run(root, "damaged", **LOWER, train_steps=7, **CONTINUE)
    make_run(root, "damaged-whole", **LOWER, train_steps=7, **CONTINUE)
    stop_at(whole, 4)
    train(whole)
    assert f"going back to {output(config) / 'global_step4'}" in train(config)
    assert hashes(config, 7) == hashes(whole, 7)
    lineage = files.read_json(output(config) / "global_step7/state.json", "")["lineage"]
    assert [change["step"] for change in lineage] == [4, 4]


def test_the_note_of_the_workflow_decides(root: Path) -> None:
    config = stopped(root, "noted")
    make_run(root, "noted", **LOWER)
    config.with_name("on_change").write_text("continue")
    train(config)
    assert summary(config)["step"] == 6
    config.with_name("on_change").write_text("perhaps")
    with pytest.raises(UserError, match="on_change"):
        changes.read_decision(config, read_run(config))
