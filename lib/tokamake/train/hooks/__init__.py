"""Hooks of the training loop: they watch and record a run, and decide none of its steps.

Each file of this folder is a hook. Its `open_hook(training: Training) -> Hook` opens the hook when
the loop begins, and again when it has gone back to a checkpoint. The loop calls hooks on all ranks
together, in the order of their names.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tokamake import plugins

if TYPE_CHECKING:  # `tokamake status` imports a hook, without torch
    import torch

    from tokamake.checkpoint.native.resume_state import ResumeState
    from tokamake.config.resolved_run import Run
    from tokamake.runtime.ranks import Ranks
    from tokamake.train.metrics import Record, TextSample, Validation
    from tokamake.train.step_result import StepResult


KIND = "train/hooks"


class Training(NamedTuple):
    """The training that a hook follows, on this rank."""

    run: "Run"
    """The run with the steps that are left after its last change."""
    state: "ResumeState"
    """State from which the loop begins."""
    ranks: "Ranks"
    device: "torch.device"
    hosts: Sequence[str]
    """Host of each rank."""
    corpora: Sequence[str]
    """Names of the corpora of `StepResult.corpus_losses`."""
    heartbeat: "Hook"
    """The watch over the ranks, which began before the model was built."""
    engine: Any
    """The model and its optimizer; hooks do not change them."""
    record: "Callable[[Record], None]" = lambda _: None
    """Calls `recorded` of all hooks; `open_hooks` sets it."""
    show_texts: "Callable[[int, Sequence[TextSample]], None]" = lambda *_: None
    """Calls `wrote` of all hooks; `open_hooks` sets it."""


class FinishedStep(NamedTuple):
    """A step that has ended."""

    state: "ResumeState"
    """State of the run after the step."""
    result: "StepResult"
    """Measurements; `NO_RESULT` if its data are left out."""
    learning_rate: float
    next_rate: float
    """Learning rate of the next step."""
    num_samples: int
    """Samples of all ranks."""
    seconds: float
    """Time of the step; 0 if its data are left out."""
    reading: float
    """Part of it in which this rank waited for its samples."""
    is_logged: bool
    """Whether a record of the steps since the last record is due."""


class Hook:
    """Base class of hooks; each method does nothing by default."""

    def begin_step(self, step: int) -> None:
        """Called before the samples of a step are read."""

    def end_step(self, finished: FinishedStep) -> None:
        """Called after the update of a step."""

    def validated(self, state: "ResumeState", measured: dict[str, "Validation"]) -> None:
        """Called with the measurements of each validation split."""

    def recorded(self, record: "Record") -> None:
        """Called on rank 0 with each new record of metrics.jsonl."""

    def wrote(self, step: int, texts: "Sequence[TextSample]") -> None:
        """Called on rank 0 with texts that the model has written after a step."""

    def saved(self, state: "ResumeState") -> None:
        """Called when the checkpoint of a state is in place; training may be at a later step."""

    def sync(self) -> None:
        """Bring records to disk: called before a checkpoint is saved, and after the last step."""

    def close(self) -> None:
        """Called when the loop ends, also by an error, or goes back to a checkpoint."""


def open_hooks(training: Training, further: Iterable[Hook] = ()) -> list[Hook]:
    """Open all hooks, and let `further` ones follow them; all ranks call this together."""
    hooks: list[Hook] = []

    def record(record: "Record") -> None:
        for hook in hooks:
            hook.recorded(record)

    def show_texts(step: int, texts: "Sequence[TextSample]") -> None:
        for hook in hooks:
            hook.wrote(step, texts)

    training = training._replace(record=record, show_texts=show_texts)
    hooks += [plugins.load(KIND, name).open_hook(training) for name in plugins.names(KIND)]
    hooks += further
    return hooks
