"""Read the files that Weights & Biases writes offline: a log of LevelDB with protocol buffers."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

_HEADER_BYTES, _BLOCK_BYTES, _PREFIX_BYTES = 7, 1 << 15, 7
_FULL, _FIRST, _LAST = 1, 2, 4
"""Types of pieces: a whole record, its first piece, its last."""


class OfflineRun(NamedTuple):
    """What one job has written."""

    id: str
    project: str
    config: dict[str, Any]
    history: list[dict[str, Any]]
    """Values of each step, with `_step`."""


def read(path: Path) -> OfflineRun:
    """Read a .wandb file."""
    from wandb.proto import wandb_internal_pb2

    run_id = project = ""
    config: dict[str, Any] = {}
    history = []
    for content in _records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(content)
        if record.HasField("run"):
            run_id, project = record.run.run_id, record.run.project
            config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        elif record.HasField("history"):
            history.append(
                {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json)
                    for item in record.history.item
                }
            )
    return OfflineRun(run_id, project, config, history)


def _records(data: bytes) -> Iterator[bytes]:
    """Yield records; a piece has a checksum, its length and its type before it."""
    position, pieces = _HEADER_BYTES, b""
    while position < len(data):
        room = _BLOCK_BYTES - position % _BLOCK_BYTES
        if room < _PREFIX_BYTES:
            position += room
            continue
        length, kind = (
            int.from_bytes(data[position + 4 : position + 6], "little"),
            data[position + 6],
        )
        start = position + _PREFIX_BYTES
        position = start + length
        pieces = (b"" if kind in (_FULL, _FIRST) else pieces) + data[start:position]
        if kind in (_FULL, _LAST):
            yield pieces
