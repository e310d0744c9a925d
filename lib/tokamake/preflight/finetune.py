"""Checks of a run that finetunes: settings, files, model, tokenizer, changes. Reads no tensor."""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokamake import files, plugins
from tokamake.checkpoint.native.resume_state import newest_state
from tokamake.config.architecture import Architecture
from tokamake.config.data_set import RUN
from tokamake.config.fields import dotted
from tokamake.config.finetune import (
    FOLDER,
    TRAIN_SETTINGS,
    FinetuneSettings,
    FinetuneTask,
    check_train_settings,
)
from tokamake.config.objective import objective_data
from tokamake.config.runs import NamedRun
from tokamake.config.train_fields import OnChange
from tokamake.config.training import TrainSettings
from tokamake.data.corpus.raw_files import expand
from tokamake.errors import UserError, naming
from tokamake.preflight.changes import compare_settings
from tokamake.preflight.initial_models import InitialModel, initial_model, parents_first
from tokamake.preflight.model import check_layout_and_length
from tokamake.preflight.planned import WorkflowConfig
from tokamake.preflight.run_record import WITHOUT_EFFECT
from tokamake.preflight.tokenizer import check_embeddings

SETTINGS_RECORD = "settings.json"
"""File in the output folder: the settings that decide the run's weights."""


def finetuned_architecture(pretrained: Architecture, task: FinetuneTask) -> Architecture:
    """Shape of a model that learns a task."""
    data = objective_data(task.objective)
    architecture: Architecture = data.finetuned_architecture(pretrained, task)
    return architecture


def check_settings(train: TrainSettings) -> None:
    """Check that settings of `train` fit finetuning."""
    try:
        check_train_settings(train)
    except ValueError as error:
        raise UserError(str(error)) from None


def check_files(finetune: FinetuneSettings) -> list[Path]:
    """Return the files of a task, in the order of the settings."""
    paths = []
    for setting, named in files_of(finetune):
        with naming(f"finetune.{setting}"):
            paths += expand([*named])
    return paths


def check_rows(task: FinetuneTask, paths: list[Path]) -> None:
    """Refuse broken rows of a task that can check them in a short time."""
    check = getattr(plugins.load(FOLDER, task.name), "check", None)
    if check is not None:
        check(paths)


def files_of(finetune: FinetuneSettings) -> Iterable[tuple[str, tuple[str, ...]]]:
    """Settings that name files, with their values."""
    yield "train_files", finetune.train_files
    yield "validation_files", finetune.validation_files
    for name, named in finetune.test_files.items():
        yield f"test_files.{name}", named


def check_model(
    train: TrainSettings, architecture: Architecture, *, tokenizer: Path | None, source: str
) -> None:
    """Check layout, length of rows and vocabulary against the model.

    Args:
        tokenizer: None: it is not known yet.
        source: where the model is from, for messages.
    """
    check_layout_and_length(train, architecture, source=source)
    if tokenizer is not None and architecture.vocab_size is not None:
        check_embeddings(tokenizer, architecture)


def check_finetuned(
    runs: Mapping[str, NamedRun], models: Mapping[str, InitialModel]
) -> dict[str, list[Path]]:
    """Check files and models of the runs that finetune, before any job runs.

    Returns:
        Files of each run, by the origin of its config.
    """
    known, found = dict(models), dict[str, list[Path]]()
    for name in parents_first(runs):
        run, where = runs[name]
        if run.finetune is None:
            continue
        with naming(where):
            found[where] = check_files(run.finetune)
            check_rows(run.finetune.task, found[where])
            initial = known[run.model.parent] if run.model.parent else initial_model(run)
            architecture = finetuned_architecture(initial.architecture, run.finetune.task)
            check_model(
                run.train, architecture, tokenizer=run.tokenizer.path, source=initial.source
            )
        known[name] = initial
    return found


# ---- Changes since a checkpoint ----


def finetune_settings(
    train: TrainSettings, finetune: FinetuneSettings, *, seed: int, **of_job: Any
) -> dict[str, Any]:
    """All that decides the weights of a run, and which epoch is the best.

    Args:
        of_job: facts that only a job knows: weights, rows, architecture.
    """
    return {
        "seed": seed,
        **of_job,
        "task": finetune.task.model_dump(mode="json"),
        "epochs": finetune.epochs,
        "train": train.model_dump(mode="json", include={*TRAIN_SETTINGS} - WITHOUT_EFFECT),
    }


def changed_settings(output: Path, settings: dict[str, Any]) -> str:
    """Changes of a run since its checkpoints, in words; empty: there are none.

    Args:
        settings: `finetune_settings`; a dry run compares settings without the facts of a job.
    """
    record = output / SETTINGS_RECORD
    if not record.is_file():
        return "its settings are not known"
    known = files.read_json(record, "remove it")
    earlier = {key: value for key, value in known.items() if key in settings}
    return str(compare_settings(dotted(earlier), dotted(settings)))


def decide_changed(output: Path, changed: str, *, on_change: OnChange) -> str:
    """Say what happens to a run with checkpoints of other settings, or refuse it."""
    if on_change == "restart":
        return f"starts again, because of {changed}"
    raise UserError(
        f"{output}: has checkpoints of another run: {changed}. Give the run another name, "
        "undo the changes, or set train.on_change to restart, which moves the checkpoints aside"
    )


def check_finetune_changes(config: WorkflowConfig, name: str) -> None:
    """Say what happens to a run that has a checkpoint and other settings since."""
    run, output = config.finetuned[name], Path(RUN.format(run=name)) / "training"
    state, _ = newest_state(output)
    if state is None or not (output / SETTINGS_RECORD).is_file():
        return  # the job decides
    assert run.finetune is not None
    settings = finetune_settings(run.train, run.finetune, seed=run.seed)
    if changed := changed_settings(output, settings):
        text = decide_changed(output, changed, on_change=run.train.on_change)
        print(f"tokamake: run {name}: {text}", file=sys.stderr)
