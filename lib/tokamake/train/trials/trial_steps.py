"""Training steps that write nothing: for measurements of speed and of learning rates.

They use the run's own engine and its samples, or random tokens. There is no validation, no
checkpoint and no output folder.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tokamake import plugins
from tokamake.config.resolved_run import Run
from tokamake.data.samples.fim.samples import training_samples
from tokamake.data.samples.index_folder import read_index
from tokamake.data.samples.steps import sample_numbers, steps
from tokamake.preflight.data import check_trial_samples
from tokamake.preflight.run import check_run
from tokamake.runtime.cores import prefetched
from tokamake.runtime.rank_errors import raise_on_all_ranks, report_from_any_rank
from tokamake.runtime.ranks import Ranks
from tokamake.train.batch import SampleIds
from tokamake.train.numerics import with_precision
from tokamake.train.startup_log import startup_log
from tokamake.train.step_result import StepResult

if TYPE_CHECKING:
    import torch


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

    def train_step(self, rows: Sequence[Any], **rates: float) -> StepResult:
        """Do one optimizer step with the next samples."""
        mesh, train = self.engine.mesh, self.run.train
        numbers = sample_numbers(
            self._num_done * train.global_batch_size,
            (len(rows), train.micro_batch_size),
            data_parallel_rank=mesh.data.rank,
            data_parallel_size=mesh.data.size,
        )
        self._num_done += 1
        result: StepResult = self.engine.train_step(rows, samples=SampleIds(numbers), **rates)
        return result

    def batches(self) -> Iterator[Sequence[Any]]:
        """This rank's micro batches of each step."""
        if self._synthetic:
            return self._random_batches()
        mesh, train = self.engine.mesh, self.run.train
        coming = steps(
            self._samples,
            train.batch_sizes,
            consumed_samples=0,
            micro_batch_size=train.micro_batch_size,
            data_parallel_rank=mesh.data.rank,
            data_parallel_size=mesh.data.size,
        )
        return report_from_any_rank(prefetched(step.micro_batches for step in coming), self._ranks)

    def _random_batches(self) -> Iterator[Sequence[Any]]:
        train, mesh = self.run.train, self.engine.mesh
        # Each data-parallel rank has its own tokens, as with real samples.
        generator = np.random.default_rng((self.run.seed, mesh.data.rank))
        num_batches = train.batch_sizes.num_micro_batches(train.micro_batch_size, mesh.data.size)
        for _ in range(self._num_steps):
            yield [self.engine.stages.objective.random_rows(generator) for _ in range(num_batches)]
