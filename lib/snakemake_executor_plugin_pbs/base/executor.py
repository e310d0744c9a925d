"""Snakemake's interface to the executor: passes jobs to the tracker and reports its events.

Snakemake's status thread calls the commands of the batch system. The main thread only adds jobs,
and deletes them when it is interrupted.
"""

import shlex
import shutil
import signal
import threading
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo
from snakemake_interface_executor_plugins.executors.remote import RemoteExecutor
from snakemake_interface_executor_plugins.jobs import JobExecutorInterface

from . import failure, identity, snakemake_internals
from .commands import Commands, Dialect
from .errors import UserError
from .records import Records
from .request import SubmitRequest, queue_limits
from .session import Event, EventKind, Limits, Task
from .settings import BatchSettings
from .tracker import Tracker
from .user_file import missing_values, misspelled_rules, read_values

SHORTEST_INTERVAL = 0.1  # seconds, if Snakemake is started with an interval of 0
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class BatchExecutor(RemoteExecutor):
    """Runs each job of a workflow as a job of a batch system, which a subclass names."""

    dialect: Dialect
    settings: type[BatchSettings]
    commands_class: type[Commands]
    build_request: Callable[..., SubmitRequest]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # The status thread starts before __post_init__.
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._ready = threading.Event()
        self._added: list[Task] = []
        self._added_lock = threading.Lock()
        self._handlers: dict[int, Any] = {}
        super().__init__(*args, **kwargs)

    def __post_init__(self) -> None:
        if not self.workflow.storage_settings.assume_common_workdir:
            raise UserError(f"{self.dialect.label}: requires a file system that all nodes share")
        if shutil.which(self.dialect.submit) is None:
            raise UserError(
                f"no {self.dialect.submit} on PATH; run Snakemake on a machine that has the "
                f"commands of {self.dialect.system}"
            )
        settings = self.workflow.executor_settings or self.settings()
        self.user = read_values(settings)
        for message in misspelled_rules(
            self.user, snakemake_internals.rule_and_group_names(self.workflow)
        ):
            self._warn(message)
        self._check_values(settings)
        folder = Path(self.workflow.persistence.path).absolute() / self.dialect.label
        if reason := self.dialect.refused(folder):
            raise UserError(f"{folder}: {reason}; run Snakemake in another folder")
        interval = self.workflow.remote_execution_settings.seconds_between_status_checks
        limits = Limits(
            interval=max(float(interval), SHORTEST_INTERVAL),
            patience=settings.patience,
            settling=settings.command_timeout + 30,
            chunk=settings.jobs_per_call,
            queued=queue_limits(settings.max_queued),
        )
        self.commands = self.commands_class(settings.command_timeout)
        try:
            self.tracker = Tracker(
                self.commands, Records(folder), limits=limits, warn=self._warn,
                stopping=self._stop.is_set, dialect=self.dialect,
            )  # fmt: skip
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(f"{folder}: a record.json is damaged ({error}); delete it") from None
        self._ready.set()

    def _check_values(self, settings: BatchSettings) -> None:
        """Raise an error that names all missing values, before any job is submitted."""
        jobs: dict[str, Any] = {}
        planned = snakemake_internals.planned_jobs(self.workflow) if settings.required else ()
        for job in planned:
            name = snakemake_internals.group_or_rule(job)
            if name not in jobs and not job.is_local:
                jobs[name] = job.resources
        if message := missing_values(settings, self.user, jobs=jobs.items()):
            raise UserError(message)

    # -- the main thread

    def run_jobs(self, jobs: list[JobExecutorInterface]) -> None:
        """Add jobs; the status thread submits them."""
        self._catch_signals()
        super().run_jobs(jobs)
        self._wake.set()

    def run_job(self, job: JobExecutorInterface) -> None:
        """Add one job."""
        wildcards = {} if job.is_group() else snakemake_internals.wildcards(job)
        body = self.jobscript.format(
            properties=job.properties(), exec_job=self.format_job_exec(job)
        )
        task = Task(
            key=identity.key(job),
            rule=str(job.resources.get("job_name") or identity.name(job)),
            wildcards=wildcards,
            request=self.request(job),
            body=f"{body}\n",
            outputs=identity.outputs(job),
            fingerprint=identity.fingerprint(job),
            job=job,
            next_request=lambda: snakemake_internals.at_next_attempt(job, self.request),
        )
        with self._added_lock:
            self._added.append(task)

    def request(self, job: JobExecutorInterface) -> SubmitRequest:
        return self.build_request(identity.name(job), job.threads, job.resources, self.user)

    def get_job_exec_prefix(self, job: JobExecutorInterface) -> str:  # noqa: ARG002
        """Command that changes to the folder in which Snakemake was started."""
        return f"cd {shlex.quote(str(self.workflow.workdir_init))}"

    def cancel(self) -> None:
        """Delete all jobs of this controller, even if the status thread is busy with them."""
        self._stop.set()
        self._ignore_signals()
        self._end_thread()
        errors = self.tracker.cancel() if self._ready.is_set() else []
        for message in errors:
            self.logger.error(
                f"{self.dialect.label}: jobs may still run: {message}; the next run of Snakemake "
                "stops them"
            )
        self.shutdown()

    def cancel_jobs(self, active_jobs: list[SubmittedJobInfo]) -> None:
        """Do nothing: `cancel` deletes all jobs. This list lacks jobs being checked."""

    def shutdown(self) -> None:
        """Stop the status thread."""
        self._stop.set()
        self._end_thread()
        super().shutdown()
        self._restore_signals()

    def _end_thread(self) -> None:
        snakemake_internals.end_status_thread(self)
        self._wake.set()
        if self._ready.is_set():
            self.commands.stop_status()
        snakemake_internals.join_status_thread(self)

    def _catch_signals(self) -> None:
        """End the workflow at once on SIGTERM too; Snakemake would wait for all jobs."""
        if self._handlers or threading.current_thread() is not threading.main_thread():
            return

        def interrupt(number: int, frame: object) -> None:
            raise KeyboardInterrupt

        self._handlers = {number: signal.signal(number, interrupt) for number in SIGNALS}

    def _ignore_signals(self) -> None:
        if self._handlers and threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                signal.signal(number, lambda *_: None)

    def _restore_signals(self) -> None:
        if self._handlers and threading.current_thread() is threading.main_thread():
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            self._handlers = {}

    # -- the status thread

    async def check_active_jobs(
        self, active_jobs: list[SubmittedJobInfo]
    ) -> AsyncGenerator[SubmittedJobInfo, None]:
        """Add new jobs to the tracker, do its next step, and report its events."""
        if self._ready.is_set() and not self._stop.is_set():
            with self._added_lock:
                added, self._added = self._added, []
            for task in added:
                self.tracker.add(task)
            for event in self.tracker.step():
                self._report(event)
        for info in active_jobs:
            yield info

    async def sleep(self) -> None:
        """Wait until the next step is due or a job is added."""
        seconds = self.tracker.wait_seconds() if self._ready.is_set() else SHORTEST_INTERVAL
        if self._wake.wait(seconds):
            self._wake.clear()

    def _report(self, event: Event) -> None:
        job = event.task.job
        if job is None:  # a leftover of an earlier run
            return
        info = SubmittedJobInfo(job, external_jobid=event.job_id)
        if event.kind is EventKind.SUBMITTED:
            note = event.message or "submitted"
            self.logger.info(
                f"Job {job.jobid} ({identity.title(job)}) is {event.job_id} in "
                f"{self.dialect.system}: {note}."
            )
            # Our own list of jobs replaces the base class's.
            super(RemoteExecutor, self).report_job_submission(info)
        elif event.kind is EventKind.SUCCEEDED:
            if "exit-status file" in event.message:
                self._warn(f"job {event.job_id} of {identity.title(job)} {event.message}")
            self.report_job_success(info)
        else:
            if not event.retry:
                snakemake_internals.prevent_retry(job)
            self._report_failure(info, event)

    def _report_failure(self, info: SubmittedJobInfo, event: Event) -> None:
        message = f"{self.dialect.system} job {event.job_id} {event.message}. "
        log = event.log if event.log and event.log.exists() else None
        if not failure.needs_own_text(info.job, event.submitted):
            self.report_job_error(info, msg=message, aux_logs=[str(log)] if log else [])
            return
        self.logger.error(
            failure.text(
                info.job, message, log, submitted=event.submitted, job_id=event.job_id,
                show_logs=snakemake_internals.shows_failed_logs(self.workflow),
            )
        )  # fmt: skip
        snakemake_internals.report_failure(self.workflow, info.job)

    def _warn(self, message: str) -> None:
        self.logger.warning(f"{self.dialect.label}: {message}")
