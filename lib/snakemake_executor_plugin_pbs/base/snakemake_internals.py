"""The only place that touches names of Snakemake beyond its interface for executors.

docs/explanation/workflow.md lists the names. A version of Snakemake that changes one fails by name
in tests/pbs_executor/base/test_snakemake_internals.py. Checked with Snakemake 9.27.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Result = TypeVar("Result")


def planned_jobs(workflow: Any) -> Iterable[Any]:
    """Jobs that this run of the workflow will start, single ones also where they form groups."""
    jobs: Iterable[Any] = workflow.dag.needrun_jobs()
    return jobs


def group_or_rule(job: Any) -> str:
    """Name of the group that a single job belongs to, or else of its rule."""
    return str(job.group or job.rule.name)


def rule_and_group_names(workflow: Any) -> set[str]:
    """Names of all rules and groups of a workflow."""
    names = {str(name) for rule in workflow.rules for name in (rule.name, rule.group) if name}
    return names | set(map(str, workflow.group_settings.overwrite_groups.values()))


def shows_failed_logs(workflow: Any) -> bool:
    """Whether `--show-failed-logs` is given."""
    return bool(workflow.output_settings.show_failed_logs)


def members(job: Any) -> list[Any]:
    """Jobs of a group, or the job itself."""
    return list(job.jobs) if job.is_group() else [job]


def wildcards(job: Any) -> dict[str, str]:
    return dict(job.wildcards_dict)


def code(job: Any) -> list[Any]:
    rule = job.rule
    return [rule.name, rule.shellcmd, rule.script, rule.notebook, rule.wrapper]


def params(job: Any) -> list[Any]:
    return list(job.params)


def is_ancient(path: Any) -> bool:
    return bool(getattr(path, "flags", {}).get("ancient"))


def prevent_retry(job: Any) -> None:
    """Count all attempts of a job as made, so that its next failure is final."""
    job.attempt = job.restart_times + 1


def at_next_attempt(job: Any, ask: Callable[[Any], Result]) -> Result:
    """Result of a function for a job in its next attempt, which may have other resources.

    Resources that depend on sizes of inputs are evaluated in an event loop. Another one may run in
    this thread, and they would be TBD.
    """

    def ask_then() -> Result:
        attempt = job.attempt
        job.attempt = attempt + 1
        try:
            return ask(job)
        finally:
            job.attempt = attempt
            assert job.resources is not None  # evaluated again in this thread

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(ask_then).result()


def report_failure(workflow: Any, job: Any) -> None:
    """Tell the scheduler that a job failed, without Snakemake's own error text."""
    workflow.scheduler.error_callback(job)


def end_status_thread(executor: Any) -> None:
    """Let the status thread of a `RemoteExecutor` end after its current check."""
    with executor.lock:
        executor.wait = False


def join_status_thread(executor: Any) -> None:
    executor.wait_thread.join()
