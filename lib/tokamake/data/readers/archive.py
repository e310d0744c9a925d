"""Reader of archives: zip, and tar with or without compression. Nothing is unpacked to disk.

A member is read as a file of its name: jsonl, JSON, csv, tsv, HTML or text. In a tar archive of
WebDataset (https://github.com/webdataset/webdataset), consecutive members whose names differ only
after the first dot form a sample, and a key is such an end of a name.
"""

import stat
import tarfile
import zipfile
import zlib
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from tokamake.data.readers._compression import compression, unpack
from tokamake.data.readers._detect import HEAD_BYTES, find_format
from tokamake.data.readers._file_names import natural_key
from tokamake.data.readers._input import CHUNK_BYTES, Input
from tokamake.data.readers._records import (
    LONGEST_BYTES,
    BadRecord,
    RecordBlock,
    read_all,
    row_block,
)
from tokamake.data.readers._table import BLOCK_BYTES, damaged, not_utf8
from tokamake.data.readers._tar import TarStream
from tokamake.errors import UserError

Item = TypeVar("Item")

UNIT = "row"
HAS_MAGIC = True
HAS_BYTE_RANGES = False
SETTINGS = {"extractor": ("resiliparse", "trafilatura")}  # of HTML pages

_ZIP_MAGICS = (b"PK\x03\x04", b"PK\x05\x06")
"""First bytes of an archive with and without members."""
_ZIP_END_BYTES = 22
"""Size of the record at the end of a zip archive, without its comment."""
_LARGEST = (1 << 63) - 1
"""Maximum size of a member of a compressed tar archive."""
_FORMATS = ("jsonl", "json", "json_seq", "csv", "html", "text")
"""Formats of members; parquet and Arrow need a file on disk."""


def accepts(head: bytes, path: Path) -> bool:
    return head.startswith(_ZIP_MAGICS) or _is_tar(head)


def read(raw: Input, keys: tuple[str, ...]) -> Iterator[RecordBlock]:
    """Yield the documents of all members as blocks. Rows count through the archive."""
    number = 0
    for block in _blocks(raw, keys):
        numbers = np.arange(len(block.records), dtype=np.int64) + number
        yield block._replace(numbers=numbers, offsets=np.full_like(numbers, -1))
        number += len(numbers)


def _blocks(raw: Input, keys: tuple[str, ...]) -> Iterator[RecordBlock]:
    if _is_tar(raw.head):
        ends = _ends_of_first_sample(raw)
        if set(keys) <= ends:
            yield from _samples(raw, keys)
        elif len(ends) > 1:  # as files, each sample would be several documents
            raise UserError(
                f"{raw.path}: its members are samples of WebDataset, and none ends in "
                f".{', .'.join(key for key in keys if key not in ends)}; give text_key one of "
                f"{', '.join(sorted(ends))}, or unpack the archive"
            )
        else:
            yield from _files(raw, keys, _tar_members(raw))
    elif not raw.head.startswith(_ZIP_MAGICS):
        raise UserError(f"{raw.path}: is no archive; leave out the format")
    elif raw.compression:
        raise UserError(f"{raw.path}: a zip archive inside {raw.compression}; unpack it")
    else:
        raw.count()
        yield from _files(raw, keys, _zip_members(raw))


# ---- Members as files ----


class _Member(Input):
    """A member, for the reader of its format."""

    def __init__(self, raw: Input, name: str, *, pieces: Iterator[bytes]) -> None:
        # A name from the archive may be absolute; nothing is written, but messages show the path.
        path = raw.path / name.lstrip("/")
        first = next(pieces, b"")
        pieces = chain([first], pieces)
        if packing := compression(first):
            pieces = unpack(pieces, packing, path=path, block_bytes=CHUNK_BYTES)
        first = next(pieces, b"")
        self._pieces = chain([first], pieces)
        format = find_format(first[:HEAD_BYTES], path)
        if format not in _FORMATS:
            kind = f"a member of the format {format}" if format else "a member of unknown format"
            raise UserError(
                f"{path}: {kind}, not {', '.join(_FORMATS)}; unpack the archive, and name the "
                "files of data"
            )
        super().__init__(path, format, compression=packing, head=first[:HEAD_BYTES])
        if format == "html":
            self.settings = raw.settings
        self.workers = raw.workers

    def chunks(self, start: int = 0, end: int | None = None) -> Iterator[bytes]:  # noqa: ARG002
        return self._pieces


def _files(
    raw: Input, keys: tuple[str, ...], members: Iterable[tuple[str, Iterator[bytes]]]
) -> Iterator[RecordBlock]:
    count = 0
    for name, content in members:
        member = _Member(raw, name, pieces=_pieces(raw, content, name))
        for block in member.blocks(keys, raw.metadata_keys):
            yield _with_places(block, member, name=name)
        raw.blank_lines += member.blank_lines
        count += 1
    if not count:
        raise UserError(f"{raw.path}: an archive without files; fetch it again or leave it out")


def _next(raw: Input, items: Iterator[Item], *, name: str = "") -> Item | None:
    """Return the next item; errors name the archive and the member that is read, if any."""
    with _errors(raw, name):
        return next(items, None)


def _pieces(raw: Input, content: Iterator[bytes], name: str) -> Iterator[bytes]:
    while piece := _next(raw, content, name=name):
        yield piece


def _with_places(block: RecordBlock, member: Input, *, name: str) -> RecordBlock:
    """Name the member and the place in it in the reasons of bad records."""
    if block.texts is not None:  # then all records are good
        return block
    records = [
        record._replace(reason=f"{member.unit} {number} of {name}: {record.reason}")
        if isinstance(record, BadRecord)
        else record
        for record, number in zip(block.records, block.numbers.tolist(), strict=True)
    ]
    return block._replace(records=records)


