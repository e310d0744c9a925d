"""The parts of a run between its changes, which may have other batch sizes and other samples.

`trace-sample` and `trace-steps` find the samples of a step by them.
"""

from typing import Literal, NamedTuple

from tokamake.checkpoint.native.resume_state import newest_state
from tokamake.config.batching import BatchSizes
from tokamake.config.resolved_run import Run
from tokamake.data.samples.index_folder import read_index
from tokamake.preflight.changes import data_lines
from tokamake.preflight.run_record import RunRecord, read_record, trained_run, training_index


class TrainedSpan(NamedTuple):
    """Steps of a run between two of its changes, or after the last one."""

    last_step: int
    num_samples: int
    """Samples that the run has consumed after the last step."""
    sizes: BatchSizes | None
    """Samples of each step; None: no checkpoint of the part is left."""
    samples: Literal["same", "perhaps changed", "changed"] = "same"
    """Whether the run's index has the same samples: "perhaps changed" if the length of the run
    has changed, which may change their order."""


def trained_spans(run: Run) -> list[TrainedSpan]:
    """The parts of a run, from its first to its last step: changes may alter the batch sizes."""
    state, _ = newest_state(run.output)
    changes = state.lineage if state else ()
    parts, first = list[TrainedSpan](), (run.step, run.consumed_samples)
    for change in changes:
        earlier = trained_run(run.output, change.digest)
        sizes = earlier.train.counted_from(*first).batch_sizes if earlier else None
        samples = _compare_samples(read_record(run.output, change.digest), run)
        parts.append(TrainedSpan(change.step, change.consumed_samples, sizes, samples))
        first = change.step, change.consumed_samples
    train = run.train.counted_from(*first) if changes else run.train
    sizes = train.batch_sizes
    return [*parts, TrainedSpan(train.train_steps, sizes.samples(train.train_steps), sizes)]


def _compare_samples(
    recorded: RunRecord | None, run: Run
) -> Literal["same", "perhaps changed", "changed"]:
    if recorded is None:
        return "perhaps changed"
    current = training_index(read_index(run.index))
    earlier = {name: recorded["index"].get(name) for name in current}
    if earlier == current:
        return "same"
    return "changed" if any(data_lines(earlier, current, has_settings=True)) else "perhaps changed"
