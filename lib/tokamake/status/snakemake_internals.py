"""The only place of `status` that knows how Snakemake marks running jobs.

It imports nothing of Snakemake, which need not be installed. tests/status/
test_snakemake_internals.py fails if a version changes the marks. Checked with Snakemake 9.27.
"""

from base64 import urlsafe_b64decode
from contextlib import suppress
from pathlib import Path


def started(folder: Path) -> float | None:
    """Time at which Snakemake locked its working directory; None: it does not run.

    A lock stays after Snakemake was killed, until `--unlock`.
    """
    times = []
    for lock in (folder / ".snakemake/locks").glob("*"):
        with suppress(FileNotFoundError):  # Snakemake ends now
            times.append(lock.stat().st_mtime)
    return max(times, default=None)


def running_outputs(folder: Path) -> set[str]:
    """Outputs of jobs that Snakemake runs, or ran when it was killed."""
    outputs = set()
    # The name of a marker file is the base64 of the output's path. Snakemake splits a long name
    # into folders that begin with "@".
    markers = folder / ".snakemake/incomplete"
    for path in markers.rglob("*"):
        name = "".join(part.removeprefix("@") for part in path.relative_to(markers).parts)
        try:
            outputs.add(urlsafe_b64decode(name).decode())
        except ValueError:
            continue
    return outputs
