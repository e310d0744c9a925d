"""Differences between batch systems that the tracker must know: command names and options.

PBS is defined here, Slurm in snakemake_executor_plugin_sbatch.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .states import JobStatus, read


@dataclass(frozen=True)
class Dialect:
    """A batch system.

    Args:
        label: prefix of messages, and name of the folder of the records.
        options: options of the submit command, from the job's name and the file for its output.
        avoid: options so that a job does not get some hosts, from its own options and the hosts;
            None: the batch system cannot do that.
        refused: reason why this file cannot be in a folder, or an empty string.
    """

    label: str
    system: str
    submit: str
    status: str
    delete: str
    release: str
    id_variable: str
    read: Callable[[Mapping[str, Any]], JobStatus | None]
    options: Callable[[str, Path], tuple[str, ...]]
    avoid: Callable[[Sequence[str], Sequence[str]], tuple[str, ...]] | None = None
    refused: Callable[[Path], str] = lambda _: ""


def _options(name: str, output: Path) -> tuple[str, ...]:
    return "-N", name, "-S", "/bin/bash", "-j", "oe", "-o", str(output)


def _refused(folder: Path) -> str:
    """Reason why `qsub -o` refuses files in a folder (prepare_path.c of OpenPBS; 23.06)."""
    name = str(folder)
    if invalid := sorted({char for char in name if not " " <= char <= "~"}):
        return f"has {', '.join(map(repr, invalid))}, and qsub takes only printable ASCII"
    if ":" in name:
        return "has a colon; PBS before 22.05 takes the part before it as a host name"
    if len(name) > _LONGEST:
        return f"has {len(name)} characters, and qsub takes about {_LONGEST}"
    return ""


_LONGEST = 900
"""Characters of a folder; qsub takes about 1,000 characters of a path."""

PBS = Dialect(
    "pbs", "PBS", "qsub", "qstat", "qdel", "qrls", "PBS_JOBID", read, _options, refused=_refused
)
