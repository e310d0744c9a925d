"""The quarantine file PREFIX.quarantine.jsonl: documents that `tokenize` cannot read.

An entry has "file", "line" or "row", "byte" (first byte of the line, in uncompressed files),
"reason", and "raw" (the original line) or "raw_base64" if it is not UTF-8. In a byte range that
begins far into a file, "line_in_range" replaces "line" and counts from the start of the range.
"""

import base64
import json
from pathlib import Path
from typing import IO, Any

from tokamake.data.corpus.documents import place
from tokamake.data.readers import Input, RecordBlock


class Quarantine:
    """Writes bad documents to a file; without bad documents there is no file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.documents = 0
        self.first = ""  # place and reason of the first bad document of the last file that has one
        self._source: Input | None = None
        self._in_file = 0
        self._stream: IO[str] | None = None

    def add(self, source: Input, block: RecordBlock, index: int, reason: str) -> None:
        """Write document `index` of a block."""
        if source is not self._source:
            self.first = f"{place(source, block, index)}: {reason}"
            self._source, self._in_file = source, 0
        if self._stream is None:
            # File names need not be UTF-8.
            self._stream = self.path.open("w", encoding="utf-8", errors="surrogateescape")
        # None: the range begins so far into the file that counting its lines would take long.
        lines_before = source.lines_before() if source.unit == "line" else 0
        unit = source.unit if lines_before is not None else "line_in_range"
        entry = {
            "file": str(source.path),
            unit: int(block.numbers[index]) + (lines_before or 0),
            **({"byte": int(block.offsets[index])} if block.offsets[index] >= 0 else {}),
            "reason": reason,
            **_raw(block, index),
        }
        self._stream.write(json.dumps(entry, ensure_ascii=False) + "\n")
        self.documents += 1
        self._in_file += 1

    def documents_of(self, source: Input) -> int:
        """Return the number of bad documents of the file that is read now."""
        return self._in_file if source is self._source else 0

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()


def _raw(block: RecordBlock, index: int) -> dict[str, Any]:
    if block.raw is None:  # a table has records instead of lines
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
