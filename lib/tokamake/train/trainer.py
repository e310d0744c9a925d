"""The training loop: from a resolved run to its last checkpoint.

Samples come from the index, steps are done by `engine`; checkpoints, metrics and, at the very end,
train.json go to disk. Every decision is taken alike on all ranks.
"""

import math
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from tokamake import plugins
from tokamake.config.resolved_run import Run, write_run
from tokamake.data.samples.fim.samples import training_samples
from tokamake.data.samples.index_folder import read_index
from tokamake.data.samples.loader import Rows, Samples, batches, steps
from tokamake.errors import UserError
from tokamake.runtime.cores import ahead
from tokamake.runtime.rank_errors import STOPPED, raise_on_all_ranks, report_from_any_rank
from tokamake.runtime.ranks import Ranks
from tokamake.schedules import Schedule
from tokamake.train import job_progress, metrics, resume
from tokamake.train.deadline import (
    DURATIONS,
    Deadline,
    end_of_job,
    read_durations,
    write_durations,
)
from tokamake.train.initial_checkpoint import check_begun
from tokamake.train.metrics import Metrics, console_line
from tokamake.train.numerics import check_repeatable, decided, repeatable
from tokamake.train.resolve import check_backend, check_layout, check_lengths, check_precision
from tokamake.train.resume import ResumeState
from tokamake.train.startup_log import startup_log
from tokamake.train.step_result import Saving, StepResult
from tokamake.train.stop_signals import StopRequest, on_signals
from tokamake.train.summary import write_summary

if TYPE_CHECKING:
    import torch

    from tokamake.data.samples.loader import Step
    from tokamake.train.batch import TokenRows


def train_run(
    run: Run,
    ranks: Ranks,
    device: "torch.device",
    *,
    until_step: int | None = None,
    minutes: float | None = None,
) -> int:
    """Train, or continue, or find that nothing is left to do.

    Args:
        run: the resolved run.
        ranks: this process among its peers, all in one process group.
        device: where the model lives.
        until_step: where to end; None: at the end of the run.
        minutes: how long this job may take; None: what its scheduler says.

    Returns:
        Exit code: 0, or `STOPPED`.

    Raises:
        UserError: the run cannot start or its loss is not finite; all ranks raise it.
    """
    run = decided(run, device)
    last = run.train.train_steps if until_step is None else until_step
    with ExitStack() as held:
        held.enter_context(repeatable(run.train.deterministic))
        with raise_on_all_ranks():
            described = read_index(run.index)
            check_lengths(run.train, run.architecture, described, run.index)
            check_layout(run, ranks.world_size)
            check_precision(run.train)
            check_backend(run, device)
            check_repeatable(run, device)
            _check_end(run, last)
        digest, state = _agree(run, ranks, described, held)
        if state and state.step >= last:
            which = ", the last" if state.step == run.train.train_steps else ""
            _say(ranks, f"{run.output}: already at step {state.step}{which}; nothing to train")
        else:
            resumed = run.output / f"global_step{state.step}" if state else None
            with raise_on_all_ranks():
                _say(ranks, startup_log(run, ranks, device, resumed=resumed))
            deadline = Deadline(
                None if ranks.rank else end_of_job(minutes),
                earlier=read_durations(run.output / DURATIONS, ranks.world_size),
            )
            if deadline.end:
                _say(ranks, f"this job ends at {time.ctime(deadline.end)}; training saves before")
            loop = Trainer(run, ranks, device, digest=digest, state=state)
            state = loop.run(last, deadline)
        if state.step < last:
            return STOPPED
        with raise_on_all_ranks():
            if ranks.rank == 0:
                write_summary(run, resume.state_at(run.output, last, digest))
    return 0


def _check_end(run: Run, last: int) -> None:
    if not run.step < last <= run.train.train_steps:
        raise UserError(
            f"until_step: {last}: the run goes from step {run.step} to {run.train.train_steps}; "
            "give one between them"
        )


def _say(ranks: Ranks, line: str) -> None:
    if ranks.rank == 0:
        print(line, flush=True)


def _agree(
    run: Run, ranks: Ranks, described: dict[str, Any], held: ExitStack
) -> tuple[str, ResumeState | None]:
    """Let rank 0 claim the output folder and tell all where to continue."""
    found: list[Any] = [None]
    with raise_on_all_ranks():
        if ranks.rank == 0:
            held.enter_context(resume.locked(run.output))
            note = run.output.with_name(f".{run.output.name}.start")
            weights = resume.weights_digest(run.checkpoint, note)
            digest = resume.run_digest(run, index=described, weights=weights)
            state = resume.claim(
                run.output,
                digest,
                say=lambda line: _say(ranks, line),
                differences=lambda earlier: resume.differences(earlier, run),
            )
            found = [(digest, state)]
    dist.broadcast_object_list(found, src=0)
    agreed: tuple[str, ResumeState | None] = found[0]
    return agreed