def _zip_members(raw: Input) -> Iterator[tuple[str, Iterator[bytes]]]:
    with _errors(raw):
        archive = zipfile.ZipFile(raw.path)
        entries = archive.infolist()
        _check_zip(raw, archive)
    with archive:
        # By entry, not by name: if two members share a name, the name opens the last.
        for entry in sorted(entries, key=lambda entry: natural_key(entry.filename)):
            if entry.is_dir() or _is_hidden(entry.filename):
                continue
            if stat.S_ISLNK(entry.external_attr >> 16):
                raise _not_a_file(raw, entry.filename)
            with _errors(raw, entry.filename):
                stream = archive.open(entry)
            with stream:
                yield entry.filename, iter(partial(stream.read, CHUNK_BYTES), b"")


def _check_zip(raw: Input, archive: zipfile.ZipFile) -> None:
    """Raise BadZipFile if the directory at the end of a file does not cover the whole file."""
    entries, size = archive.infolist(), raw.path.stat().st_size
    if min((entry.header_offset for entry in entries), default=0):
        raise zipfile.BadZipFile("other data, such as another archive, precedes its first member")
    if sum(entry.compress_size for entry in entries) > size:
        raise zipfile.BadZipFile("its members overlap")
    with raw.path.open("rb") as stream:
        stream.seek(max(0, size - _ZIP_END_BYTES - len(archive.comment)))
        if not stream.read().startswith(_ZIP_MAGICS[1]):
            raise zipfile.BadZipFile("other data follows its end")


def _not_a_file(raw: Input, name: str) -> UserError:
    return UserError(f"{raw.path}: {name} is a link, not a file; unpack the archive")


# ---- Tar ----


def _tar_members(raw: Input) -> Iterator[tuple[str, Iterator[bytes]]]:
    largest = _LARGEST if raw.compression else raw.path.stat().st_size
    members = TarStream(raw.chunks(), largest).members()
    while member := _next(raw, members):
        name = member.name.removeprefix("./")
        if not _is_hidden(name):
            if not member.is_file:
                raise _not_a_file(raw, name)
            yield name, member.content


class _Sample(NamedTuple):
    """Members whose names differ only after the first dot."""

    beginning: str
    texts: dict[str, str | BadRecord]
    """By the ends of their names."""

    def record(self, keys: tuple[str, ...]) -> dict[str, Any] | BadRecord:
        for key in keys:
            text = self.texts.get(key)
            if text is None:
                return BadRecord(f"there is no {self.beginning}.{key}; fix text_key or the archive")
            if isinstance(text, BadRecord):
                return text
        return dict(self.texts)


def _ends_of_first_sample(raw: Input) -> set[str]:
    """Return the ends of the names of the first members that share the beginning of their names."""
    ends: set[str] = set()
    beginning: str | None = None
    # Another input, because an input counts the bytes that it reads.
    again = Input(raw.path, raw.format, compression=raw.compression, head=raw.head)
    for name, _ in _tar_members(again):
        start, end = _split_name(name)
        if beginning not in (None, start):
            break
        beginning = start
        ends.add(end)
    return ends


def _samples(raw: Input, keys: tuple[str, ...]) -> Iterator[RecordBlock]:
    samples: list[_Sample] = []
    size = 0
    for name, content in _tar_members(raw):
        beginning, end = _split_name(name)
        if not samples or beginning != samples[-1].beginning:
            if size >= BLOCK_BYTES:
                yield _block(samples, keys)
                samples, size = [], 0
            samples.append(_Sample(beginning, {}))
        if end in keys or end in raw.metadata_keys:
            texts = samples[-1].texts
            if end in texts:
                raise UserError(f"{raw.path}: has {name} twice; make the archive again")
            data = _content(raw, content, name=name)
            texts[end] = _text(name, data)
            size += len(data)
    if samples:
        yield _block(samples, keys)


def _content(raw: Input, content: Iterator[bytes], *, name: str) -> bytes:
    if (data := read_all(_pieces(raw, content, name), LONGEST_BYTES)) is None:
        raise UserError(f"{raw.path}: {name} is longer than {LONGEST_BYTES:,} bytes; split it")
    return data


def _text(name: str, data: bytes) -> str | BadRecord:
    try:
        return data.removeprefix(BOM_UTF8).decode()
    except UnicodeDecodeError as error:
        bad = not_utf8(error)
        return bad._replace(reason=f"{name}: {bad.reason}")


def _block(samples: list[_Sample], keys: tuple[str, ...]) -> RecordBlock:
    return row_block([sample.record(keys) for sample in samples], 0)


def _split_name(name: str) -> tuple[str, str]:
    """Split a name at the first dot of its last part: a/0.txt.en into a/0 and txt.en."""
    folder, slash, last = name.rpartition("/")
    start, _, end = last.partition(".")
    return f"{folder}{slash}{start}", end


def _is_tar(head: bytes) -> bool:
    return head[257:262] == b"ustar"


def _is_hidden(name: str) -> bool:
    """Whether a member is hidden, as files in folders are: a part begins with a dot or _."""
    parts = set(name.split("/")) - {".", ".."}
    return any(part.startswith((".", "_")) for part in parts)


@contextmanager
def _errors(raw: Input, name: str = "") -> Iterator[None]:
    """Turn errors of tarfile and zipfile into `UserError`; RuntimeError is one of encryption."""
    member = f"{name}: " if name else ""
    try:
        yield
    except (NotImplementedError, RuntimeError) as error:
        fault = f"cannot be read as archive ({member}{error}); unpack it"
        raise UserError(f"{raw.path}: {fault}") from None
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, OSError) as error:
        raise damaged(raw, f"{member}{error}") from None
