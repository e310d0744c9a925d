"""Display of a workflow that runs: a line a stage, and bars on a terminal."""

import re
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from tokamake.errors import UserError
from tokamake.run.stages import Event, Stage, Stages, StartedJob
from tokamake.runtime.console import counted, folded
from tokamake.status.workflow_process import UNLOCK, lock_text
from tokamake.units import duration, in_bytes

if TYPE_CHECKING:
    from rich.console import RenderableType

    from tokamake.status.runs import TrainingProgress

_POLL_SECONDS = 2.0
"""Time between two looks at the metrics of a training."""
_LINES_OF_A_TRAINING = 10
"""Lines of a training between its start and its end, where there is no bar."""
_LOG_LINES = 12
"""Last lines of a failed job's log."""
_TAIL_BYTES = 20_000
_BAR_WIDTH, _NARROW_BAR_WIDTH = 24, 8
_NARROW = 120
"""Columns of a terminal below which bars are narrow; their texts are folded."""
_NAME_WIDTH = 20
_MAX_BARS = 12
"""Bars of stages that run at one time."""
_TRAININGS = ("train", "finetune")
_SILENT = (
    "Building DAG of jobs...",
    "Using shell:",
    "Provided ",
    "Rules claiming more threads",
    "Conda environments: ignored",
    "Singularity containers: ignored",
    "Select jobs to execute",
    "Execute ",
    "Complete log(s):",
    "Assuming unrestricted shared filesystem",
    "Exiting because a job execution failed",
    "At least one job did not complete successfully",
    "WorkflowError:\nAt least one job did not complete successfully",
    "DAG of jobs will be updated after completion.",
    "This was a dry-run",
    "host: ",
    "Job stats:",
    "Reasons:",
    "Some jobs were triggered by provenance information",
    "Rules with provenance triggered jobs:",
    "Shutting down",
    "Elapsed time:",
    "Removing output files of failed job",
    "Touching output file",
    "Will exit after finishing currently running jobs",
)
"""Beginnings of messages of Snakemake that say nothing beyond the lines of the stages."""
_SILENT_AFTER_STOP = (
    "Terminating processes on user request",
    "Cancelling snakemake on user request",
    "RuleException:\nCalledProcessError",
)
"""The same, if the workflow was asked to stop."""
_LOCKED = "Error: Directory cannot be locked."
_ESTIMATE = "estimate: "
"""Beginning of lines that a dry run prints at its end, below the table."""
_OF_WORKFLOW = re.compile(r"tokamake: run [^\s:]+: (.*)")
"""Line of the workflow about a run; its training may write the same text."""
_OF_TRAINING = re.compile(r"((?:results/[^\s:]+: )?)(.*)")
"""Line of a training: its folder, which may be missing, and the text."""
_ERROR = re.compile(r"^tokamake [\w-]+: (?!stopped; )|No space left on device")
"""Line of a log that a job writes which has failed, also if it was asked to stop meanwhile."""
_REMEDIES = {
    "MemoryError": "give the rule more mem_mb in a profile, or use fewer workers",
    "out of memory": "give it more memory, smaller micro batches, or recompute activations",
    "No space left on device": "free some space; what is finished stays",
    "Killed": "the system killed it, mostly for its memory: give the rule more mem_mb",
    "DUE TO TIME LIMIT": "give the rule more runtime in a profile; a training continues",
}
"""Text of a log → what helps most often."""


