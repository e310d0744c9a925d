"""Where a run that finetunes begins: its rows, its digest, and the checkpoint to resume from."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokamake import files
from tokamake.checkpoint.native.resume_state import ResumeState
from tokamake.config.fields import dotted
from tokamake.config.finetune import TRAIN_SETTINGS
from tokamake.config.resolved_run import Run
from tokamake.errors import UserError
from tokamake.finetune.finetune_run import FinetuneRun
from tokamake.preflight.changes import compare_settings
from tokamake.preflight.run_record import WITHOUT_EFFECT
from tokamake.runtime.ranks import Ranks
from tokamake.train.checkpoints.resume import ResumePoint, prepare_output
from tokamake.train.objectives._base import objective_class
from tokamake.train.objectives.classification.epochs import TaskData

_RECORD = "settings.json"
"""File in the output folder: what decides the run's weights."""


def read_data(run: FinetuneRun, *, say: Callable[[str], None] = print) -> TaskData:
    """Read and tokenize the rows of a run."""
    objective = objective_class(run.finetune.task.objective)
    data: TaskData = objective.read_data(
        run.finetune, run.tokenizer, sequence_length=run.train.sequence_length, say=say
    )
    return data


def effective_settings(run: FinetuneRun, data: TaskData, *, weights: str) -> dict[str, Any]:
    """All that decides the weights of a run, and which epoch is the best."""
    return {
        "seed": run.seed,
        "weights": weights,
        "train_rows": data.train.digest,
        "validation_rows": data.validation.digest,
        "architecture": run.architecture.model_dump(mode="json"),
        "task": run.finetune.task.model_dump(mode="json"),
        "epochs": run.finetune.epochs,
        "train": run.train.model_dump(mode="json", include={*TRAIN_SETTINGS} - WITHOUT_EFFECT),
    }


def starting_point(
    weights: str, run: FinetuneRun, *, resolved: Run, data: TaskData, ranks: Ranks
) -> ResumePoint:
    """Prepare the output folder of a run with these first weights, and find where it begins."""
    settings = effective_settings(run, data, weights=weights)
    digest, record = files.digest(settings), run.output / _RECORD

    def decide(_: ResumeState) -> tuple[str, None]:
        changed = _changes(record, settings)
        if resolved.train.on_change == "restart":
            return f"starts again, because of {changed}", None
        raise UserError(
            f"{run.output}: has checkpoints of another run: {changed}. Give the run another name, "
            "undo the changes, or set train.on_change to restart, which moves the checkpoints aside"
        )

    state = prepare_output(run.output, digest, say=ranks.print_once, decide=decide)
    files.write_json(record, settings)
    if state:
        return ResumePoint(state, run.output / f"global_step{state.step}")
    return ResumePoint(ResumeState(digest, 0, 0, 0.0, ranks.world_size), None)


def _changes(record: Path, settings: dict[str, Any]) -> str:
    """Changes since the settings of a record, in words."""
    if not record.is_file():
        return "its settings are not known"
    return str(compare_settings(dotted(files.read_json(record, "remove it")), dotted(settings)))
