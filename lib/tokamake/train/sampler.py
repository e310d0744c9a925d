"""The seam between the training loop and its samples: steps, validations, notes of checkpoints."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from tokamake.checkpoint.native.resume_state import ResumeState
from tokamake.config.resolved_run import Run, write_run
from tokamake.data.samples.loader import DocumentSpan
from tokamake.data.samples.steps import StepBatch
from tokamake.parallel.mesh import Mesh
from tokamake.train import metrics
from tokamake.train.batch import SampleIds
from tokamake.train.hooks import Hook
from tokamake.train.metrics import Validation

Watch = Callable[[Iterable[Any]], Iterator[Any]]
"""Passes on the micro batches of a validation, and notes the progress of this rank."""


class HasSpans(Protocol):
    """Samples that know where their tokens come from."""

    def spans(self, sample: int, /) -> list[DocumentSpan]: ...


class Sampler(ABC):
    """Samples of a run; all ranks have one, and call its methods together.

    Attributes:
        corpora: names of the corpora of the samples.
        documents: where tokens of samples come from; None: they are in no dataset.
        saves_validated: whether a checkpoint is saved at each step that is validated.
        notes: entries of a checkpoint's description beside its step and samples.
    """

    corpora: Sequence[str] = ()
    documents: HasSpans | None = None
    saves_validated = False
    notes: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, run: Run) -> None:
        self.run = run

    def begin(self, resumed: Path | None) -> None:  # noqa: B027
        """Continue from a checkpoint of the run that is loaded; None: begin."""

    def hooks(self) -> list[Hook]:
        """Hooks of the loop that belong to these samples."""
        return []

    @abstractmethod
    def steps(
        self, state: ResumeState, mesh: Mesh, *, left_out: Sequence[tuple[int, int]]
    ) -> Iterator[StepBatch]:
        """This rank's share of the remaining steps, without the ranges `left_out`."""

    def sample_ids(self, batch: StepBatch) -> SampleIds:
        """This rank's samples of a step."""
        return SampleIds(batch.sample_numbers)

    def needs_validation(self, state: ResumeState) -> bool:  # noqa: ARG002
        """Whether the loop validates before its first step."""
        return False

    def validate(
        self,
        engine: Any,  # noqa: ARG002
        state: ResumeState,  # noqa: ARG002
        *,
        watch: Watch,  # noqa: ARG002
    ) -> dict[str, Validation]:
        """Measure each validation split; empty: there is nothing to measure."""
        return {}

    def validation_losses(self) -> Iterable[tuple[int, float]]:
        """Steps that were validated, with a number that is lower for better weights."""
        return metrics.validation_losses(self.run.output / metrics.FILE)

    def recorder(self) -> Callable[[Path], None]:
        """Function that writes files of this moment into the folder of a checkpoint, on rank 0;
        by default, the settings of the run."""
        return lambda folder: write_run(folder / "run.yaml", self.run)
