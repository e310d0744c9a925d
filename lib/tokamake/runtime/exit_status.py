"""Exit statuses of a training, besides 0 (finished), 2 (a user's mistake) and statuses of crashes.

docs/reference/exit-status.md has the table of all.
"""

from enum import IntEnum

HUNG = 75
"""No rank made progress: EX_TEMPFAIL of sysexits.h, so try again."""


class Stopped(IntEnum):
    """A run that saved and stopped before its end, because something asked it to."""

    SIGTERM = 80
    """A batch system or a person sent SIGTERM."""
    SIGINT = 81
    """Ctrl-C."""
    SIGUSR1 = 82
    """A batch system warns before the end of a job."""
    TIME = 83
    """The time of the job is nearly over."""
    FILE = 84
    """A person created the file `stop`."""