class Trainer:
    """One rank's loop over the steps that are left.

    Args:
        run: the resolved run.
        ranks: this process among its peers.
        device: where the model lives.
        digest: of the run, stored with each checkpoint.
        state: where to continue; None for a run that has not begun.
    """

    def __init__(
        self,
        run: Run,
        ranks: Ranks,
        device: "torch.device",
        *,
        digest: str,
        state: ResumeState | None,
    ) -> None:

        self._run, self._ranks, self._train = run, ranks, run.train
        self._state = state or ResumeState(
            digest, run.step, run.consumed_samples, 0.0, ranks.world_size
        )
        self._last_checkpoint = f"{run.checkpoint} (the start)"
        self._last, self._deadline = run.train.train_steps, Deadline(None)
        self._stop = StopRequest(tells=ranks.rank == 0)
        self._sizes = run.train.batch_sizes
        self._schedule = Schedule(run.train)
        family = plugins.load("models/*/memory", run.architecture.family)
        self._flops_per_token = family.flops_per_token(run.architecture, run.train.sequence_length)
        with raise_on_all_ranks():
            first = ranks.rank == 0
            self._samples = training_samples(run, verify=first)
            self._validation = _validation(run, verify=first)
        # DeepSpeed takes seconds to import, which a run with nothing left to do need not wait for.
        backend = plugins.load("train/backends", run.train.backend)
        continued = run.output / f"global_step{state.step}" if state else _continued(run, ranks)
        self._engine = backend.Engine(run, ranks, device, continues=continued is not None)
        self._saving: tuple[Saving, ResumeState] | None = None
        if continued:
            self._engine.load(continued)
        if state:
            self._last_checkpoint = str(continued)
            _say(ranks, f"{run.output}: continuing at step {state.step}")
        with raise_on_all_ranks():
            self._metrics = None if ranks.rank else Metrics(run.output, done=self._state.step)

    def run(self, last: int, deadline: Deadline) -> ResumeState:
        """Do the steps that are left until `last`; the last one done is saved.

        They are fewer if SIGTERM or Ctrl-C comes, or the end of the job.
        """
        self._last, self._deadline = last, deadline
        try:
            with on_signals(self._stop.note):
                self._do_steps()
        except UserError:
            if self._ranks.rank == 0:
                job_progress.retract()
            raise
        finally:
            if self._metrics:
                self._metrics.close()
        return self._state

    def _do_steps(self) -> None:
        if self._state.step == 0:
            self._evaluate()
        coming = report_from_any_rank(ahead(self._steps()), self._ranks)
        pace = _Pace()
        while self._state.step < self._last:
            begin = time.perf_counter()
            learning_rate = self._learning_rate()
            step = next(coming)
            found = self._train_step(step, learning_rate)
            self._check_finite(found)
            self._advance(step.global_batch_size, time.perf_counter() - begin, pace)
            if found.saved:
                self._finish_saving()
            if self._due(self._train.log_interval) or self._state.step == 1:
                self._log(found, learning_rate, pace)
                pace = _Pace()
            if found.stop:
                # Whoever asked may not wait for a validation.
                self._save()
                self._finish_saving()
            if self._due(self._train.evaluation_interval):
                self._evaluate()
            if found.stop:
                break
            if self._due(self._train.save_interval) or self._state.step == self._last:
                self._save()
        self._finish_saving()
        if self._state.step < self._last:
            why = f"by {self._stop.by}" if self._stop.by else "before the end of the job"
            at = f"saved at step {self._state.step}"
            self._say(f"stopped {why}: {at}, run the same command again to go on")

    def _train_step(self, step: "Step", learning_rate: float) -> StepResult:
        try:
            found: StepResult = self._engine.train_step(
                step.micro_batches,
                learning_rate=learning_rate,
                weight_decay=self._weight_decay(),
                stop=bool(self._stop.by) or self._deadline.near(),
                saved=self._saving is not None and self._saving[0].done,
            )
        except UserError:  # of all ranks: a loss scale that can fall no more
            self._finish_saving()
            raise
        return found

    def _say(self, line: str) -> None:
        _say(self._ranks, line)

    def _due(self, interval: int) -> bool:
        return self._state.step % interval == 0 or self._state.step == self._train.train_steps

    def _num_micro_batches(self) -> int:
        block = self._train.micro_batch_size * self._engine.mesh.data.size
        return self._train.global_batch_size // block

    def _steps(self) -> "Iterator[Step]":
        return steps(
            self._samples,
            self._sizes,
            consumed_samples=self._state.consumed_samples,
            micro_batch_size=self._train.micro_batch_size,
            data_parallel_rank=self._engine.mesh.data.rank,
            data_parallel_size=self._engine.mesh.data.size,
        )

    def _batches(self, samples: Rows, consumed_samples: int) -> "Iterator[TokenRows]":
        return batches(
            samples,
            consumed_samples=consumed_samples,
            micro_batch_size=self._train.micro_batch_size,
            data_parallel_rank=self._engine.mesh.data.rank,
            data_parallel_size=self._engine.mesh.data.size,
        )

    def _learning_rate(self) -> float:
        return self._schedule.learning_rate(self._state.step, self._state.consumed_samples)

    def _weight_decay(self) -> float:
        return self._schedule.weight_decay(self._state.step, self._state.consumed_samples)

    def _check_finite(self, found: StepResult) -> None:
        # Where gradients of fp16 overflow, the step is skipped and the loss scale lowered.
        norm = 0.0 if found.skipped else found.grad_norm
        for name, value in (("loss", found.loss), ("gradient norm", norm)):
            if not math.isfinite(value):
                self._finish_saving()
                raise UserError(
                    f"step {self._state.step + 1}: {name}: {value}: training has diverged; lower "
                    "train.optimizer.learning_rate or check the data; last good checkpoint: "
                    f"{self._last_checkpoint}"
                )

    def _advance(self, samples: int, seconds: float, pace: "_Pace") -> None:
        pace.steps, pace.samples = pace.steps + 1, pace.samples + samples
        pace.seconds += seconds
        self._state = self._state._replace(
            step=self._state.step + 1,
            consumed_samples=self._state.consumed_samples + samples,
            seconds=self._state.seconds + seconds,
        )

    def _log(self, found: StepResult, learning_rate: float, pace: "_Pace") -> None:
        if not self._metrics:
            return
        step_seconds = pace.seconds / pace.steps
        tokens = pace.samples * self._train.sequence_length
        record = {
            "step": self._state.step,
            "consumed_samples": self._state.consumed_samples,
            "consumed_tokens": self._state.consumed_samples * self._train.sequence_length,
            "loss": found.loss,
            "learning_rate": learning_rate,
            **({} if found.skipped else {"grad_norm": found.grad_norm}),
            "tokens_per_second": tokens / pace.seconds,
            "model_flops_per_second": tokens / pace.seconds * self._flops_per_token,
            "step_seconds": step_seconds,
        }
        self._metrics.add(record)
        left = (self._train.train_steps - self._state.step) * step_seconds
        line = console_line(record, train_steps=self._train.train_steps, seconds_left=left)
        self._say(line)

    def _evaluate(self) -> None:
        if not self._validation:
            return
        losses = {name: self._loss(*measured) for name, measured in self._validation.items()}
        if self._metrics:
            self._metrics.add({"step": self._state.step, **metrics.validation(losses)})
        told = (f"{metrics.title(name)} {loss:.4f}" for name, loss in losses.items())
        self._say(f"step {self._state.step}/{self._train.train_steps} | {' | '.join(told)}")

    def _loss(self, samples: Samples, num_steps: int) -> float:
        num_batches = num_steps * self._num_micro_batches()
        some = islice(self._batches(samples, 0), num_batches)
        return self._engine.mean_loss(report_from_any_rank(some, self._ranks))

    def _save(self) -> None:
        """Begin to save; training may go on before all is on disk."""
        self._finish_saving()
        progress = {
            "iteration": self._state.step,
            "consumed_samples": self._state.consumed_samples,
            "consumed_tokens": self._state.consumed_samples * self._train.sequence_length,
            "run_digest": self._state.digest,
        }
        with raise_on_all_ranks():
            if self._metrics:
                self._metrics.sync()
        folder = self._run.output / resume.SAVING / f"global_step{self._state.step}"
        self._deadline.begin_saving()
        self._saving = self._engine.save(folder, progress), self._state

    def _finish_saving(self) -> None:
        """Wait until what is being saved is on disk, then let it take its place."""
        if self._saving is None:
            return
        (saving, state), self._saving = self._saving, None
        saving.wait()
        with raise_on_all_ranks():
            if self._ranks.rank == 0:
                name = f"global_step{state.step}"
                write_run(self._run.output / resume.SAVING / name / "run.yaml", self._run)
                resume.commit(self._run.output, state)
                job_progress.note(state.step)
                self._deadline.end_saving()
                note = self._run.output / DURATIONS
                write_durations(note, self._ranks.world_size, self._deadline.measured)
        self._last_checkpoint = str(self._run.output / f"global_step{state.step}")
        self._say(f"saved {self._last_checkpoint}")


def _continued(run: Run, ranks: Ranks) -> Path | None:
    """Checkpoint of another run that this one continues; None: it takes weights alone."""
    if run.train.finetune is not False:
        return None
    with raise_on_all_ranks():
        if ranks.rank == 0:
            check_begun(run)
    return run.checkpoint


@dataclass
class _Pace:
    steps: int = 0
    samples: int = 0
    seconds: float = 0.0


def _validation(run: Run, *, verify: bool) -> dict[str, tuple[Samples, int]]:
    """Samples of each validation set, and how many global batches of them are measured."""
    if not run.train.evaluation_steps:
        return {}
    found = {}
    for name in read_index(run.index)["splits"]:
        if name != "train":
            samples = Samples(run.index, split=name, data_root=run.data_root, verify=verify)
            steps = min(run.train.evaluation_steps, len(samples) // run.train.global_batch_size)
            if steps:
                found[name] = (samples, steps)
            elif verify:
                print(
                    f"{metrics.title(name)}: not measured, for its {len(samples)} samples fill no "
                    f"global batch of {run.train.global_batch_size}",
                    flush=True,
                )
    return found
