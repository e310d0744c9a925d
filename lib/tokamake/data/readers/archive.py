"""Reader of zip archives and of WebDataset's tar archives, by `datasets`.

`datasets` streams the members from disk; nothing is unpacked. It cannot set single rows aside: a
row that it refuses makes the file an error.
"""

import importlib.metadata
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from glob import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from tokamake.data.readers._records import BadRecord, RecordBlock
from tokamake.data.readers._table import BLOCK_BYTES, check_columns, damaged, not_utf8
from tokamake.errors import UserError

if TYPE_CHECKING:
    from tokamake.data.readers._input import Input

UNIT = "row"
HAS_MAGIC = True
HAS_BYTE_RANGES = False

_ZIP_MAGIC = b"PK\x03\x04"
_TAR_END = bytes(1024)
"""Last bytes of a tar archive. For `datasets`, an archive that was cut between members is whole."""
_OVERHEAD = 32
"""Bytes that a row counts for in a block beside its characters."""
_FIRST_RELEASE = 5
"""Release of `datasets` whose JSON builder has the options below."""
_MEMBERS = {".json", ".jsonl", ".ndjson"}
"""Suffixes of members of zip archives. `datasets` reads no others there as our readers read them:
it turns texts such as NA into other values, changes line ends, or cannot open them."""
# Without these, one number among the texts of a file turns all of them into JSON strings, and rows
# that look like an agent's trace become other rows.
_JSON = {"on_mixed_types": None, "parse_agent_traces": False}


def accepts(head: bytes, path: Path) -> bool:
    """Accept zip and tar archives.

    Raises:
        UserError: it is one, but `datasets` is not installed.
    """
    if is_archive := head.startswith(_ZIP_MAGIC) or _is_tar(head):
        _check_installed(path)
    return is_archive


def read(raw: "Input", keys: tuple[str, ...]) -> Iterator[RecordBlock]:
    """Yield the rows of a file as blocks.

    Raises:
        UserError: `datasets` cannot read the file, or a key is missing.
    """
    number, size = 0, 0
    rows: list[dict[str, Any]] = []
    for row in _rows(raw, keys):
        rows.append({key: _text(row[key]) for key in keys})
        size += _OVERHEAD + sum(len(value) for value in rows[-1].values() if isinstance(value, str))
        if size >= BLOCK_BYTES:
            yield _block(rows, number)
            number, rows, size = number + len(rows), [], 0
    if rows:
        yield _block(rows, number)
    tail = b""
    for chunk in raw.chunks():  # also counts and hashes the file, and sees a cut compression
        tail = (tail + chunk)[-len(_TAR_END) :]
    if _is_tar(raw.head) and tail != _TAR_END:
        raise damaged(raw, "it has no end: its download was cut")


def _rows(raw: "Input", keys: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Yield the keys of each row, as `datasets` reads them."""
    import datasets

    try:
        module, options = _builder(raw)
        # Even a stream leaves locks in the cache, which may be read-only on a compute node.
        with TemporaryDirectory() as cache:
            data = datasets.load_dataset(
                module,
                data_files={"train": [escape(str(raw.path.absolute()))]},
                split="train",
                streaming=True,
                cache_dir=cache,
                **options,
            )
        if data.features:
            check_columns(raw, list(data.features), keys=keys)
            data = data.select_columns(list(keys))  # images beside the texts are not decoded
        for row in data:
            check_columns(raw, list(row), keys=keys)
            yield row
    except UserError:
        raise
    except Exception as error:  # each of its builders raises the errors of other packages
        raise UserError(
            f"{raw.path}: cannot be read ({_cause(error)}); fetch it again, or unpack it: a bad "
            "document of a single file is named"
        ) from None


def _builder(raw: "Input") -> tuple[str, Mapping[str, Any]]:
    """Return the builder of `datasets` for a file, and its options."""
    if _is_tar(raw.head):
        return "webdataset", {}
    with zipfile.ZipFile(raw.path) as archive:
        names = [name for name in archive.namelist() if not _is_hidden(name)]
    suffixes = {Path(name).suffix.lower() for name in names}
    if not suffixes or not suffixes <= _MEMBERS:
        raise UserError(
            f"{raw.path}: members of the zip archive are named "
            f"{', '.join(sorted(suffixes)) or 'nothing'}, not {', '.join(sorted(_MEMBERS))}; "
            "unpack it"
        )
    return "json", _JSON


def _is_tar(head: bytes) -> bool:
    return head[257:262] == b"ustar"


def _is_hidden(name: str) -> bool:
    """Whether `datasets` skips a member: folders, and what operating systems add."""
    return name.endswith("/") or any(part.startswith((".", "__")) for part in name.split("/"))


def _text(value: Any) -> Any:
    """Decode a member of a tar archive; other values stay."""
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        return not_utf8(error)


def _block(rows: Iterable[dict[str, Any]], first_row: int) -> RecordBlock:
    records = [_record(row) for row in rows]
    numbers = np.arange(len(records), dtype=np.int64) + first_row
    return RecordBlock(records, numbers, np.full_like(numbers, -1), None)


def _record(row: dict[str, Any]) -> dict[str, Any] | BadRecord:
    return next((value for value in row.values() if isinstance(value, BadRecord)), row)


def _cause(error: BaseException) -> str:
    """Return the message of the error that caused others, on one line."""
    while error.__cause__:
        error = error.__cause__
    return " ".join(str(error).split())[:300] or type(error).__name__


def _check_installed(path: Path) -> None:
    try:
        release = int(importlib.metadata.version("datasets").partition(".")[0])
    except importlib.metadata.PackageNotFoundError:
        release = 0
    if release < _FIRST_RELEASE:
        raise UserError(
            f"{path}: is an archive, which the package datasets reads; run "
            f"`pip install 'datasets>={_FIRST_RELEASE}'`, or unpack the archive"
        )
