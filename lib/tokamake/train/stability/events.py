"""The journal of bad steps, events.jsonl: fault, ranks and documents.

From it, a job knows the bad steps of earlier jobs: steps that used up the budget, and steps that
training has gone back before. The guard writes it, not a hook: its decisions depend on earlier
events, and an event must be on disk before training goes back or stops.
"""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from tokamake.checkpoint.native.resume_state import ResumeState
from tokamake.config.resolved_run import Run
from tokamake.data.indexed.dataset import IndexedDataset
from tokamake.data.indexed.trace import document_of
from tokamake.data.samples.steps import StepBatch
from tokamake.runtime.rank_errors import raise_on_all_ranks
from tokamake.runtime.ranks import Ranks
from tokamake.train.bad_steps import ACTED, BadStep
from tokamake.train.metrics import RecordFile
from tokamake.train.sampler import HasSpans
from tokamake.train.step_result import StepResult

FILE = "events.jsonl"
"""Name of the file in the output folder of a run."""


class BadStepHistory(NamedTuple):
    """Bad steps until now; the same on all ranks."""

    num_acted: int = 0
    """Steps that were skipped, rewound, or followed by a lower rate."""
    left_out: tuple[int, ...] = ()
    """Steps whose data are left out, since training has gone back before them."""


class EventLog:
    """Journal of a run's bad steps: all ranks call its methods, rank 0 writes.

    A resume drops events of steps that are done again. Events of rewinds stay: their samples are
    left out, whichever steps have them after a change of the batch size.

    Attributes:
        history: bad steps until now.
    """

    def __init__(
        self, run: Run, ranks: Ranks, *, samples: HasSpans | None, start: ResumeState
    ) -> None:
        self._run, self._samples, self.path = run, samples, run.output / FILE
        self._file: RecordFile | None = None
        agreed = [BadStepHistory()]
        with raise_on_all_ranks():
            if ranks.rank == 0:
                self._file = RecordFile(self.path, lambda event: _stays(event, start.step))
                agreed = [self._history(self._file.kept, start.consumed_samples)]
        dist.broadcast_object_list(agreed, src=0)
        self.history = agreed[0]

    def add(
        self, step: int, result: StepResult, *, bad: BadStep, batch: StepBatch, **facts: Any
    ) -> None:
        """Journal a bad step with further facts, such as its ranks, and bring it to disk."""
        first, stop = batch.consumed_samples, batch.consumed_samples + batch.global_batch_size
        if bad.action in ACTED:
            self.history = self.history._replace(num_acted=self.history.num_acted + 1)
        with raise_on_all_ranks():
            if self._file:
                event = {
                    "step": step,
                    "case": bad.case,
                    "reason": bad.reason,
                    "action": bad.action,
                    **facts,
                    "loss": _number(result.loss),
                    "grad_norm": _number(result.grad_norm),
                    "samples": [first, stop - 1],
                    "documents": self._documents(first, stop),
                }
                self._file.add(event)
                self._file.sync()

    def close(self) -> None:
        if self._file:
            self._file.close()

    def _history(self, events: Iterable[dict[str, Any]], consumed_samples: int) -> BadStepHistory:
        """Bad steps of earlier jobs, from their events."""
        actions, left_out = list[Any](), set[int]()
        for event in events:
            actions.append(event.get("action"))
            if actions[-1] == "rewind":
                left_out.update(self._steps_of(event, consumed_samples))
        return BadStepHistory(sum(action in ACTED for action in actions), tuple(sorted(left_out)))

    def _steps_of(self, rewind: dict[str, Any], consumed_samples: int) -> range:
        """Later steps with samples of a rewind."""
        try:
            first, last = rewind["samples"]
            if last < consumed_samples:
                return range(0)
            is_same = self._documents(first, last + 1) == rewind["documents"]
        except (IndexError, KeyError, TypeError, ValueError):
            is_same = False
        if not is_same:
            print(
                f"{self.path}: step {rewind['step']}: its samples have other documents "
                "now, so they are not left out",
                flush=True,
            )
            return range(0)
        sizes = self._run.train.batch_sizes
        first = max(first, consumed_samples)
        return range(sizes.whole_steps(first) + 1, sizes.whole_steps(last) + 2)

    def _documents(self, first: int, stop: int) -> dict[str, list[int]]:
        if self._samples is None:
            return {}
        return documents_of(self._samples, range(first, stop), data_root=self._run.data_root)


def _stays(event: dict[str, Any], done: int) -> bool:
    return bool(done) and (event["step"] <= done or event.get("action") == "rewind")


def _number(value: float) -> float | str:
    """A number for JSON, which has none for NaN and infinity."""
    return value if math.isfinite(value) else str(value)


def documents_of(
    samples: HasSpans, numbers: Iterable[int], *, data_root: Path
) -> dict[str, list[int]]:
    """Find the documents of some samples: ascending numbers by the prefix of their dataset."""
    sequences: dict[str, set[int]] = {}
    for sample in numbers:
        for span in samples.spans(sample):
            sequences.setdefault(span.prefix, set()).add(span.sequence)
    documents = {}
    for prefix in sorted(sequences):
        dataset = IndexedDataset(data_root / prefix)
        documents[prefix] = sorted({document_of(dataset, each) for each in sequences[prefix]})
    return documents
