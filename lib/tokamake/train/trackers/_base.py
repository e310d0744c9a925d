"""Common types of trackers: the run that they follow, and their methods."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from tokamake.train.metrics import Record, TextSample


class FollowedRun(NamedTuple):
    """The run that a tracker follows."""

    name: str
    """Name of the run."""
    project: str
    """Project that the tracker shows the run in."""
    online: bool
    """Whether records go to the tracker's server."""
    folder: Path
    """Folder for the tracker's files, if they do not."""
    id: str
    """Id of the run for the tracker, from an earlier job; empty: the tracker chooses one."""
    settings: dict[str, Any]
    """Settings by their paths, such as train.optimizer.name."""


class Tracker(Protocol):
    """A tracker of a run. `Tracker(run)` of a plug-in opens the run, or continues it."""

    id: str
    """Id of the run for the tracker."""

    def __init__(self, run: FollowedRun) -> None: ...

    def add(self, record: Record) -> None:
        """Add a record; several may have the same step."""

    def add_texts(self, step: int, texts: Sequence[TextSample]) -> None:
        """Add texts that the model has written after a step."""

    def close(self) -> None:
        """Write the remaining records."""
