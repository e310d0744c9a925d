"""Documents that could not be read, set aside in PREFIX.quarantine.jsonl, one a line.

`tokenize` writes them there: {"file", "line" or "row", "byte" (first of the line, in plain files),
"reason", and "raw" (the line as it stands) or "raw_base64" where it is not UTF-8}. In a part of a
file that begins very far in it, the line is called "line_in_range", counted from the part's start.
"""

import base64
import json
from pathlib import Path
from typing import IO, Any

from tokamake.data.corpus.documents import place
from tokamake.data.readers import Input, RecordBlock


class Quarantine:
    """Writes bad documents to a file that is made with the first of them."""

    def __init__(self, path: Path) -> None:
        self.documents = 0
        self.first = ""
        self.path = path
        self._stream: IO[str] | None = None

    def add(self, source: Input, block: RecordBlock, index: int, reason: str) -> None:
        """Set aside document `index` of a block."""
        if self._stream is None:
            self.first = f"{place(source, block, index)}: {reason}"
            self._stream = self.path.open("w", encoding="utf-8", errors="surrogateescape")
        before = source.lines_before() if source.unit == "line" else 0
        unit = source.unit if before is not None else "line_in_range"
        entry = {
            "file": str(source.path),
            unit: int(block.numbers[index]) + (before or 0),
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


def _raw(block: RecordBlock, index: int) -> dict[str, Any]:
    if block.raw is None:
        record = block.records[index]
        if isinstance(record, dict):
            return {"raw": json.dumps(record, default=str)}
        line = record.raw
    else:
        line = block.raw[index]
    try:
        return {"raw": line.decode("utf-8")}
    except UnicodeDecodeError:
        return {"raw_base64": base64.b64encode(line).decode("ascii")}
