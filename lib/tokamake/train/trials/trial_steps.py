"""Training steps that write nothing: for measurements of speed and of learning rates.

They use the run's own engine and its samples, or random tokens. There is no validation, no
checkpoint and no output folder.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tokamake import plugins
from tokamake.config.resolved_run import Run, sample_lengths
from tokamake.data.samples.fim.samples import training_samples
from tokamake.data.samples.index_folder import read_index
from tokamake.data.samples.loader import sample_numbers
from tokamake.parallel.loss import NO_LABEL
from tokamake.preflight.data import check_trial_samples
from tokamake.preflight.run import check_run
from tokamake.runtime.cores import ahead
from tokamake.runtime.rank_errors import raise_on_all_ranks, report_from_any_rank
from tokamake.runtime.ranks import Ranks
from tokamake.train.batch import StepSamples, num_micro_batches, steps_of_rank
from tokamake.train.masked_rows import MaskedRows
from tokamake.train.numerics import with_precision
from tokamake.train.span_rows import SpanRows
from tokamake.train.startup_log import startup_log
from tokamake.train.step_result import StepResult

if TYPE_CHECKING:
    import torch

    from tokamake.train.batch import SampleRows


class TrialSteps:
    """Trial steps with batches of full size, of random tokens if `synthetic`."""

    def __init__(
        self,
        run: Run,
        ranks: Ranks,
        *,
        device: "torch.device",
        num_steps: int,
        synthetic: bool = False,
    ) -> None:
        # A trial takes the weights alone, with a new optimizer, also where the run continues one.
        finetune = None if run.train.finetune is None else True
        train = run.train.model_copy(update={"rampup_batch_size": None, "finetune": finetune})
        self.run = with_precision(run.model_copy(update={"train": train}), device)
        self._ranks, self._num_steps, self._synthetic = ranks, num_steps, synthetic
        self._num_done = 0
        with raise_on_all_ranks():
            index = None if synthetic else read_index(self.run.index)
            check_run(self.run, index=index, world_size=ranks.world_size, device=device)
            if index is not None:
                check_trial_samples(self.run, index, num_steps=num_steps)
                self._samples = training_samples(self.run, verify=False)
            ranks.print_once(startup_log(self.run, ranks, device=device))
        backend = plugins.load("train/backends", train.backend)
        self.engine: Any = backend.Engine(self.run, ranks, device=device)

    def train_step(self, rows: "Sequence[SampleRows]", **rates: float) -> StepResult:
        """Do one optimizer step with the next samples."""
        mesh, train = self.engine.mesh, self.run.train
        numbers = sample_numbers(
            self._num_done * train.global_batch_size,
            (len(rows), train.micro_batch_size),
            data_parallel_rank=mesh.data.rank,
            data_parallel_size=mesh.data.size,
        )
        self._num_done += 1
        result: StepResult = self.engine.train_step(rows, samples=StepSamples(numbers), **rates)
        return result

    def batches(self) -> "Iterator[Sequence[SampleRows]]":
        """This rank's micro batches of each step."""
        if self._synthetic:
            return self._random_batches()
        steps = steps_of_rank(
            self._samples, self.run.train, mesh=self.engine.mesh, consumed_samples=0
        )
        return report_from_any_rank(ahead(step.micro_batches for step in steps), self._ranks)

    def _random_batches(self) -> "Iterator[Sequence[SampleRows]]":
        train, mesh = self.run.train, self.engine.mesh
        # Each data-parallel rank has its own tokens, as with real samples.
        generator = np.random.default_rng((self.run.seed, mesh.data.rank))
        for _ in range(self._num_steps):
            rows: Sequence[SampleRows] = [
                _random_rows(self.run, generator) for _ in range(num_micro_batches(train, mesh))
            ]
            yield rows


def _random_rows(run: Run, generator: np.random.Generator) -> "SampleRows":
    """A micro batch of random tokens."""
    size, vocab_size = run.train.micro_batch_size, run.architecture.vocab_size
    length, *of_decoder = sample_lengths(run)
    assert vocab_size is not None
    if run.train.objective == "masked":
        tokens = generator.integers(vocab_size, size=(size, length))
        is_masked = generator.random((size, length)) < run.train.masking.probability
        labels, whole = np.where(is_masked, tokens, NO_LABEL), np.ones((size, length), np.bool_)
        orders = generator.integers(2, size=size)
        return MaskedRows(tokens, np.zeros_like(tokens), labels, whole, orders)
    if not of_decoder:
        return generator.integers(vocab_size, size=(size, length + 1))
    rows = generator.integers(vocab_size, size=(size, of_decoder[0] + 1))
    tokens = generator.integers(vocab_size, size=(size, length))
    return SpanRows(tokens, rows[:, :-1], rows[:, 1:], np.ones((size, length), np.bool_))
