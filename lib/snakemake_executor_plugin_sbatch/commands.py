"""Calls of Slurm's commands sbatch, squeue and scancel, and parsers of their output."""

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from snakemake_executor_plugin_pbs.base.commands import (
    CommandResult,
    Commands,
    Dialect,
    StatusReply,
)

from .states import read

# Errors of sbatch: the request did not reach slurmctld, or a limit on jobs is reached.
_LATER = (
    "unable to contact slurm controller", "connection refused", "temporarily unable",
    "unable to resolve", "no route to host", "submitjob", "maxjobcount",
)  # fmt: skip
# Errors of sbatch: the connection was lost, so slurmctld may have the job.
_UNSURE = ("timed out", "zero bytes were transmitted", "connection reset", "communication")
_NO_JOB = ("invalid job id", "already completing or completed")

# Each field ends with a bar: squeue prints the text after the colon.
FORMAT = "JobID:|,State:|,Reason:|,exit_code:|,Name:|,BatchHost:|,NodeList:|"


def _options(name: str, output: Path) -> tuple[str, ...]:
    # Slurm replaces patterns such as %j in the path; %% is a percent sign.
    pattern = str(output).replace("%", "%%")
    # With --requeue, a job keeps its id and restarts after a node failure or preemption.
    return "--parsable", "--requeue", "--job-name", name, "--output", pattern


def avoid(arguments: Sequence[str], hosts: Sequence[str]) -> tuple[str, ...]:
    """Options that exclude hosts, besides the hosts that the user excludes.

    sbatch obeys only the last --exclude.
    """
    excluded, others, options = [*hosts], list[str](), iter(arguments)
    for option in options:
        if option in ("-x", "--exclude"):
            excluded.append(next(options, ""))
        elif match := re.fullmatch(r"(?:-x|--exclude=)(.*)", option):
            excluded.append(match[1])
        else:
            others.append(option)
    return (*others, f"--exclude={','.join(filter(None, excluded))}")


SLURM = Dialect(
    "slurm", "Slurm", "sbatch", "squeue", "scancel", "scontrol release", "SLURM_JOB_ID", read,
    _options, avoid,
)  # fmt: skip


# Variables of the job in which Snakemake itself may run; a new job and its ranks must not see them.
_OF_A_JOB = re.compile(
    r"(SLURM|SLURMD|MASTER|TORCHELASTIC|PMI|PMIX|PALS|OMPI|MPI)_.*"
    r"|RANK|WORLD_SIZE|LOCAL_(RANK|SIZE|WORLD_SIZE)|PBS_JOB_END_TIME|JOB_(PROGRESS|FAILURE|FAULTY_HOSTS)_FILE|JOB_CONTAINER"
)


def outside(environment: Mapping[str, str]) -> dict[str, str]:
    """Environment without the variables of a job, which sbatch would pass to new jobs."""
    return {
        name: value
        for name, value in environment.items()
        if name == "SLURM_CONF" or not _OF_A_JOB.fullmatch(name)
    }


class SlurmCommands(Commands):
    """Slurm, called by its commands."""

    submit_command, delete_command = "sbatch", "scancel"
    later, unsure, no_job = _LATER, _UNSURE, _NO_JOB

    def environment(self) -> dict[str, str]:
        """Environment of the commands, and so of the jobs."""
        return outside(os.environ)

    def parse_job_id(self, output: str) -> str:
        """Job id in the output of sbatch, without the name of the cluster."""
        job_id = output.strip().rpartition("\n")[2].partition(";")[0]
        return job_id if job_id.isdigit() else ""

    def status(self, ids: Sequence[str]) -> StatusReply:
        """Ask for the status of jobs with one call; the answer has a fault if it is unusable."""
        options = ["--states=all", f"--jobs={','.join(ids)}", f"--Format={FORMAT}"]
        try:
            result = self._run(["squeue", "--noheader", *options], stoppable=True)
        except subprocess.TimeoutExpired:
            return StatusReply(fault=f"no answer in {self.timeout:g} s")
        return parse(result, ids)

    def find_command(self, name: str) -> list[str]:
        return ["squeue", "--noheader", f"--name={name}", "--format=%i"]


def parse(result: CommandResult, ids: Sequence[str]) -> StatusReply:
    """Parse a reply of squeue.

    If squeue succeeds, Slurm does not know the jobs that it does not list. For a single unknown job
    it fails, with an error that says so.
    """
    if result.code:
        if len(ids) == 1 and "invalid job id" in result.errors.lower():
            return StatusReply(unknown=set(ids))
        return StatusReply(fault=f"exit status {result.code}: {result.message}")
    answer = StatusReply()
    for line in result.output.splitlines():
        fields = [text.strip() for text in line.split("|")]
        if len(fields) >= 4 and fields[0].isdigit():
            answer.jobs[fields[0]] = {
                "state": fields[1], "reason": fields[2], "exit_code": fields[3],
            }  # fmt: skip
            if len(fields) >= 5 and fields[4]:
                answer.jobs[fields[0]]["Job_Name"] = fields[4]
            if len(fields) >= 7:
                answer.jobs[fields[0]] |= {"batch_host": fields[5], "nodes": fields[6]}
    answer.unknown = set(ids) - set(answer.jobs)
    return answer