class Display:
    """Shows events of Snakemake; a terminal has bars below the lines.

    Args:
        stream: where lines go; standard error by default.
        is_live: whether bars are drawn; only for one writer to a terminal.
        unlock: command that removes Snakemake's lock.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        is_live: bool = False,
        is_dry_run: bool = False,
        unlock: str = UNLOCK,
    ) -> None:
        self.stages = Stages()
        self.failures: list[str] = []
        """Names of jobs that have failed."""
        self.is_stopping = False
        """Whether the workflow was asked to stop: its jobs end, and have not failed."""
        self._stream = sys.stderr if stream is None else stream
        self._is_dry_run = is_dry_run
        self._unlock = unlock
        self._planned: dict[str, list[StartedJob]] = {}
        """Jobs of a dry run by stage."""
        self._estimate: list[str] = []
        self._told: set[str] = set()
        """Texts of the workflow about runs."""
        self._trainings: dict[str, TrainingProgress | None] = {}
        self._polled = 0.0
        self._printed: dict[str, tuple[int, float | None]] = {}
        """Run → step and validation loss of its last line."""
        self._live: Any = None
        if is_live:
            from rich.console import Console
            from rich.live import Live

            console = Console(file=self._stream, highlight=False)
            self._live = Live(console=console, auto_refresh=False, transient=True)
            self._live.start()

    # ---- Events ----

    def show(self, event: Event) -> None:
        """Show an event, see `snakemake_logger_plugin_tokamake.event_of`."""
        match event["kind"]:
            case "plan":
                self._plan(event["counts"])
            case "begin":
                self._begin(event)
            case "finish":
                if stage := self.stages.finish(event["jobid"]):
                    self._finish(stage)
            case "fail":
                self._fail(event)
            case "message":
                self._message(event["text"])
        self._refresh()

    def tick(self) -> None:
        """Look at the metrics of trainings, and draw the bars again."""
        if time.monotonic() - self._polled >= _POLL_SECONDS:
            self._polled = time.monotonic()
            for stage in self.stages.running:
                if stage.rule in _TRAININGS and stage.run:
                    self._poll(stage)
        self._refresh()

    def line(self, text: str) -> None:
        """Print a line above the bars."""
        if self._live is not None:
            width = self._live.console.width
            is_log = text.startswith(" ")  # the end of a log stays as it is
            shown = text if is_log or len(text) <= width else folded(text, width)
            self._live.console.print(shown, markup=False, soft_wrap=True)
        else:
            print(text, file=self._stream, flush=True)

    def output(self, text: str) -> None:
        """Show a line that a job or Snakemake has printed."""
        # The metrics of a training have what its lines of steps say; after a stop, the closing
        # line says what is saved, and launchers print how ranks end.
        if self.is_stopping and not _ERROR.search(text):
            return
        if self._is_dry_run and text.startswith(_ESTIMATE):
            self._estimate.append(text)
            return
        text = self._untold(text)
        if not text.startswith(("step ", "saved ", "Using profile")) and not _is_silent(text):
            self.line(text)

    def _untold(self, text: str) -> str:
        """A line without what the workflow has said before; empty: it says nothing more."""
        if about := _OF_WORKFLOW.fullmatch(text):
            self._told.add(about[1])
            return text
        if not (line := _OF_TRAINING.fullmatch(text)):
            return text
        folder, said = line.groups()
        for told in self._told:
            if said == told:
                return ""
            if said.startswith(f"{told}; "):
                return folder + said.removeprefix(f"{told}; ")
        return text

    def stop(self) -> None:
        """Take jobs that end from now on for stopped ones."""
        self.is_stopping = True

    def close(self) -> None:
        """Remove the bars; a dry run prints its table."""
        if self._live is not None:
            self._live.update("", refresh=True)
            self._live.stop()
            self._live = None
        if self._is_dry_run:
            self._print_planned()
            for text in self._estimate:
                self.line(text)

    # ---- Jobs ----

    def _plan(self, counts: dict[str, int]) -> None:
        is_first = not self.stages.planned
        self.stages.plan(counts)
        if is_first and not self._is_dry_run:
            names = [f"{rule} {n:,}" if n > 1 else rule for rule, n in self.stages.planned.items()]
            self.line(f"{counted(self.stages.num_planned, 'job')}: {', '.join(names)}")

    def _begin(self, event: Event) -> None:
        job = self.stages.begin(event)
        if self._is_dry_run:
            self._planned.setdefault(f"{job.rule} {job.run}".strip(), []).append(job)

    def _finish(self, stage: Stage) -> None:
        if stage.rule in _TRAININGS and stage.run:
            self._poll(stage, is_last=True)
        if not stage.is_done or stage.running:
            return
        self.line(f"{stage.name:<{_NAME_WIDTH}} {self._result(stage)}")

    def _result(self, stage: Stage) -> str:
        parts = [counted(stage.done, "job")] if stage.done > 1 else []
        parts += self._amount(stage)
        parts.append(duration(stage.seconds()))
        return f"done: {', '.join(parts)}"

    def _amount(self, stage: Stage) -> list[str]:
        if not stage.documents:
            return []
        return [
            counted(stage.documents, "document"),
            counted(stage.tokens, "token"),
            in_bytes(stage.bytes),
        ]

    def _fail(self, event: Event) -> None:
        job = self.stages.fail(event["jobid"]) if event["jobid"] is not None else None
        name = f"{event['rule']} {job.run if job else ''}".strip()
        lines = [line for path in event["log"] for line in _tail(Path(path))]
        if self.is_stopping and not any(map(_ERROR.search, lines)):
            return
        self.failures.append(name)
        self.line(
            f"{name:<{_NAME_WIDTH}} FAILED; the end of {', '.join(event['log']) or 'its output'}:"
        )
        for text in lines:
            self.line(f"    {text}")
        for key, value in event["aux"].items():
            self.line(f"    {key}: {value}")
        if remedy := _remedy(lines):
            self.line(f"    likely remedy: {remedy}")

    def _message(self, text: str) -> None:
        if _LOCKED in text:
            text = lock_text(Path(), unlock=self._unlock)
        is_expected = self.is_stopping and text.startswith(_SILENT_AFTER_STOP)
        if not _is_silent(text) and not is_expected:
            self.line(text)

    # ---- Training ----

    def _poll(self, stage: Stage, *, is_last: bool = False) -> None:
        """Read the progress of a training; print a line if it is due."""
        from tokamake.status.runs import described, read_training

        try:
            training = read_training(Path(), stage.run, now=time.time())
        except (OSError, UserError, ValueError, KeyError):  # being written, or of another start
            return
        if training is None or training.silent_seconds > stage.seconds():
            return  # lines of an earlier start
        self._trainings[stage.run] = training
        step, loss = self._printed.get(stage.run, (-1, None))
        is_due = training.step - step >= max(1, training.steps // _LINES_OF_A_TRAINING)
        has_validated = training.validation_loss not in (None, loss)
        is_new = (training.step, training.validation_loss) != (step, loss)
        if is_new and (is_last or has_validated or (is_due and self._live is None)):
            self._printed[stage.run] = training.step, training.validation_loss
            self.line(f"{stage.name:<{_NAME_WIDTH}} {described(training)}")

    # ---- Bars ----

    def _refresh(self) -> None:
        if self._live is not None and not self._is_dry_run:
            self._live.update(self._bars(), refresh=True)

    def _bars(self) -> "RenderableType":
        """A line a running stage, and one of all jobs."""
        from rich.constrain import Constrain
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        table = Table.grid(padding=(0, 1))
        table.add_column(no_wrap=True, min_width=_NAME_WIDTH)
        is_narrow = self._live.console.width < _NARROW
        table.add_column(width=_NARROW_BAR_WIDTH if is_narrow else _BAR_WIDTH)
        table.add_column()
        if self.is_stopping:
            table.add_row("stopping", "", "jobs save and end; a second Ctrl-C kills them")
        running = self.stages.running
        for stage in running[:_MAX_BARS]:
            done, total, text = self._progress(stage)
            table.add_row(stage.name, ProgressBar(total=total, completed=done), text)
        if len(running) > _MAX_BARS:
            table.add_row("", "", f"and {counted(len(running) - _MAX_BARS, 'stage')} more")
        if total := self.stages.num_planned:
            done = self.stages.num_done
            bar = ProgressBar(total=total, completed=done)
            table.add_row("all jobs", bar, f"{done:,} of {total:,}")
        # A ^C that the terminal shows must fit, or the cursor is a line below its place.
        return Constrain(table, self._live.console.width - len("^C "))

    def _progress(self, stage: Stage) -> tuple[float, float, str]:
        """Done, total and text of a stage's bar."""
        from tokamake.status.runs import described

        if training := self._trainings.get(stage.run) if stage.rule in _TRAININGS else None:
            return training.step, max(training.steps, 1), described(training)
        parts = [f"{stage.done:,} of {counted(stage.total, 'job')}"] if stage.total > 1 else []
        parts += [*self._amount(stage), duration(round(stage.seconds()))]
        if (left := stage.seconds_left()) is not None:
            parts.append(f"{duration(round(left))} left")
        return stage.done, stage.total, ", ".join(parts)

    # ---- Dry run ----

    def _print_planned(self) -> None:
        if not self._planned:
            return
        width = max(map(len, self._planned))
        for name, jobs in self._planned.items():
            reasons = [*dict.fromkeys(reason for job in jobs for reason in job.reasons)]
            why = "; ".join(reason[:1].lower() + reason[1:] for reason in reasons)
            self.line(f"{name:<{width}}  {counted(len(jobs), 'job'):>10}  {why}")
        total = sum(map(len, self._planned.values()))
        self.line(f"{counted(total, 'job')} would run; nothing was changed")
        self._planned = {}


def _is_silent(text: str) -> bool:
    return text.strip() == "" or text.lstrip().startswith(_SILENT)


def _tail(path: Path) -> list[str]:
    """Last lines of a log that are not empty."""
    with suppress(OSError), path.open("rb") as stream:
        stream.seek(max(0, path.stat().st_size - _TAIL_BYTES))
        text = stream.read().decode(errors="replace")
        return [line for line in text.splitlines() if line.strip()][-_LOG_LINES:]
    return ["(no log)"]


def _remedy(lines: Iterable[str]) -> str | None:
    text = "\n".join(lines)
    return next((remedy for mark, remedy in _REMEDIES.items() if mark in text), None)
