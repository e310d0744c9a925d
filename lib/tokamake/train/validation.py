"""Validation splits of a run: samples of the index that training leaves out."""

from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

from tokamake.config.resolved_run import Run
from tokamake.data.samples.loader import SplitSamples, batches, open_samples
from tokamake.parallel.mesh import Mesh
from tokamake.train import metrics
from tokamake.train.batch import num_micro_batches


class ValidationSplit(NamedTuple):
    """Samples of one set, and how many of them are used."""

    samples: SplitSamples
    num_steps: int
    """Number of global batches."""

    def micro_batches(self, run: Run, mesh: Mesh) -> Iterator[Any]:
        """This rank's micro batches, always the same ones."""
        rows = batches(
            self.samples,
            consumed_samples=0,
            micro_batch_size=run.train.micro_batch_size,
            data_parallel_rank=mesh.data.rank,
            data_parallel_size=mesh.data.size,
        )
        return islice(rows, self.num_steps * num_micro_batches(run.train, mesh))


def open_validation_splits(
    run: Run, index: dict[str, Any], *, verify: bool
) -> dict[str, ValidationSplit]:
    """Open the validation splits that fill a global batch; with `verify`, report the others."""
    train, splits = run.train, dict[str, ValidationSplit]()
    if not train.evaluation_steps:
        return splits
    for name in index["splits"]:
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
