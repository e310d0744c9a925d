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


def _starts(folder: Path) -> Iterator[Row]:
    paths = (folder / "training/tensorboard").glob("events.out.tfevents.*")
    by_time = sorted((int(path.name.split(".")[3]), path) for path in paths)
    last = 0
    for seconds, path in by_time:
        events = [*_events(path)] if path.stat().st_size <= _MAX_BYTES else []
        # Before its records, a job that continues tells TensorBoard to forget later steps.
        start = next((place for place, event in enumerate(events[:4]) if event.is_start), 0)
        if start and last > 0:
            step = events[start].step - 1
            yield {
                **{"run": folder.name, "step": step, "lost_steps": max(0, last - step)},
                "time": pd.Timestamp(seconds, unit="s", tz="UTC"),
                "is_planned": (folder / f"train.{step}.json").is_file() and last <= step,
            }
        last = max((event.step for event in events[start + 1 :]), default=0) or last


class _Event(NamedTuple):
    step: int
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
    step = shift = 0
    if event[place : place + 1] == b"\x10":
        for byte in event[place + 1 : place + 11]:
            step |= (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                break
        place += 1 + shift // 7
    return _Event(step, event[place : place + 1] == b"\x3a")
