"""Slurm's commands: sbatch, squeue, scancel, each with a time limit and its errors sorted."""

import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from snakemake_executor_plugin_pbs.commands import (
    Commands,
    Done,
    Later,
    Refused,
    Unreachable,
    Unsure,
)
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
    r"|RANK|WORLD_SIZE|LOCAL_(RANK|SIZE|WORLD_SIZE)|PBS_JOB_END_TIME"
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

    def environment(self) -> dict[str, str]:
        """What the commands are run in, and jobs in turn."""
        return outside(os.environ)

    def submit(self, arguments: Sequence[str], script: Path) -> str:
        """Submit a job; returns its id.

        Raises:
            Refused, Later, Unsure: as their names say.
        """
        try:
            done = self._run(["sbatch", *arguments, str(script)])
        except subprocess.TimeoutExpired:
            raise Unsure(f"no answer in {self.timeout:g} s") from None
        job_id = done.output.strip().rpartition("\n")[2].partition(";")[0]
        if done.code == 0 and job_id.isdigit():
            return job_id
        message = done.message.lower()
        if any(text in message for text in _LATER):
            raise Later(done.message)
        if done.code <= 0 or any(text in message for text in _UNSURE):
            raise Unsure(done.message)
        raise Refused(f"{done.message} (exit status {done.code})")

    def status(self, ids: Sequence[str]) -> Answer:
        """Ask once about all these jobs; an answer with a fault where it cannot be used."""
        listed = ["--states=all", f"--jobs={','.join(ids)}", f"--Format={FORMAT}"]
        try:
            done = self._run(["squeue", "--noheader", *listed], stoppable=True)
        except subprocess.TimeoutExpired:
            return Answer(fault=f"no answer in {self.timeout:g} s")
        return parse(done, ids)

    def find(self, name: str) -> list[str]:
        """Ids of the jobs of this name that have not ended.

        Raises:
            Unreachable: there was no answer.
        """
        try:
            done = self._run(["squeue", "--noheader", f"--name={name}", "--format=%i"])
        except subprocess.TimeoutExpired:
            raise Unreachable(f"no answer in {self.timeout:g} s") from None
        if done.code:
            raise Unreachable(done.message)
        return done.output.split()

    def delete(self, ids: Sequence[str]) -> str:
        """Cancel jobs, waiting or running; returns what went wrong, or nothing.

        That one of them has ended already is as good.
        """
        try:
            done = self._run(["scancel", *ids])
        except subprocess.TimeoutExpired:
            return f"no answer in {self.timeout:g} s"
        wrong = [
            line
            for line in done.errors.splitlines()
            if line.strip() and not any(text in line.lower() for text in _NO_JOB)
        ]
        if done.code and not done.errors.strip():
            return f"exit status {done.code}"
        return wrong[0] if done.code and wrong else ""


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
