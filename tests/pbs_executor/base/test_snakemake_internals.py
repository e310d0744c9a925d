"""Names of Snakemake beyond its interface for executors. Each test fails by name."""

import json
from collections.abc import AsyncGenerator
from typing import Any
from unittest.mock import MagicMock

import pytest
from snakemake.jobs import GroupJob
from snakemake.scheduling.job_scheduler import JobScheduler
from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo
from snakemake_interface_executor_plugins.executors.remote import RemoteExecutor
from snakemake_interface_executor_plugins.jobs import JobExecutorInterface

from snakemake_executor_plugin_pbs.base import snakemake_internals
from tests.support.pbs_servers import stand_in
from tests.support.snakemake_server import start

pytestmark = pytest.mark.usefixtures("snakemake_version")

SNAKEFILE = """
import json
from snakemake_executor_plugin_pbs.base import snakemake_internals as internals

rule all:
    input: "out/a.txt"

rule make:
    input: ancient("in.txt"), "other.txt"
    output: "out/{name}.txt"
    params: number=5, text="x y"
    retries: 2
    resources: runtime=lambda wildcards, input, attempt: 10 * attempt + 0 * input.size_mb
    shell: "touch {output}"

rule member:
    group: "small"
    output: "member"
    shell: "touch {output}"

def attempts(job):
    internals.prevent_retry(job)
    return [job.attempt, job.restart_times]

def runtimes(job):
    later = internals.at_next_attempt(job, lambda each: each.resources["runtime"])
    return [job.resources["runtime"], later, job.resources["runtime"], job.attempt]

FUNCTIONS = {
    "at_next_attempt": runtimes,
    "planned_jobs": lambda job: sorted(str(each) for each in internals.planned_jobs(workflow)),
    "group_or_rule": internals.group_or_rule,
    "rule_and_group_names": lambda job: sorted(internals.rule_and_group_names(workflow)),
    "shows_failed_logs": lambda job: internals.shows_failed_logs(workflow),
    "members": lambda job: [str(each) for each in internals.members(job)],
    "wildcards": internals.wildcards,
    "code": internals.code,
    "params": internals.params,
    "is_ancient": lambda job: [internals.is_ancient(path) for path in job.input],
    "prevent_retry": attempts,
}

onstart:
    jobs = {job.rule.name: job for job in internals.planned_jobs(workflow)}
    results = {}
    for name, function in FUNCTIONS.items():
        try:
            results[name] = function(jobs["make"])
        except Exception as error:  # one test shall fail, not all
            results[name] = repr(error)
    with open("results.json", "w") as file:
        json.dump(results, file)
"""

EXPECTED = {
    "at_next_attempt": [10, 20, 10, 1],
    "planned_jobs": ["all", "make"],
    "group_or_rule": "large",
    "rule_and_group_names": ["all", "large", "make", "member", "small"],
    "shows_failed_logs": True,
    "members": ["make"],
    "wildcards": {"name": "a"},
    "code": ["make", "touch {output}", None, None, None],
    "params": [5, "x y"],
    "is_ancient": [True, False],
    "prevent_retry": [3, 2],
}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Result of each function for a job of the rule `make`, or its error as text."""
    folder = tmp_path_factory.mktemp("workflow")
    (folder / "Snakefile").write_text(SNAKEFILE)
    (folder / "in.txt").touch()
    (folder / "other.txt").touch()
    # Local executors ignore groups.
    options = ("--executor", "pbs", "--jobs", "1", "--show-failed-logs", "--groups", "make=large")
    done = start(
        (*options, "--seconds-between-status-checks", "1"),
        folder,
        stand_in(folder / "server").environment,
    )
    assert done.returncode == 0, done.stderr
    values: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return values


@pytest.mark.parametrize("name", EXPECTED)
def test_function_of_a_planned_job(results: dict[str, Any], name: str) -> None:
    assert results[name] == EXPECTED[name]


def test_members_of_a_group_are_its_jobs() -> None:
    group = MagicMock(spec=GroupJob, jobs=frozenset(["a"]))
    assert "jobs" in dir(GroupJob)
    assert snakemake_internals.members(group) == ["a"]


def test_report_failure_calls_the_scheduler() -> None:
    workflow = MagicMock(scheduler=MagicMock(spec=JobScheduler))
    snakemake_internals.report_failure(workflow, "job")
    workflow.scheduler.error_callback.assert_called_once_with("job")


class Idle(RemoteExecutor):
    """An executor without jobs."""

    def run_job(self, job: JobExecutorInterface) -> None:
        """Do nothing."""

    async def check_active_jobs(
        self, active_jobs: list[SubmittedJobInfo]
    ) -> AsyncGenerator[SubmittedJobInfo, None]:
        """Yield the jobs."""
        for job in active_jobs:
            yield job

    def cancel_jobs(self, active_jobs: list[SubmittedJobInfo]) -> None:
        """Do nothing."""

    async def sleep(self) -> None:
        """Do not wait."""


def test_the_status_thread_ends() -> None:
    workflow = MagicMock()
    settings = workflow.remote_execution_settings
    settings.jobname, settings.jobscript = "{jobid}", None
    settings.max_status_checks_per_second, settings.immediate_submit = 1000, False
    workflow.executor_plugin.common_settings.init_seconds_before_status_checks = 0
    executor = Idle(workflow, MagicMock())
    assert executor.wait_thread.is_alive()
    snakemake_internals.end_status_thread(executor)
    snakemake_internals.join_status_thread(executor)
    assert not executor.wait_thread.is_alive()
