"""What is on disk of each submitted job, so that a new controller finds it again.

One folder a job, named by what identifies it. In it, `record.json` is written before qsub runs, and
files that begin with the token of the submission come from the job itself: `.claim`, a link that
says which PBS job began (only one can make it: the job, or a controller that gives the submission
up), `.exit`, its exit status, `.progress`, how far its work has come, and `.log`.
"""

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

GIVEN_UP = "given-up"


@dataclass(frozen=True)
class Record:
    """One submission."""

    token: str  # of this submission alone
    name: str  # its name in PBS, in which the token stands
    key: str  # of the job, and of its folder
    outputs: tuple[str, ...]  # files that it makes
    fingerprint: str  # of what it makes them from
    job_id: str | None = None  # PBS's, once qsub has told it
    written: float = 0.0  # seconds since 1970
    cancelled: bool = False  # whether a controller wanted it deleted
    bundled: bool = False  # whether its PBS job does the work of other submissions, too
    progress: str = ""  # how far the submissions of this job had come before

    @property
    def active_name(self) -> str:
        """What to call it in a message."""
        return self.job_id or self.name


def new_token() -> str:
    """A token that no other submission has."""
    return secrets.token_hex(6)


def key_of(parts: Iterable[str]) -> str:
    """Name of the folder of the job that these strings identify."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


class Records:
    """All submissions of a working directory.

    Args:
        folder: where they lie; must be seen by the nodes, too.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, record: Record, kind: str) -> Path:
        """A file of a submission: `claim`, `exit`, `log`, `progress`, `sh`, `job` or `pbs`."""
        return self.folder / record.key / f"{record.token}.{kind}"

    def load(self) -> Iterator[Record]:
        """All submissions that no controller has seen the end of.

        Raises:
            ValueError: a record is damaged.
        """
        for path in sorted(self.folder.glob("*/record.json")):
            found = json.loads(path.read_text())
            yield Record(**{**found, "outputs": tuple(found["outputs"])})

    def write(self, record: Record, *, lasting: bool = True) -> None:
        """Write a record down whole, and `lasting`: so that no crash of the machine undoes it."""
        folder = self.folder / record.key
        folder.mkdir(exist_ok=True)
        part = folder / f"record.json.{os.getpid()}"
        with part.open("w") as file:
            json.dump(asdict(record), file)
            file.flush()
            if lasting:
                os.fsync(file.fileno())
        part.replace(folder / "record.json")
        if lasting:
            _sync_folder(folder)

    def named(self, record: Record, job_id: str) -> Record:
        """Write down the id that PBS gave; it could be found again by the submission's name."""
        known = replace(record, job_id=job_id)
        self.write(known, lasting=False)
        return known

    def drop(self, record: Record, *, keep_files: bool = False) -> None:
        """Forget a submission that has ended; its log and the like stay on request."""
        folder = self.folder / record.key
        (folder / "record.json").unlink(missing_ok=True)
        if not keep_files:
            shutil.rmtree(folder, ignore_errors=True)

    def discard(self, record: Record) -> None:
        """Forget a submission that never was; files of others of the same job stay."""
        self.drop(record, keep_files=True)
        for kind in ("sh", "job"):
            self.path(record, kind).unlink(missing_ok=True)

    def exit_status(self, record: Record) -> int | None:
        """What the job wrote down as its exit status, if it has ended."""
        try:
            return int(self.path(record, "exit").read_text())
        except (OSError, ValueError):
            return None

    def progress(self, record: Record) -> str:
        """How far the work has come, by its own last line about it; empty: it says nothing."""
        try:
            lines = self.path(record, "progress").read_text(errors="replace").split("\n")
        except OSError:
            return ""
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def submitted(self, record: Record) -> float:
        """When the submission was prepared, by the file system's clock, to compare files with."""
        try:
            return self.path(record, "job").stat().st_mtime
        except OSError:
            return record.written

    def ended(self, record: Record) -> float:
        """When the job wrote down its exit status, in seconds since 1970; 0 where it has not."""
        try:
            return self.path(record, "exit").stat().st_mtime
        except OSError:
            return 0.0

    def claimed_by(self, record: Record) -> str | None:
        """Id of the PBS job that began, if one has; GIVEN_UP where none may any more."""
        try:
            return str(self.path(record, "claim").readlink())
        except OSError:
            return None

    def give_up(self, record: Record) -> bool:
        """Take care that a job of this submission never runs; False where one has begun."""
        path = self.path(record, "claim")
        path.parent.mkdir(exist_ok=True)
        try:
            path.symlink_to(GIVEN_UP)
        except FileExistsError:
            return self.claimed_by(record) == GIVEN_UP
        return True


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
