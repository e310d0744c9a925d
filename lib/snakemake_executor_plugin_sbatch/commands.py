"""Slurm's commands, sbatch, squeue and scancel, and what they say."""

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from snakemake_executor_plugin_pbs.commands import Commands, Done
from snakemake_executor_plugin_pbs.dialect import Dialect
from snakemake_executor_plugin_pbs.replies import Answer

from .states import read

# What sbatch says where the request did not reach the controller, or met a limit on jobs.
_LATER = (
    "unable to contact slurm controller", "connection refused", "temporarily unable",
    "unable to resolve", "no route to host", "submitjob", "maxjobcount",
)  # fmt: skip
# What it says where it lost the controller on the way: whether the job is there is unknown.
_UNSURE = ("timed out", "zero bytes were transmitted", "connection reset", "communication")
_NO_JOB = ("invalid job id", "already completing or completed")

# Each field ends with a bar; squeue takes any text after the colon for that.
FORMAT = "JobID:|,State:|,Reason:|,exit_code:|"


def _options(name: str, printed: Path) -> tuple[str, ...]:
    # Slurm fills in what follows a percent sign.
    output = str(printed).replace("%", "%%")
    # A job whose node dies begins again under its id, as does one that makes room for another.
    return "--parsable", "--requeue", "--job-name", name, "--output", output


SLURM = Dialect(
    "slurm", "Slurm", "sbatch", "squeue", "scancel", "scontrol release", "SLURM_JOB_ID", read,
    _options,
)  # fmt: skip


# What a job or its ranks would take for their own if Snakemake itself runs in a job.
_OF_A_JOB = re.compile(
    r"(SLURM|SLURMD|MASTER|TORCHELASTIC|PMI|PMIX|PALS|OMPI|MPI)_.*"
    r"|RANK|WORLD_SIZE|LOCAL_(RANK|SIZE|WORLD_SIZE)|PBS_JOB_END_TIME|JOB_PROGRESS_FILE"
)


def outside(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without what a job has set, which sbatch would hand on to other jobs."""
    return {
        name: value
        for name, value in environment.items()
        if name == "SLURM_CONF" or not _OF_A_JOB.fullmatch(name)
    }


class SlurmCommands(Commands):
    """The controller, through its commands."""

    submitting = ("sbatch",)
    deleting = ("scancel",)
    later, unsure, no_job = _LATER, _UNSURE, _NO_JOB

    def environment(self) -> dict[str, str]:
        """What the commands are run in, and jobs in turn."""
        return outside(os.environ)

    def submitted(self, output: str) -> str:
        """Id of the job in what sbatch printed, which may name the cluster, too."""
        job_id = output.strip().rpartition("\n")[2].partition(";")[0]
        return job_id if job_id.isdigit() else ""

    def status(self, ids: Sequence[str]) -> Answer:
        """Ask once about all these jobs; an answer with a fault where it cannot be used."""
        listed = ["--states=all", f"--jobs={','.join(ids)}", f"--Format={FORMAT}"]
        try:
            done = self._run(["squeue", "--noheader", *listed], stoppable=True)
        except subprocess.TimeoutExpired:
            return Answer(fault=f"no answer in {self.timeout:g} s")
        return parse(done, ids)

    def finding(self, name: str) -> list[str]:
        """The command that prints ids of jobs of a name."""
        return ["squeue", "--noheader", f"--name={name}", "--format=%i"]


def parse(done: Done, ids: Sequence[str]) -> Answer:
    """Take a reply of squeue apart.

    Args:
        done: how squeue ended. A job that it does not list is one that Slurm has forgotten, but
            only where it ended well. Asked about a single forgotten job, it fails and says so.
        ids: what it was asked about.
    """
    if done.code:
        if len(ids) == 1 and "invalid job id" in done.errors.lower():
            return Answer(unknown=set(ids))
        return Answer(fault=f"exit status {done.code}: {done.message}")
    answer = Answer()
    for line in done.output.splitlines():
        fields = [text.strip() for text in line.split("|")]
        if len(fields) >= 4 and fields[0].isdigit():
            answer.jobs[fields[0]] = {
                "state": fields[1], "reason": fields[2], "exit_code": fields[3],
            }  # fmt: skip
    answer.unknown = set(ids) - set(answer.jobs)
    return answer
