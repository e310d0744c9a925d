"""Section `finetune`: the task that a run learns, its files, and how often it reads them."""

from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, model_validator

from tokamake import plugins
from tokamake.config.fields import Key, Settings, plug_in
from tokamake.config.objective import TASK_DEFAULT
from tokamake.config.plugin_settings import PlugInSettings
from tokamake.config.resolved_run import Run
from tokamake.config.training import TrainSettings

FOLDER = "finetune/tasks"

TRAIN_SETTINGS = (
    *("on_change", "sequence_length", "micro_batch_size", "global_batch_size", "dropout"),
    *("optimizer", "schedule", "gradient_clipping", "precision", "loss_scaling", "parallel"),
    *("zero_stage", "deterministic", "compile", "backend", "log_interval", "save_interval"),
    *("recompute_granularity", "recompute_method", "recompute_num_layers"),
    *("init_timeout_seconds", "train_timeout_seconds"),
)
"""Settings of `train` that finetuning uses; the other settings are about pretraining."""


class FinetuneTask(PlugInSettings):
    """A task to learn, with the settings of its plug-in."""

    folder: ClassVar[str] = FOLDER

    name: Annotated[str, plug_in(FOLDER)]
    """Plug-in in finetune/tasks/."""

    @model_validator(mode="after")
    def _check_labels(self) -> "FinetuneTask":
        labels = self.own.get("labels")
        if labels is not None and (len({*labels}) < 2 or len({*labels}) != len(labels)):
            raise ValueError(f"labels: {list(labels)}: give all labels, two or more different ones")
        return self

    @property
    def labels(self) -> tuple[str, ...]:
        """Labels in the order of the model's classes; of a choice, names of the options. Empty:
        labels are numbers."""
        of_plug_in: tuple[str, ...] = plugins.constant(FOLDER, self.name, "LABELS")
        return of_plug_in or tuple(map(str, self.own.get("labels", ())))

    @property
    def head(self) -> str:
        """classes, regression or choice; none: the model gets no head."""
        return str(plugins.constant(FOLDER, self.name, "HEAD"))

    @property
    def objective(self) -> str:
        """Objective that learns the task, a folder in train/objectives/."""
        return str(plugins.constant(FOLDER, self.name, "OBJECTIVE", default=TASK_DEFAULT))

    @property
    def metrics(self) -> tuple[str, ...]:
        """Metrics of the task; the first one says which epoch is the best."""
        names: tuple[str, ...] = plugins.constant(FOLDER, self.name, "METRICS")
        return names

    @property
    def architecture_fields(self) -> dict[str, Any]:
        """Fields of a model with the head of the task."""
        if self.head == "none":
            return {}
        num_classes = len(self.labels) if self.head == "classes" else 1
        is_choice = self.head == "choice"
        return {"task_head": "choice" if is_choice else "classes", "num_classes": num_classes}


def _with_name(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


def _as_tuple(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


TaskFiles = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...], BeforeValidator(_as_tuple), Field(min_length=1)
]
"""Files, folders or patterns."""


class FinetuneSettings(Settings):
    """Finetuning of an encoder. Settings of `train` about optimizer, schedule, batches, dropout,
    precision and parallelism hold here, too; `epochs` gives the length in place of
    `train.train_steps`."""

    task: Annotated[FinetuneTask, BeforeValidator(_with_name)]
    """The task: its name, a file in lib/tokamake/finetune/tasks, or a section with its settings."""
    train_files: TaskFiles
    """Files to train on, or folders or patterns of them."""
    validation_files: TaskFiles
    """Files to score the model on after each epoch. The epoch with the best score is kept."""
    test_files: dict[Key, TaskFiles] = Field(default_factory=dict)
    """Files to score the best model on: name of the test set → files. Without labels, only
    predictions are written. Empty: the validation files alone."""
    epochs: Annotated[int, Field(ge=1)] = 3
    """How often each row is trained on."""


class TaskRun(Run):
    """A resolved run that learns a task."""

    task: FinetuneTask
    """The task."""


def check_train_settings(train: TrainSettings) -> None:
    """Check that settings of `train` fit finetuning."""
    schedule, parallel = train.schedule, train.parallel
    if schedule.counts_samples:
        raise ValueError(
            "train.schedule: has lengths in samples or tokens, but the last step of an epoch has "
            "fewer rows; give them in steps or as fractions"
        )
    if train.backend != "native":
        raise ValueError(
            f"train.backend: {train.backend}: finetuning uses the back end native; set that"
        )
    if train.optimizer.facts.extra_pass:
        raise ValueError(
            f"train.optimizer.name: {train.optimizer.name}: needs an extra pass with labels of "
            "tokens, which finetuning does not have; choose another optimizer"
        )
    for name in ("pipeline_parallel_size", "context_parallel_size"):
        if (size := getattr(parallel, name)) > 1:
            raise ValueError(
                f"train.parallel.{name}: {size}: the head of a task needs whole rows; set 1"
            )
