"""What the batch systems differ in, as far as the tracker has to know: words, and how to read them.

This one is PBS's; snakemake_executor_plugin_sbatch has Slurm's.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .states import Reading, read


@dataclass(frozen=True)
class Dialect:
    """A batch system.

    Args:
        label: of messages; the folder of the records has this name, too.
        system: what it is called.
        submit, status, delete, release: its commands, for messages.
        id_variable: the environment variable that tells a job its id.
        read: puts what the system says of a job into words.
        options: of the submitting command, from the job's name and the file for what it prints.
        refused: says why that file cannot lie in a folder; empty: it can.
    """

    label: str
    system: str
    submit: str
    status: str
    delete: str
    release: str
    id_variable: str
    read: Callable[[Mapping[str, Any]], Reading | None]
    options: Callable[[str, Path], tuple[str, ...]]
    refused: Callable[[Path], str] = lambda _: ""


def _options(name: str, printed: Path) -> tuple[str, ...]:
    return "-N", name, "-S", "/bin/bash", "-j", "oe", "-o", str(printed)


def _refused(folder: Path) -> str:
    """Why `qsub -o` refuses files in a folder (prepare_path.c of OpenPBS; tried on 23.06)."""
    name = str(folder)
    if odd := sorted({char for char in name if not " " <= char <= "~"}):
        return f"has {', '.join(map(repr, odd))}, and qsub takes printable ASCII only"
    if ":" in name:
        return "has a colon, before which PBS older than 22.05 expects a host"
    if len(name) > _LONGEST:
        return f"has {len(name)} characters, and qsub takes about {_LONGEST}"
    return ""


_LONGEST = 900
"""Characters of a folder; qsub takes some 1,000 of a path."""

PBS = Dialect("pbs", "PBS", "qsub", "qstat", "qdel", "qrls", "PBS_JOBID", read, _options, _refused)
