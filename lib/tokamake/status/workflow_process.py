"""Whether the workflow runs in a folder, in which process, and since when."""

import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from tokamake.errors import UserError
from tokamake.runtime.folder_lock import WritingProcess, writer
from tokamake.status.jobs import Group, read_jobs, written_at
from tokamake.status.snakemake_internals import started

UNLOCK = "the same command with --unlock"


def workflow_text(
    folder: Path, groups: Iterable[Group], *, wait: str = "", unlock: str = UNLOCK
) -> str:
    """Whether the workflow runs, and where; after a kill, that its lock remains.

    Args:
        wait: end of the text if it runs.
        unlock: command that removes the lock.
    """
    found = [known for group in groups for words in group.writers if (known := writer(words))]
    locked_at = started(folder)
    since = "" if locked_at is None else f", since {_clock(locked_at)}"
    if alive := next((each for each in found if each.lives), None):
        return f"the workflow runs ({_named(alive)}{since}){wait}"
    if locked_at is None:
        return "the workflow does not run"
    remedy = f"if it was killed, unlock the folder: {unlock}"
    if locked_at > written_at(folder):  # its lists of jobs follow in a moment
        return f"Snakemake runs{since}; {remedy}"
    if elsewhere := next((each for each in found if each.lives is None), None):
        return f"the workflow runs ({_named(elsewhere)}{since}); {remedy}"
    return f"the workflow was killed; first unlock the folder: {unlock}"


def lock_text(folder: Path, *, unlock: str) -> str:
    """Why a start of Snakemake cannot lock its working directory."""
    groups: Iterable[Group] = ()
    with suppress(UserError):  # it has no lists of jobs yet
        groups = read_jobs(folder).values()
    text = workflow_text(folder, groups, wait="; wait until it ends", unlock=unlock)
    return f"this folder is locked: {text}"


def _named(process: WritingProcess) -> str:
    return f"process {process.pid} on {process.host}"


def _clock(at: float) -> str:
    """A time; with its date, if it is another day."""
    moment, today = time.localtime(at), time.localtime()
    is_today = moment[:3] == today[:3]
    return time.strftime("%H:%M:%S" if is_today else "%Y-%m-%d %H:%M", moment)
