"""Records of submitted jobs on disk, by which a new controller finds them again.

Each job has a folder, named by its key. `record.json` in it is written before qsub runs. The job
itself writes files that begin with the token of its submission: `.claim`, a link with the id of the
PBS job that started (either the job or a controller that gives the submission up can create it, not
both), `.exit` with its exit status, `.progress` with the progress of its work, `.failure` if its
work would fail again in the same way, `.faulty` with the hosts that its work found faulty, `.term`
with the time of a SIGTERM and of the job's end, and `.log`.
"""

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

GIVEN_UP = "given-up"
_HOST = re.compile(r"[\w.-]+")


@dataclass(frozen=True)
class Record:
    """One submission."""

    token: str  # unique
    name: str  # in PBS; it ends with the token
    key: str  # of the job, and name of its folder
    outputs: tuple[str, ...]  # files that it writes
    fingerprint: str  # of its inputs
    job_id: str | None = None  # in PBS, once qsub has printed it
    written: float = 0.0  # seconds since 1970
    cancelled: bool = False  # whether a controller tried to delete it
    bundled: bool = False  # whether its PBS job also does the work of other submissions
    progress: str = ""  # of earlier submissions of this job
    avoided: tuple[str, ...] = ()  # hosts that they found faulty

    @property
    def active_name(self) -> str:
        """Name for messages: the id if it is known."""
        return self.job_id or self.name


def new_token() -> str:
    return secrets.token_hex(6)


def key_of(parts: Iterable[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


class Records:
    """All submissions of a working directory, in a folder that all nodes share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def path(self, record: Record, kind: str) -> Path:
        """A file of a submission: `claim`, `exit`, `failure`, `faulty`, `log`, `progress`..."""
        return self.folder / record.key / f"{record.token}.{kind}"

    def load(self) -> Iterator[Record]:
        """Submissions whose end no controller has seen; ValueError: a record is damaged."""
        for path in sorted(self.folder.glob("*/record.json")):
            fields = json.loads(path.read_text())
            lists = {name: tuple(fields.get(name, ())) for name in ("outputs", "avoided")}
            yield Record(**{**fields, **lists})

    def write(self, record: Record, *, durable: bool = True) -> None:
        """Write a record atomically; `durable`: it also survives a crash of the machine."""
        folder = self.folder / record.key
        folder.mkdir(exist_ok=True)
        part = folder / f"record.json.{os.getpid()}"
        with part.open("w") as file:
            json.dump(asdict(record), file)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        part.replace(folder / "record.json")
        if durable:
            _sync_folder(folder)

    def with_id(self, record: Record, job_id: str) -> Record:
        """Record with the id of its PBS job; a lost id can be looked up by the job's name."""
        submitted = replace(record, job_id=job_id)
        self.write(submitted, durable=False)
        return submitted

    def drop(self, record: Record, *, keep_files: bool = False) -> None:
        """Delete the record of a submission; `keep_files` keeps its log and other files."""
        folder = self.folder / record.key
        (folder / "record.json").unlink(missing_ok=True)
        if not keep_files:
            shutil.rmtree(folder, ignore_errors=True)

    def discard(self, record: Record) -> None:
        """Delete a submission that the server did not take; other submissions' files stay."""
        self.drop(record, keep_files=True)
        for kind in ("sh", "job"):
            self.path(record, kind).unlink(missing_ok=True)

    def _text(self, record: Record, kind: str) -> str | None:
        try:
            return self.path(record, kind).read_text(errors="replace")
        except OSError:
            return None

    def exit_status(self, record: Record) -> int | None:
        """Exit status that the job wrote, or None if it has not ended."""
        with suppress(ValueError):
            return int(self._text(record, "exit") or "")
        return None

    def progress(self, record: Record) -> str:
        """Last line of the progress file, or an empty string."""
        lines = (self._text(record, "progress") or "").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    def faulty_hosts(self, record: Record) -> list[str]:
        words = (self._text(record, "faulty") or "").split()
        return [word for word in dict.fromkeys(words) if _HOST.fullmatch(word)]

    def reason_against_retry(self, record: Record) -> str:
        """Why the job noted that it must not be retried, or an empty string: it did not."""
        text = self._text(record, "failure")
        if text is None:
            return ""
        return text.strip() or "a retry would fail in the same way, so there is none"

    def seconds_left(self, record: Record) -> float | None:
        """Seconds of its walltime that a job had left at its SIGTERM; None: no SIGTERM."""
        with suppress(ValueError):
            sent, end = map(float, (self._text(record, "term") or "").split())
            return end - sent
        return None

    def submitted(self, record: Record) -> float:
        """Time of the submission by the file system's clock, to compare with times of files."""
        try:
            return self.path(record, "job").stat().st_mtime
        except OSError:
            return record.written

    def ended(self, record: Record) -> float:
        """Time at which the job wrote its exit status, in seconds since 1970, or 0."""
        try:
            return self.path(record, "exit").stat().st_mtime
        except OSError:
            return 0.0

    def claimed_by(self, record: Record) -> str | None:
        """Id of the PBS job that started, GIVEN_UP if none may start any more, or None."""
        try:
            return str(self.path(record, "claim").readlink())
        except OSError:
            return None

    def give_up(self, record: Record) -> bool:
        """Prevent a job of this submission from starting; False if one has started."""
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
