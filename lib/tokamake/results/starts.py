"""Starts of a run's trainings: planned segments, and restarts after a kill or a failure.

metrics.jsonl has each step once. TensorBoard's files keep the steps that were lost, and each start
has a file of its own. tests/results/test_starts.py compares with TensorBoard's own reader.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from tokamake.results.frames import Row, frame, run_folders

_COLUMNS = {
    **{"run": "string", "step": "Int64", "time": "datetime64[ns, UTC]"},
    **{"lost_steps": "Int64", "is_planned": "boolean"},
}
_MAX_BYTES = 1 << 28
"""Larger files are not searched for lost steps."""


def starts(*folders: str | Path) -> pd.DataFrame:
    """Starts of the training of runs, except for the first one, by time.

    | column | dtype | meaning |
    |---|---|---|
    | run | string | name of the run's folder |
    | step | Int64 | finished steps in the checkpoint that it continues |
    | time | datetime64[ns, UTC] | of the start |
    | lost_steps | Int64 | logged steps after this checkpoint that were done again |
    | is_planned | boolean | an earlier job had reached its last step (`train.segment_steps`) |

    Args:
        folders: results folders, or folders of single runs. Runs with `log_style: megatron`, and
            runs without TensorBoard's files, have no starts.

    Raises:
        UserError: a folder does not exist.
    """
    rows = [row for folder in run_folders(folders) for row in _starts(folder)]
    return frame(rows, _COLUMNS)


def stopped_seconds(folder: Path) -> list[float]:
    """Times of a run's trainings that did not reach their end, from first to last record.

    Their jobs were stopped or killed, or have not ended yet; Snakemake measures none of them.
    """
    sessions = [*_sessions(folder)]
    if not sessions:
        return []
    ends = ("train.json", "finetune.json", f"train.{sessions[-1].last}.json")
    has_ended = any((folder / name).is_file() for name in ends)
    return [
        session.end - session.begin
        for session, is_whole in zip(
            sessions, [*(after.is_planned for after in sessions[1:]), has_ended], strict=True
        )
        if not is_whole
    ]


def _starts(folder: Path) -> Iterator[Row]:
    for session in _sessions(folder):
        if session.step is not None:
            yield {
                **{"run": folder.name, "step": session.step, "lost_steps": session.lost},
                "time": pd.Timestamp(session.begin, unit="s", tz="UTC"),
                "is_planned": session.is_planned,
            }


class _Session(NamedTuple):
    """A job that trains, by its file."""

    begin: int
    end: float
    """Times in seconds: of the file, and of its last record."""
    step: int | None
    """Finished steps in the checkpoint that it continues; None: it begins."""
    last: int
    """Last step that it or an earlier job has recorded."""
    lost: int
    is_planned: bool


def _sessions(folder: Path) -> Iterator[_Session]:
    """Jobs of a run that have trained, by time."""
    paths = (folder / "training/tensorboard").glob("events.out.tfevents.*")
    by_time = sorted((int(path.name.split(".")[3]), path) for path in paths)
    last = 0
    for begin, path in by_time:
        events = [*_events(path)] if path.stat().st_size <= _MAX_BYTES else []
        # Before its records, a job that continues tells TensorBoard to forget later steps.
        start = next((place for place, event in enumerate(events[:4]) if event.is_start), 0)
        step = events[start].step - 1 if start and last > 0 else None
        lost = 0 if step is None else max(0, last - step)
        is_planned = step is not None and not lost and (folder / f"train.{step}.json").is_file()
        last = max((event.step for event in events[start + 1 :]), default=0) or last
        end = events[-1].time if events else 0.0
        yield _Session(begin, max(end, begin), step, last, lost, is_planned)


class _Event(NamedTuple):
    step: int
    time: float
    is_start: bool
    """Whether it marks the start of a session."""


def _events(path: Path) -> Iterator[_Event]:
    """Events of a file, as far as it is complete."""
    content = path.read_bytes()
    place = 0
    while place + 12 <= len(content):
        (size,) = struct.unpack_from("<Q", content, place)
        event = content[place + 12 : place + 12 + size]
        if len(event) < size:
            return
        yield _event(event)
        place += 16 + size  # length and payload each have a checksum


def _event(event: bytes) -> _Event:
    """Parse a serialized Event: field 1 is its time, 2 its step, and 7 the start of a session."""
    place = 9 if event[:1] == b"\x09" else 0
    time = struct.unpack_from("<d", event, 1)[0] if place else 0.0
    step = shift = 0
    if event[place : place + 1] == b"\x10":
        for byte in event[place + 1 : place + 11]:
            step |= (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                break
        place += 1 + shift // 7
    return _Event(step, time, event[place : place + 1] == b"\x3a")
