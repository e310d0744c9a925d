"""Checks of a run that finetunes: settings, files, model and tokenizer. No tensor is read."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from tokamake import plugins
from tokamake.config.architecture import Architecture
from tokamake.config.finetune import FinetuneSettings, FinetuneTask, check_train_settings
from tokamake.config.runs import NamedRun
from tokamake.config.training import TrainSettings
from tokamake.data.corpus.raw_files import expand
from tokamake.errors import UserError
from tokamake.preflight.initial_models import InitialModel, initial_model, parents_first
from tokamake.preflight.model import FAMILIES, check_layout_and_length
from tokamake.preflight.tokenizer import check_embeddings


def finetuned_architecture(pretrained: Architecture, task: FinetuneTask) -> Architecture:
    """Shape of a model with the head of a task."""
    if "task_head" not in (pretrained.model_extra or {}):
        families = [
            name
            for name in plugins.names(FAMILIES)
            if "task_head" in plugins.constant(FAMILIES, name, "SETTINGS")
        ]
        raise UserError(
            f"finetune.task: {task.name}: family {pretrained.family} has no head for tasks, only "
            f"{', '.join(families)}; start from such a model"
        )
    values = {**pretrained.model_dump(), "sentence_order_head": False}
    return Architecture.model_validate({**values, **task.architecture_fields})


def check_settings(train: TrainSettings) -> None:
    """Check that settings of `train` fit finetuning."""
    try:
        check_train_settings(train)
    except ValueError as error:
        raise UserError(str(error)) from None


def check_files(finetune: FinetuneSettings) -> list[Path]:
    """Return the files of a task, in the order of the settings."""
    paths = []
    for setting, files in files_of(finetune):
        try:
            paths += expand([*files])
        except UserError as error:
            raise UserError(f"finetune.{setting}: {error}") from None
    return paths


def files_of(finetune: FinetuneSettings) -> Iterable[tuple[str, tuple[str, ...]]]:
    """Settings that name files, with their values."""
    yield "train_files", finetune.train_files
    yield "validation_files", finetune.validation_files
    for name, files in finetune.test_files.items():
        yield f"test_files.{name}", files


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
        try:
            found[where] = check_files(run.finetune)
            initial = known[run.model.parent] if run.model.parent else initial_model(run)
            architecture = finetuned_architecture(initial.architecture, run.finetune.task)
            check_model(
                run.train, architecture, tokenizer=run.tokenizer.path, source=initial.source
            )
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
        known[name] = initial
    return found
