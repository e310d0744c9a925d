"""The stage `evaluate-finetuned`: score a finetuned model on labeled files, or predict labels."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from tokamake.checkpoint.tensors.checkpoint import Checkpoint
    from tokamake.config.finetune import FinetuneTask
    from tokamake.train.objectives._tasks import Forward, TaskObjective


def evaluate_finetuned(
    task: str,
    /,
    *,
    checkpoint: Path,
    data: list[str],
    tokenizer: Path | None = None,
    settings: str = "{}",
    sequence_length: int = 128,
    batch_size: int = 32,
    output: Path | None = None,
    predictions: Path | None = None,
) -> None:
    """Score a model that `finetune` made on labeled files, or predict labels of other files.

    People type it as `tokamake evaluate --task NAME`. Nothing is trained. Ranks share the rows,
    each row counts once, and scores do not depend on the number of ranks. Each rank has the whole
    model.

    Args:
        task: name of the task, a file in finetune/tasks.
        checkpoint: folder of the finetuned model in any format.
        data: files to score, as NAME=FILES: the name of a test set, and a file, folder or pattern;
            several with the same name are one test set.
        tokenizer: tokenizer of the model; by default, the tokenizer beside its weights, or the
            tokenizer that the run.yaml of the checkpoint names.
        settings: JSON of the task's own settings, such as labels.
        sequence_length: most tokens of a row; longer ones are cut.
        batch_size: rows per forward pass of a rank. It changes memory and time, not the scores.
        output: JSON file to write, with the scores of each test set.
        predictions: folder to write, with NAME.jsonl of each test set: the prediction of each row.
    """
    from tokamake.checkpoint.detect import open_any
    from tokamake.checkpoint.load_model import stated_tokenizer
    from tokamake.files import write_json
    from tokamake.finetune.predictions import score_sets
    from tokamake.runtime.process_group import joined
    from tokamake.runtime.rank_errors import leave, raise_on_all_ranks
    from tokamake.runtime.ranks import Ranks
    from tokamake.train.objectives._tasks import task_objective

    ranks = Ranks.find()
    with joined(ranks) as device:
        with raise_on_all_ranks():
            task_settings = _task(task, settings)
            opened = open_any(checkpoint)
            _check(opened, task_settings, batch_size=batch_size, sequence_length=sequence_length)
            objective = task_objective(task_settings.objective)
            path = tokenizer or stated_tokenizer(opened)
            sets = {
                name: objective.read_rows(
                    files, task_settings, tokenizer=path, sequence_length=sequence_length
                )
                for name, files in _sets(data).items()
            }
            forward = _forward(
                opened, objective, device=device, ranks=(ranks.rank, ranks.world_size)
            )
        scores = score_sets(forward, sets, task=task_settings, size=batch_size, folder=predictions)
        with raise_on_all_ranks():
            if ranks.rank == 0 and output:
                write_json(output, {"task": task, "checkpoint": str(checkpoint), "scores": scores})
    leave(ranks, 0)


def _task(name: str, settings: str) -> "FinetuneTask":
    from tokamake.config.finetune import FinetuneTask
    from tokamake.config_files import parse_yaml, validate
    from tokamake.errors import UserError

    values = parse_yaml(settings, "settings")
    if not isinstance(values, dict):
        raise UserError(f"settings: {settings}: not an object; give one such as {{}}")
    return validate(FinetuneTask, {**values, "name": name}, "settings")


def _sets(data: list[str]) -> dict[str, list[str]]:
    """Files of each test set."""
    from tokamake.errors import UserError

    sets: dict[str, list[str]] = {}
    for text in data:
        name, equals, files = text.partition("=")
        if not equals or not name or not files:
            raise UserError(f"--data {text}: give NAME=FILES, such as dev=glue/RTE/dev.tsv")
        sets.setdefault(name, []).append(files)
    return sets


def _check(
    opened: "Checkpoint", task: "FinetuneTask", *, batch_size: int, sequence_length: int
) -> None:
    """Check that a model has the head of a task, and sees as many tokens as rows have."""
    from tokamake.errors import UserError
    from tokamake.preflight.finetune import finetuned_architecture

    if task.head == "none":
        finetuned_architecture(opened.architecture, task)  # it can learn the task
    extra = opened.architecture.model_extra or {}
    actual = {name: extra.get(name) for name in task.architecture_fields}
    if actual != task.architecture_fields:
        raise UserError(
            f"{opened.path}: has {_shown(actual)}, task {task.name} needs "
            f"{_shown(task.architecture_fields)}; name a model that was finetuned on it"
        )
    labels = tuple(str(name) for name in opened.notes.get("labels") or ())
    theirs, ours = ([name.casefold() for name in names] for names in (labels, task.labels))
    if task.head == "classes" and theirs != ours and sorted(theirs) == sorted(ours):
        raise UserError(
            f"{opened.path}: has classes in the order {', '.join(labels)}, task {task.name} in the "
            f"order {', '.join(task.labels)}; name a model that was finetuned here, or give a task "
            "with labels in that order"
        )
    longest = opened.architecture.max_position_embeddings
    if not 3 <= sequence_length <= longest:
        raise UserError(f"--sequence-length {sequence_length}: give 3 to {longest}")
    if batch_size < 1:
        raise UserError(f"--batch-size {batch_size}: give 1 or more")


def _shown(fields: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in fields.items())


def _forward(
    opened: "Checkpoint",
    objective: "type[TaskObjective]",
    *,
    device: "torch.device",
    ranks: tuple[int, int],
) -> "Forward":
    """The forward pass of the whole model on this rank."""
    from collections.abc import Iterable, Iterator

    import torch
    from torch import Tensor

    from tokamake.checkpoint import model_tensors
    from tokamake.checkpoint.load_model import verify
    from tokamake.models.common.language_model import predictions
    from tokamake.train.batch import to_device
    from tokamake.train.objectives._tasks import TaskBatch

    rank, world_size = ranks
    verify(opened, rank=rank, world_size=world_size)
    names = model_tensors.shapes(opened.architecture)
    weights = {name: opened.source.read(f"model.{name}").contiguous() for name in names}
    model = model_tensors.to_model(opened.architecture, weights).float().to(device).eval()

    def forward(micro_batches: Iterable[TaskBatch]) -> Iterator[Tensor]:
        for rows in micro_batches:
            further = {name: to_device(array, device) for name, array in rows.arrays().items()}
            with torch.no_grad():
                output = model(to_device(rows.tokens, device), **further)
            yield objective.sample_outputs(predictions(output))

    return forward
