"""What is believed of one submitted job, from PBS's answers and the job's own exit-status file.

No single word is trusted: success needs both witnesses, failure both or one that keeps to it, and
where PBS is silent or has forgotten, the file decides after a time of patience.
"""

from dataclasses import dataclass
from enum import Enum

from .states import Kind, Reading, exit_message

REPEATS = 2  # equal answers in a row that make an answer believed
DOUBT = 0.2  # of the patience: how long PBS alone must keep to it that a job has ended badly


class Belief(Enum):
    """What to do with a job now."""

    OPEN = "open"  # ask again
    SUCCEEDED = "succeeded"
    FAILED = "failed"


OPEN = (Belief.OPEN, "")


@dataclass
class Evidence:
    """All that is known of a job, and since when; times are seconds of one clock."""

    reading: Reading | None = None  # PBS's last usable answer
    repeated: int = 0  # how often in a row it gave this one
    answered: bool = False  # whether the last call gave one
    since: float = 0.0  # when it first gave it
    denials: int = 0  # how often in a row it said that it does not know the job
    denied_since: float = 0.0
    exit_status: int | None = None  # what the job itself wrote down
    written_since: float = 0.0  # when that was first seen
    asked: float = -1.0  # when PBS was last asked
    heard: float = -1.0  # when it last answered

    def note_reading(self, reading: Reading | None, now: float) -> None:
        """Take in what a call told of this job; None where it told nothing usable."""
        self.asked, self.answered = now, reading is not None
        if reading is None:
            return
        self.heard = now
        if reading != self.reading:
            self.reading, self.repeated, self.since = reading, 0, now
        self.repeated += 1
        self.denials = 0

    def note_denial(self, now: float) -> None:
        """Take in that PBS does not know the job."""
        self.asked, self.heard, self.answered = now, now, True
        if not self.denials:
            self.denied_since = now
        self.denials += 1
        self.reading, self.repeated = None, 0

    def note_exit_status(self, status: int | None, now: float) -> None:
        """Take in what the job's exit-status file holds, if it is there."""
        if status != self.exit_status:
            self.exit_status, self.written_since = status, now

    @property
    def agreed(self) -> bool:
        """Whether PBS and the job itself say the same of how it ended."""
        if self.reading is None or self.reading.active or self.exit_status is None:
            return False
        return (self.reading.kind is Kind.SUCCEEDED) == (self.exit_status == 0)

    def insisted(self, now: float, patience: float) -> bool:
        """Whether PBS has kept to its last answer for long enough to be believed alone."""
        return self.repeated >= REPEATS and now - self.since >= patience * DOUBT

    def belief(self, now: float, patience: float, *, bundled: bool = False) -> tuple[Belief, str]:
        """Decide, with the message that belongs to it.

        Args:
            now: the clock.
            patience: seconds for which a witness alone is not yet believed.
            bundled: whether PBS's answer is about a bundle that includes this job.
        """
        written = self.exit_status is not None
        if bundled and self.exit_status is not None:
            return self._in_bundle(self.exit_status, now, patience)
        if self.denials >= REPEATS:
            return self._forgotten(now, patience)
        if self.reading and self.answered and not self.denials:
            if self.reading.kind is Kind.SUCCEEDED:
                return self._success(now, patience)
            if self.reading.kind in (Kind.FAILED, Kind.DELETED) and (
                self.exit_status or self.insisted(now, patience)
            ):
                return Belief.FAILED, self.reading.message
            if self.reading.kind is Kind.NEVER and self.repeated >= REPEATS:
                return Belief.FAILED, self.reading.message
        if written and now - self.written_since >= patience:
            return self._own_word("the server has not said so")
        return OPEN

    def _in_bundle(self, status: int, now: float, patience: float) -> tuple[Belief, str]:
        """Decide by the file alone, unless the end of the bundle explains a failure."""
        if status == 0:
            return Belief.SUCCEEDED, "finished"
        # What ends a bundle also ends the job that it is at: wait for PBS to say so.
        if self.reading and not self.reading.active and self.reading.kind is not Kind.SUCCEEDED:
            return Belief.FAILED, self.reading.message
        over = self.reading is not None and not self.reading.active
        if over or now - self.written_since >= patience * DOUBT:
            return Belief.FAILED, exit_message(status)
        return OPEN

    def is_denied(self, now: float, patience: float) -> bool:
        """Whether PBS has said for long enough that it does not know the job."""
        return self.denials >= REPEATS and now - self.denied_since >= patience * DOUBT

    def _success(self, now: float, patience: float) -> tuple[Belief, str]:
        if self.exit_status == 0:
            return Belief.SUCCEEDED, "finished"
        if self.exit_status:
            return self._own_word("though the server calls it finished")
        if self.repeated >= REPEATS and now - self.since >= patience:
            return Belief.FAILED, (
                "is finished as the server has it, but left no exit status in its folder: "
                "do its nodes see this file system?"
            )
        return OPEN

    def _forgotten(self, now: float, patience: float) -> tuple[Belief, str]:
        if self.exit_status is not None:
            return self._own_word("the server has forgotten it")
        if now - self.denied_since >= patience:
            return Belief.FAILED, "is lost: the server does not know it, and it left no exit status"
        return OPEN

    def _own_word(self, why: str) -> tuple[Belief, str]:
        status = self.exit_status or 0
        if status == 0:
            return Belief.SUCCEEDED, f"finished, by its own exit-status file ({why})"
        return Belief.FAILED, f"{exit_message(status)}, by its own exit-status file ({why})"
