"""The exception for mistakes of the user. The command line prints it without a traceback."""

import os
from contextlib import suppress
from pathlib import Path

EXIT_USER_ERROR = 2
"""Exit status of commands and of Snakemake after a mistake of the user."""


class UserError(Exception):
    """A mistake that the user can fix. The message gives the subject, value, place and remedy.

    Attributes:
        among_ranks: whether a process group exists. Its threads can make a normal exit of Python
            abort.
    """

    among_ranks = False


class TemporaryError(UserError):
    """An error of the system, the network or another process, which a retry may not meet."""


def note_failure(error: Exception) -> None:
    """Tell the executors for PBS and Slurm not to retry this job, unless the error is temporary.

    They name a file in JOB_FAILURE_FILE; work that would fail again in the same way creates it.
    """
    path = os.environ.get("JOB_FAILURE_FILE")
    if path and not isinstance(error, TemporaryError):
        with suppress(OSError):
            Path(path).touch()


def of_system(error: OSError) -> str:
    """Message of an error of the operating system: the file and the reason."""
    prefix = f"{error.filename}: " if error.filename else ""
    return f"{prefix}{error.strerror or str(error) or type(error).__name__}"
