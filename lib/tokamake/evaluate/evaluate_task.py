"""Stage `evaluate-task`: score a model on a task."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from tokamake import plugins
from tokamake.config.tasks import FOLDER, TaskSettings
from tokamake.data.corpus.raw_files import expand
from tokamake.errors import UserError, choice
from tokamake.inference.layout import WHOLE_MODEL, InferenceLayout, peers
from tokamake.retrieval.chunk_retriever import NO_NEIGHBORS, NeighborOptions, retrieve

if TYPE_CHECKING:
    from tokamake.config.tasks import TaskSettings


def evaluate_task(
    name: str,
    /,
    *,
    checkpoint: Path,
    data: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = (),
    settings: str = "{}",
    fetched: Path | None = None,
    tokenizer: Path | None = None,
    sequence_length: int | None = None,
    batch_size: int = 8,
    layout: InferenceLayout = WHOLE_MODEL,
    data_root: Path = Path(),
    neighbors: NeighborOptions = NO_NEIGHBORS,
    output: Path | None = None,
) -> None:
    """Score a language model on a benchmark: wikitext, lambada, text, or any task of lm-eval.

    People type it as `tokamake evaluate --task NAME`. The files of evaluate/tasks describe the
    measure and the settings of each task. Scores do not depend on the number of ranks.

    Args:
        name: plug-in in evaluate/tasks/.
        checkpoint: folder of a checkpoint of any format, or of a run, whose newest one counts.
        data: files of the task, folders, patterns or addresses.
        settings: JSON of the plug-in's settings; it can have the files too, as `data`.
        fetched: JSON file of `fetch-task`, if `data` has addresses.
        tokenizer: tokenizer of the model; by default as for `evaluate`.
        sequence_length: most tokens that the model reads at once; by default as for `evaluate`.
        batch_size: sequences per forward pass.
        layout: how ranks share the model.
        data_root: folder that the datasets of neighbors are relative to.
        neighbors: where a model of family retro finds neighbors of each chunk.
        output: JSON file to write.
    """
    from tokamake import plugins
    from tokamake.checkpoint.detect import open_any
    from tokamake.checkpoint.load_model import end_tokens, sequence_length_of, tokenizer_of
    from tokamake.config.tasks import FOLDER
    from tokamake.evaluate.evaluate import check_values
    from tokamake.evaluate.scorer import Scorer
    from tokamake.files import write_json
    from tokamake.inference.driven_model import DrivenModel
    from tokamake.inference.model import InferenceModel

    check_values(sequence_length=(sequence_length, 1), batch_size=(batch_size, 1))
    with peers() as ranks:
        with ranks.together():
            task = _with_files(read_task(name, settings, data=data), fetched)
            check_task(task)
            opened = open_any(checkpoint)
            layout.check(opened.architecture, world_size=ranks.ranks.world_size)
            neighbors.check(opened.architecture)
            text_tokenizer = tokenizer_of(opened, tokenizer)
            length = sequence_length_of(opened, sequence_length)
        part = InferenceModel(opened, layout, peers=ranks)
        with ranks.together():
            retrieve(part, neighbors, data_root=data_root, tokenizer=text_tokenizer, peers=ranks)
        model = DrivenModel(part, ranks.ranks.world_size)
        with ranks.together(), model.driven() as drives:
            if not drives:
                return
            scorer = Scorer(
                model,
                text_tokenizer,
                end_tokens=end_tokens(opened, text_tokenizer),
                sequence_length=length,
                batch_size=batch_size,
            )
            scores: dict[str, Any] = plugins.load(FOLDER, name).evaluate(scorer, task)
            for metric, value in scores.items():
                print(
                    f"{metric}: {value:,.4f}" if isinstance(value, float) else f"{metric}: {value}"
                )
            if output:
                write_json(output, {"task": name, "sequence_length": length, "scores": scores})


def _with_files(task: "TaskSettings", fetched: Path | None) -> "TaskSettings":
    from tokamake.files import read_json

    if not task.addresses:
        return task
    remedy = "run tokamake fetch-task with --output FILE, and name it with --fetched"
    if fetched is None:
        raise UserError(f"settings: data: {task.addresses[0]}: not downloaded; {remedy}")
    files = read_json(fetched, remedy).get("files", {})
    if missing := [address for address in task.addresses if address not in files]:
        raise UserError(f"{fetched}: has no files of {missing[0]}; {remedy}")
    data = [path for each in task.data for path in files.get(each, [each])]
    return task.model_copy(update={"data": tuple(data)})


def read_task(name: str, settings: str, *, data: tuple[str, ...] = ()) -> "TaskSettings":
    """The settings of a task; `data` replaces the files that they name."""
    import json

    from tokamake import plugins
    from tokamake.config.tasks import FOLDER, TaskSettings
    from tokamake.config_files import validate

    if name not in (known := plugins.names(FOLDER)):
        raise UserError(f"{name}: no such task; {choice(name, known)}")
    try:
        values = json.loads(settings)
    except ValueError as error:
        raise UserError(f"settings: not JSON ({error}); give an object such as {{}}") from None
    if not isinstance(values, dict):
        raise UserError(f"settings: {settings}: not an object; give one such as {{}}")
    given = {"data": data} if data else {}
    return validate(TaskSettings, {**values, **given, "name": name}, "settings")


def check_task(task: TaskSettings) -> None:
    """Check that local files exist, then run the plug-in's own checks."""
    local_files(task)
    if not plugins.constant(FOLDER, task.name, "NEEDS_DATA"):
        plugins.load(FOLDER, task.name).check(task)


def local_files(task: TaskSettings) -> list[Path]:
    """Return the local files of a task: its data, and the files that the plug-in itself names."""
    files = expand([each for each in task.data if each not in task.addresses])
    if not plugins.constant(FOLDER, task.name, "NEEDS_DATA"):
        files += plugins.load(FOLDER, task.name).files(task)
    return files
