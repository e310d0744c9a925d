"""The only place of `status` that knows how Snakemake marks running jobs.

It imports nothing of Snakemake, which need not be installed. tests/status/
test_snakemake_internals.py fails if a version changes the marks. Checked with Snakemake 9.27.
"""

import json
from base64 import urlsafe_b64decode
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


def started(folder: Path) -> float | None:
    """Time at which Snakemake locked its working directory; None: it does not run.

    A lock stays after Snakemake was killed, until `--unlock`.
    """
    times = []
    for lock in (folder / ".snakemake/locks").glob("*"):
        with suppress(FileNotFoundError):  # Snakemake ends now
            times.append(lock.stat().st_mtime)
    return max(times, default=None)


class Marks(NamedTuple):
    """Marks of Snakemake in a folder."""

    started: float | None
    """See `started`."""
    running: dict[str, Path]
    """Output of a job that Snakemake runs, or ran when it was killed → its marker file."""


def read_marks(folder: Path) -> Marks:
    """Read the marks of a working directory of Snakemake."""
    outputs: dict[str, Path] = {}
    # The name of a marker file is the base64 of the output's path. Snakemake splits a long name
    # into folders that begin with "@".
    markers = folder / ".snakemake/incomplete"
    for path in markers.rglob("*"):
        name = "".join(part.removeprefix("@") for part in path.relative_to(markers).parts)
        try:
            outputs[urlsafe_b64decode(name).decode()] = path
        except ValueError:
            continue
    return Marks(started(folder), outputs)


def batch_job(marker: Path) -> str:
    """Id of the batch system's job that runs a job; empty: it has none."""
    with suppress(OSError, ValueError, AttributeError):
        return str(json.loads(marker.read_text()).get("external_jobid") or "")
    return ""
