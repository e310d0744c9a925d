"""Documents that could not be read, set aside in PREFIX.quarantine.jsonl, one a line.

`tokenize` writes them there: {"file", "line" or "row", "reason", and "raw" (the line as it stands)
or "raw_base64" where it is not UTF-8}.
"""

import base64
import json
from pathlib import Path
from typing import IO, Any

from tokamake.data.readers import Block, Input


def quarantine_path(prefix: Path) -> Path:
    """Path of a shard's quarantined documents."""
    return prefix.with_name(prefix.name + ".quarantine.jsonl")


class Quarantine:
    """Writes bad documents to a file that is made with the first of them."""

    def __init__(self, path: Path) -> None:
        self.documents = 0
        self._path = path
        self._stream: IO[str] | None = None

    def add(self, source: Input, block: Block, index: int, reason: str) -> None:
        """Set aside document `index` of a block."""
        if self._stream is None:
            self._stream = self._path.open("w", encoding="utf-8")
        entry = {
            "file": str(source.path),
            source.unit: int(block.numbers[index]),
            **({"byte": int(block.offsets[index])} if block.offsets[index] >= 0 else {}),
            "reason": reason,
            **_raw(block, index),
        }
        self._stream.write(json.dumps(entry, ensure_ascii=False) + "\n")
        self.documents += 1

    def close(self) -> None:
        """Close the file, if there is one."""
        if self._stream is not None:
            self._stream.close()


def _raw(block: Block, index: int) -> dict[str, Any]:
    if block.raw is None:
        record = block.records[index]
        return {"raw": json.dumps(record, default=str) if isinstance(record, dict) else None}
    line = block.raw[index]
    try:
        return {"raw": line.decode("utf-8")}
    except UnicodeDecodeError:
        return {"raw_base64": base64.b64encode(line).decode("ascii")}
