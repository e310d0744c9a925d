"""Evidence of how a submitted job ended: the server's answers and the job's exit-status file.

One source alone is not believed at once: success needs both, and failure needs both or one that
repeats it. If the server is silent or no longer knows the job, the file decides after the patience.
"""

from dataclasses import dataclass
from enum import Enum

from .states import JobState, JobStatus, exit_message

REPEATS = 2  # equal answers in a row before an answer counts
DOUBT = 0.2  # fraction of the patience for which the server must repeat a failure


class Verdict(Enum):
    """Decision about a job."""

    OPEN = "open"  # ask again
    SUCCEEDED = "succeeded"
    FAILED = "failed"


OPEN = (Verdict.OPEN, "")


@dataclass
class Evidence:
    """Evidence about one job. Times are seconds of one clock."""

    status: JobStatus | None = None  # last usable answer of the server
    repeated: int = 0  # number of times in a row that the server gave it
    answered: bool = False  # whether the last call gave a usable answer
    status_since: float = 0.0
    denials: int = 0  # number of times in a row that the server did not know the job
    denied_since: float = 0.0
    exit_status: int | None = None  # from the job's own file
    exit_status_since: float = 0.0  # when it was first seen
    asked_at: float = -1.0  # last call
    answered_at: float = -1.0  # last usable answer

    def note_status(self, status: JobStatus | None, now: float) -> None:
        """Add the status that a call reported; None if it reported nothing usable."""
        self.asked_at, self.answered = now, status is not None
        if status is None:
            return
        self.answered_at = now
        if status != self.status:
            self.status, self.repeated, self.status_since = status, 0, now
        self.repeated += 1
        self.denials = 0

    def note_denial(self, now: float) -> None:
        """Add an answer of the server that it does not know the job."""
        self.asked_at, self.answered_at, self.answered = now, now, True
        if not self.denials:
            self.denied_since = now
        self.denials += 1
        self.status, self.repeated = None, 0

    def note_exit_status(self, exit_status: int | None, now: float) -> None:
        """Add the content of the job's exit-status file; None if it does not exist."""
        if exit_status != self.exit_status:
            self.exit_status, self.exit_status_since = exit_status, now

    @property
    def has_ended(self) -> bool:
        """Whether the server reports that the job ended."""
        return self.status is not None and not self.status.active

    @property
    def sources_agree(self) -> bool:
        """Whether server and exit-status file report the same end."""
        if self.status is None or self.status.active or self.exit_status is None:
            return False
        return (self.status.state is JobState.SUCCEEDED) == (self.exit_status == 0)

    def is_insistent(self, now: float, patience: float) -> bool:
        """Whether the server has repeated its status long enough to count alone."""
        return self.repeated >= REPEATS and now - self.status_since >= patience * DOUBT

    def is_denied(self, now: float, patience: float) -> bool:
        """Whether the server has denied the job long enough to count alone."""
        return self.denials >= REPEATS and now - self.denied_since >= patience * DOUBT

    def verdict(self, now: float, patience: float, *, bundled: bool = False) -> tuple[Verdict, str]:
        """Decide whether the job ended, with a message for the user.

        Args:
            patience: seconds for which one source alone is not believed.
            bundled: whether the server's answer is about a bundle that includes this job.
        """
        if bundled and self.exit_status is not None:
            return self._in_bundle(self.exit_status, now, patience=patience)
        if self.denials >= REPEATS:
            return self._unknown_to_server(now, patience)
        if self.status and self.answered and not self.denials:
            state = self.status.state
            if state is JobState.SUCCEEDED:
                return self._success(now, patience)
            if state in (JobState.FAILED, JobState.DELETED) and (
                self.exit_status or self.is_insistent(now, patience)
            ):
                return Verdict.FAILED, self.status.message
            if state is JobState.NEVER and self.repeated >= REPEATS:
                return Verdict.FAILED, self.status.message
        if self.exit_status is not None and now - self.exit_status_since >= patience:
            return self._by_exit_status("the server has not confirmed it")
        return OPEN

    def _in_bundle(self, exit_status: int, now: float, *, patience: float) -> tuple[Verdict, str]:
        """Decide by the file alone, unless the end of the bundle explains a failure."""
        if exit_status == 0:
            return Verdict.SUCCEEDED, "finished"
        # The end of a bundle also ends its current job: wait for the server to report it.
        if self.status and self.has_ended and self.status.state is not JobState.SUCCEEDED:
            return Verdict.FAILED, self.status.message
        if self.has_ended or now - self.exit_status_since >= patience * DOUBT:
            return Verdict.FAILED, exit_message(exit_status)
        return OPEN

    def _success(self, now: float, patience: float) -> tuple[Verdict, str]:
        if self.exit_status == 0:
            return Verdict.SUCCEEDED, "finished"
        if self.exit_status:
            return self._by_exit_status("although the server reports success")
        if self.repeated >= REPEATS and now - self.status_since >= patience:
            return Verdict.FAILED, (
                "finished according to the server, but left no exit status in its folder: "
                "do its nodes see this file system?"
            )
        return OPEN

    def _unknown_to_server(self, now: float, patience: float) -> tuple[Verdict, str]:
        if self.exit_status == 0:  # a server without history forgets a job at its end
            return Verdict.SUCCEEDED, "finished"
        if self.exit_status is not None:
            return self._by_exit_status("the server no longer knows it")
        if now - self.denied_since >= patience:
            message = "is lost: the server does not know it, and it left no exit status"
            return Verdict.FAILED, message
        return OPEN

    def _by_exit_status(self, reason: str) -> tuple[Verdict, str]:
        source = f"according to its exit-status file ({reason})"
        if not self.exit_status:
            return Verdict.SUCCEEDED, f"finished, {source}"
        return Verdict.FAILED, f"{exit_message(self.exit_status)}, {source}"
