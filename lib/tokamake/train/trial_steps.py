"""Training steps of a run that leave nothing behind: for measurements of speed or of rates.

The run's own engine and data, or random tokens; no validation, checkpoints or output folder.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from tokamake import plugins
from tokamake.config.resolved_run import Run
from tokamake.data.samples.fim.samples import training_samples
from tokamake.data.samples.index_folder import read_index
from tokamake.data.samples.loader import steps
from tokamake.runtime.cores import ahead
from tokamake.runtime.rank_errors import raise_on_all_ranks, report_from_any_rank
from tokamake.runtime.ranks import Ranks
from tokamake.train.checks import check_run, check_trial_samples
from tokamake.train.numerics import decided
from tokamake.train.startup_log import startup_log

if TYPE_CHECKING:
    import torch

    from tokamake.train.batch import TokenRows


class TrialSteps:
    """A run that is tried, and told as `train` tells it; all batches have their full size.

    Attributes:
        run: the run, with what it leaves to the device written down.
        engine: of the run's back end.

    Args:
        run: the resolved run.
        ranks: this process among its peers.
        device: where the model lives.
        num_steps: steps that are wanted.
        synthetic: whether to train on random tokens; else the index is read.

    Raises:
        UserError: the run cannot start, or has too few samples.
    """

    def __init__(
        self,
        run: Run,
        ranks: Ranks,
        device: "torch.device",
        *,
        num_steps: int,
        synthetic: bool = False,
    ) -> None:
        # A trial has the run's first weights alone, and a fresh optimizer.
        finetune = None if run.train.finetune is None else True
        train = run.train.model_copy(update={"rampup_batch_size": None, "finetune": finetune})
        self.run = decided(run.model_copy(update={"train": train}), device)
        self._ranks, self._num_steps, self._synthetic = ranks, num_steps, synthetic
        with raise_on_all_ranks():
            index = None if synthetic else read_index(self.run.index)
            check_run(self.run, index=index, world_size=ranks.world_size, device=device)
            if index is not None:
                check_trial_samples(self.run, index, num_steps)
                self._samples = training_samples(self.run, verify=False)
            said = startup_log(self.run, ranks, device)
        if ranks.rank == 0:
            print(said, flush=True)
        self.engine: Any = plugins.load("train/backends", train.backend).Engine(
            self.run, ranks, device
        )

    def batches(self) -> "Iterator[list[TokenRows]]":
        """This rank's micro batches of each step."""
        if self._synthetic:
            return self._random()
        mesh = self.engine.mesh
        found = steps(
            self._samples,
            self.run.train.batch_sizes,
            consumed_samples=0,
            micro_batch_size=self.run.train.micro_batch_size,
            data_parallel_rank=mesh.data.rank,
            data_parallel_size=mesh.data.size,
        )
        return report_from_any_rank(ahead([*step.micro_batches] for step in found), self._ranks)

    def _random(self) -> "Iterator[list[TokenRows]]":
        train, data = self.run.train, self.engine.mesh.data
        vocabulary = self.run.architecture.vocab_size
        assert vocabulary is not None
        generator = np.random.default_rng((self.run.seed, data.rank))
        shape = train.micro_batch_size, train.sequence_length + 1
        count = train.global_batch_size // (train.micro_batch_size * data.size)
        for _ in range(self._num_steps):
            yield [generator.integers(vocabulary, size=shape) for _ in range(count)]
