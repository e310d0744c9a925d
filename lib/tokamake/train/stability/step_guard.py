"""Watches the steps of a run for bad numbers, journals them, and says where training continues."""

from collections.abc import Callable
from typing import Any

from tokamake.checkpoint.native.resume_state import GuardState, ResumeState
from tokamake.config.resolved_run import Run
from tokamake.data.samples.steps import StepBatch
from tokamake.errors import UserError
from tokamake.runtime.ranks import Ranks
from tokamake.train.bad_steps import ACTED, BadStep, described
from tokamake.train.batch import SampleIds
from tokamake.train.checkpoints.resume import ResumePoint
from tokamake.train.sampler import HasSpans
from tokamake.train.stability.events import EventLog
from tokamake.train.stability.spikes import find_fault
from tokamake.train.step_result import StepResult


class StepGuard:
    """Guard of a run's steps; all ranks call its methods together.

    Attributes:
        state: state of the guard for the next checkpoint.
    """

    def __init__(
        self, run: Run, ranks: Ranks, *, engine: Any, samples: HasSpans | None, start: ResumeState
    ) -> None:
        self._settings, self._precision = run.train.on_bad_step, run.train.precision
        self._ranks, self._engine, self._has_documents = ranks, engine, samples is not None
        self._events = EventLog(run, ranks, samples=samples, start=start)
        left_out = self._events.history.left_out
        self.state: GuardState = start.guard.until(start.step).after_skip(*left_out)
        self.left_out = (*run.train.skip_data, *((step, step) for step in self.state.skipped))
        """First and last step of ranges whose data are left out."""

    def find_fault(self, loss: float, grad_norm: float) -> BadStep | None:
        """Find the fault of a step before its update; see `spikes.find_fault`."""
        return find_fault(self._settings, self.state.recent, loss=loss, grad_norm=grad_norm)

    def note(self, step: int, result: StepResult) -> None:
        """Keep loss and gradient norm of a step, or that it had no update."""
        if result.bad and result.bad.action == "lower_rate":
            factor = self.state.rate_factor * self._settings.rate_factor
            self.state = self.state._replace(rate_factor=factor)
        if result.bad and not result.bad.updates:
            self.state = self.state.after_skip(step)
        elif result.updated and result.has_labels and self._settings.spike != "ignore":
            window = self._settings.spike_window
            self.state = self.state.after_good(result.loss, result.grad_norm, window=window)

    def respond(
        self,
        step: int,
        result: StepResult,
        *,
        batch: StepBatch,
        newest: Callable[[], ResumePoint | None],
    ) -> ResumePoint | None:
        """Journal a bad step and print its consequence; raise if training must not continue.

        Returns:
            Checkpoint to go back to; None: training continues with the next step.
        """
        bad, back, problem = self._decide(result, newest)
        ranks = self._engine.bad_ranks()
        facts: dict[str, Any] = {"ranks": ranks}
        if back:
            facts["checkpoint"] = f"global_step{back.state.step}"
        reason = bad.reason
        if self._settings.recompute and not result.updated:
            facts["recomputed"] = self._recompute(batch)
            reason += f" ({facts['recomputed']})"
        self._events.add(step, result, bad=bad, batch=batch, **facts)
        if problem:
            raise UserError(f"step {step}: {reason}: {problem}")
        self._ranks.print_once(
            f"step {step}: {reason}, from {described(ranks)}: {self._following(bad, back)}; "
            f"its documents are in {self._events.path}"
        )
        return back

    def _decide(
        self, result: StepResult, newest: Callable[[], ResumePoint | None]
    ) -> tuple[BadStep, ResumePoint | None, str]:
        """The bad step with the action that follows, where to go back to, and why to stop."""
        assert result.bad
        bad, budget = result.bad, self._settings.budget
        if bad.action == "stop":
            return bad, None, self._divergence(result)
        stopped = bad._replace(action="stop")
        if bad.action in ACTED and self._events.history.num_acted >= budget:
            problem = f"train.on_bad_step.budget {budget} is used up"
            return stopped, None, f"{problem}; {self._divergence(result)}, or raise the budget"
        if bad.action != "rewind":
            return bad, None, ""
        if back := newest():
            return bad, back, ""
        if not result.updated:
            return bad._replace(action="skip"), None, ""
        problem = "the weights are updated, and there is no checkpoint to go back to"
        return stopped, None, f"{problem}; lower train.save_interval, and start again"

    def _recompute(self, batch: StepBatch) -> str:
        """Whether the same data and weights give bad numbers again."""
        loss, grad_norm = self._engine.recompute(
            batch.micro_batches, samples=SampleIds(batch.sample_numbers)
        )
        return "reproducible" if self.find_fault(loss, grad_norm) else "transient"

    def close(self) -> None:
        self._events.close()

    def _divergence(self, result: StepResult) -> str:
        remedy = "training has diverged"
        if self._precision == "fp16":
            remedy += f" at a loss scale of {result.loss_scale:g}; set train.precision to bf16"
        if not self._has_documents:
            return f"{remedy}; lower train.optimizer.learning_rate"
        return (
            f"{remedy}; check the documents of the step ({self._events.path}), or lower "
            "train.optimizer.learning_rate and set train.on_change to continue"
        )

    def _following(self, bad: BadStep, back: ResumePoint | None) -> str:
        if back:
            return f"going back to {back.resumed}, the data of the step are left out"
        return {
            "journal": "training continues",
            "skip": "the step is skipped",
            "lower_rate": "the step is skipped, and the learning rate is multiplied by "
            f"{self._settings.rate_factor:g}",
        }[bad.action]
