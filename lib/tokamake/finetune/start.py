"""Where a run that finetunes begins: its rows, its digest, and the checkpoint to resume from."""

from collections.abc import Callable
from typing import Any

from tokamake import files
from tokamake.checkpoint.native.resume_state import ResumeState
from tokamake.config.resolved_run import Run
from tokamake.finetune.finetune_run import FinetuneRun
from tokamake.preflight.finetune import (
    SETTINGS_RECORD,
    changed_settings,
    decide_changed,
    finetune_settings,
)
from tokamake.runtime.ranks import Ranks
from tokamake.train.checkpoints.resume import ResumePoint, prepare_output
from tokamake.train.objectives._epochs import TaskData, read_task_data


def read_data(run: FinetuneRun, *, say: Callable[[str], None] = print) -> TaskData:
    """Read and tokenize the rows of a run."""
    return read_task_data(
        run.finetune, run.tokenizer, sequence_length=run.train.sequence_length, say=say
    )


def effective_settings(run: FinetuneRun, data: TaskData, *, weights: str) -> dict[str, Any]:
    """All that decides the weights of a run, and which epoch is the best."""
    return finetune_settings(
        run.train,
        run.finetune,
        seed=run.seed,
        weights=weights,
        train_rows=data.train.digest,
        validation_rows=data.validation.digest,
        architecture=run.architecture.model_dump(mode="json"),
    )


def finetune_resume_point(
    weights: str, run: FinetuneRun, *, resolved: Run, data: TaskData, ranks: Ranks
) -> ResumePoint:
    """Prepare the output folder of a run with these first weights, and find where it begins."""
    settings = effective_settings(run, data, weights=weights)
    digest = files.digest(settings)

    def decide(_: ResumeState) -> tuple[str, None]:
        changed = changed_settings(run.output, settings) or "another digest of its settings"
        return decide_changed(run.output, changed, on_change=resolved.train.on_change), None

    state = prepare_output(run.output, digest, say=ranks.print_once, decide=decide)
    files.write_json(run.output / SETTINGS_RECORD, settings)
    if state:
        return ResumePoint(state, run.output / f"global_step{state.step}")
    return ResumePoint(ResumeState(digest, 0, 0, 0.0, ranks.world_size), None)
