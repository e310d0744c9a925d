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
        takes_colons: whether that file's path may have a colon; PBS takes what precedes one for a
            host.
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
    takes_colons: bool = True


def _options(name: str, printed: Path) -> tuple[str, ...]:
    return "-N", name, "-S", "/bin/bash", "-j", "oe", "-o", str(printed)


PBS = Dialect(
    "pbs", "PBS", "qsub", "qstat", "qdel", "qrls", "PBS_JOBID", read, _options, takes_colons=False
)
