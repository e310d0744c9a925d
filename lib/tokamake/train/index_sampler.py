"""Samples of an index: training samples, and validation splits that training leaves out."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from tokamake.checkpoint.native.resume_state import ResumeState, run_since_change
from tokamake.config.resolved_run import Run
from tokamake.data.samples.fim.samples import training_samples
from tokamake.data.samples.loader import SplitSamples, open_samples
from tokamake.data.samples.steps import StepBatch, batches, steps
from tokamake.parallel.mesh import Mesh
from tokamake.preflight.data import IndexContent
from tokamake.runtime.rank_errors import raise_on_all_ranks
from tokamake.runtime.ranks import Ranks
from tokamake.train import metrics
from tokamake.train.batch import SampleIds
from tokamake.train.metrics import Validation
from tokamake.train.sampler import Sampler, Watch


class ValidationSplit(NamedTuple):
    """Samples of one set, and how many of them are used."""

    samples: SplitSamples
    num_steps: int
    """Number of global batches."""

    def micro_batches(self, run: Run, mesh: Mesh) -> Iterator[Any]:
        """This rank's micro batches, always the same ones."""
        train = run.train
        rows = batches(
            self.samples,
            consumed_samples=0,
            micro_batch_size=train.micro_batch_size,
            data_parallel_rank=mesh.data.rank,
            data_parallel_size=mesh.data.size,
        )
        num_rows = train.batch_sizes.num_micro_batches(train.micro_batch_size, mesh.data.size)
        return islice(rows, self.num_steps * num_rows)


class IndexSampler(Sampler):
    """Samples of a run's index; opening it compares the data with their hashes.

    Args:
        unvalidated: whether an earlier job stopped before its last validation.
    """

    def __init__(
        self,
        run: Run,
        ranks: Ranks,
        *,
        index: IndexContent,
        unvalidated: bool = False,
    ) -> None:
        super().__init__(run)
        self._unvalidated = unvalidated
        with raise_on_all_ranks():
            verify = ranks.rank == 0  # one rank is enough
            self.documents = self._samples = training_samples(run, verify=verify)
            self._splits = open_validation_splits(run, index, verify=verify)
        self.corpora = self._samples.corpora

    def steps(
        self, state: ResumeState, mesh: Mesh, *, left_out: Sequence[tuple[int, int]]
    ) -> Iterator[StepBatch]:
        """Steps of the run since its last change."""
        train = run_since_change(self.run, state).train
        return steps(
            self._samples,
            train.batch_sizes,
            consumed_samples=state.consumed_samples,
            micro_batch_size=train.micro_batch_size,
            data_parallel_rank=mesh.data.rank,
            data_parallel_size=mesh.data.size,
            left_out=left_out,
        )

    def sample_ids(self, batch: StepBatch) -> SampleIds:
        """This rank's samples, with their corpora if losses of these are recorded."""
        numbers = batch.sample_numbers
        if not self.run.train.log_corpus_losses:
            return SampleIds(numbers)
        return SampleIds(numbers, self._samples.corpus_numbers(numbers), len(self.corpora))

    def needs_validation(self, state: ResumeState) -> bool:
        return state.step == 0 or self._unvalidated

    def validate(self, engine: Any, state: ResumeState, *, watch: Watch) -> dict[str, Validation]:
        run = run_since_change(self.run, state)
        return {
            name: engine.validate(watch(split.micro_batches(run, engine.mesh)))
            for name, split in self._splits.items()
        }


def open_validation_splits(
    run: Run, index: IndexContent, *, verify: bool
) -> dict[str, ValidationSplit]:
    """Open the validation splits that fill a global batch; `verify` reports shorter splits."""
    train, splits = run.train, dict[str, ValidationSplit]()
    for name in index["splits"] if train.evaluation_steps else ():
        if name == "train":
            continue
        samples = open_samples(run.index, split=name, data_root=run.data_root, verify=verify)
        num_steps = min(train.evaluation_steps, len(samples) // train.global_batch_size)
        if num_steps:
            splits[name] = ValidationSplit(samples, num_steps)
        elif verify:
            print(
                f"{metrics.title(name)}: not measured: its {len(samples)} samples do not fill a "
                f"global batch of {train.global_batch_size}",
                flush=True,
            )
    return splits
