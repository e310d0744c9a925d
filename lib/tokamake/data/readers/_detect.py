"""Detection of a file's format and compression from its content. Unreadable formats are refused."""

import re
from codecs import BOM_UTF8
from itertools import islice
from pathlib import Path
from typing import Any

import orjson

from tokamake import plugins
from tokamake.data.readers._compression import SUFFIXES, compression, unpack
from tokamake.data.readers._input import readers, reading
from tokamake.errors import UserError

HEAD_BYTES = 1 << 16
"""Number of decompressed bytes that detection reads."""

_UNSUPPORTED = {
    b"7z\xbc\xaf\x27\x1c": "a 7z archive; unpack it",
    b"\x04\x22\x4d\x18": "lz4; unpack it, or compress it with zstd",
    b"\x1f\x9d": "compressed by `compress`; unpack it",
    b"FEA1": "Feather version 1; convert it to parquet",
    b"ORC": "ORC; convert it to parquet",
    b"Obj\x01": "Avro; convert it to parquet",
    b"\x89HDF": "HDF5; convert it to parquet",
    b"SQLite format 3\0": "an SQLite database; convert it to parquet",
    b"%PDF": "PDF; extract its text",
    b"version https://git-lfs.github.com/spec/": "a Git LFS pointer, not the data: git lfs pull",
    b"version https://hawser.github.com/spec/": "a Git LFS pointer, not the data: git lfs pull",
    b"/annex/objects/": "a git-annex pointer, not the data: git annex get",
}
_PAGE = re.compile(rb"\s*(<\?xml[^>]*>\s*)?<(!doctype html|html|error)\b", re.IGNORECASE)
"""Beginning of an HTML page, or of an object store's error."""
# UTF-32 first: its little-endian byte order mark begins with UTF-16's.
_WIDE_BYTE_ORDER_MARKS = {
    b"\xff\xfe\0\0": "UTF-32",
    b"\0\0\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}


def sniff(path: Path, format: str = "") -> tuple[str, str]:
    """Return the format (detected unless given) and the compression (empty if none) of a file.

    The content decides; the file name decides where the content is ambiguous.
    """
    return look(path, format)[:2]


def look(path: Path, format: str = "") -> tuple[str, str, bytes]:
    """Return the format, the compression and the first decompressed bytes of a file."""
    packing, head = _head(path)
    if format and getattr(readers().get(format), "IS_NAMED_ONLY", False):
        return format, packing, head
    if not packing and path.suffix.lower() in SUFFIXES:
        _refuse_text(head, path)
    detected = find_format(head, path, stated=format)
    if format:  # trusted, unless magic bytes contradict it
        if detected not in (None, format):
            raise UserError(
                f"{path}: has the format {detected}, not {format}; fix or leave out the format"
            )
        return plugins.check("data/readers", format), packing, head
    if detected:
        return detected, packing, head
    raise UserError(
        f"{path}: has no known format "
        f"({', '.join(readers())}); convert it to jsonl, or name its format"
    )


def find_format(head: bytes, path: Path, *, stated: str = "") -> str | None:
    """Return the format of content that begins with `head`; None: no reader accepts it.

    If the user states a format, names and guesses decide nothing: only magic bytes contradict it.
    """
    by_magic = [name for name, reader in readers().items() if reader.HAS_MAGIC]
    for name in by_magic:
        if readers()[name].accepts(head, path):
            return name
    _refuse_unsupported(head, path)
    others = [] if stated else [name for name in readers() if name not in by_magic]
    accepting = [name for name in others if readers()[name].accepts(head, path)]
    chosen = stated or (accepting[0] if accepting else "")
    if not getattr(readers().get(chosen), "READS_ALL_ENCODINGS", False):
        _refuse_wide(head, path)
        if others and _PAGE.match(head):
            raise UserError(
                f"{path}: is an HTML page or an error page, not data; fetch it again, or give it "
                "the format html if such pages are the data"
            )
    return accepting[0] if accepting else None


def _head(path: Path) -> tuple[str, bytes]:
    if path.is_dir():
        raise UserError(f"{path}: is a folder; name files")
    if path.exists() and not path.is_file():  # a pipe can be read only once, and may never end
        raise UserError(f"{path}: is a pipe or device; write its output to a file")
    with reading(path), path.open("rb") as stream:
        head = stream.read(HEAD_BYTES)
        packing = compression(head)
        if packing:
            stream.seek(0)
            chunks = iter(lambda: stream.read(HEAD_BYTES), b"")
            blocks = unpack(chunks, packing, path=path, block_bytes=HEAD_BYTES)
            return packing, b"".join(islice(blocks, 1))[:HEAD_BYTES]
    if not head and path.suffix in SUFFIXES | {".parquet", ".arrow", ".feather"}:
        raise UserError(
            f"{path}: is empty, but a valid {path.suffix} file never is; fetch it again"
        )
    return packing, head


def _refuse_text(head: bytes, path: Path) -> None:
    """Refuse other content than JSON that is not compressed, although its name says so."""
    by_magic = (reader for reader in readers().values() if reader.HAS_MAGIC)
    is_known = any(reader.accepts(head, path) for reader in by_magic)
    if not is_known and not first_line(head)[0].startswith((b"{", b"[")):
        _refuse_unsupported(head, path)
        _refuse_wide(head, path)
        raise UserError(
            f"{path}: is not a {path.suffix} file, although it is named so, nor JSON; it may be an "
            "error page or damaged: fetch it again, or rename it if it is not compressed"
        )


def _refuse_unsupported(head: bytes, path: Path) -> None:
    for magic, remedy in _UNSUPPORTED.items():
        if head.startswith(magic):
            raise UserError(f"{path}: is {remedy}")


def _refuse_wide(head: bytes, path: Path) -> None:
    if encoding := _wide_encoding(head):
        raise UserError(
            f"{path}: is {encoding}, not UTF-8; convert it: "
            f"iconv -f {encoding} -t UTF-8 {path} > NEW"
        )


def _wide_encoding(head: bytes) -> str:
    """Return UTF-16 or UTF-32 (by byte order mark, or by zero bytes in ASCII text), or empty."""
    for mark, name in _WIDE_BYTE_ORDER_MARKS.items():
        if head.startswith(mark):
            return name
    text = head[: min(len(head), 64) // 4 * 4]
    if not text.strip(b"\0"):
        return ""
    for name, zero_bytes in {
        "UTF-32LE": (text[1::4], text[2::4], text[3::4]),
        "UTF-32BE": (text[0::4], text[1::4], text[2::4]),
        "UTF-16LE": (text[1::2],),
        "UTF-16BE": (text[0::2],),
    }.items():
        if not any(column.strip(b"\0") for column in zero_bytes):
            return name
    return ""


def first_line(head: bytes) -> tuple[bytes, bool]:
    """Return the first nonblank line without byte order mark, and whether it is complete."""
    line, feed, _ = head.removeprefix(BOM_UTF8).lstrip().partition(b"\n")
    return line, bool(feed) or len(head) < HEAD_BYTES


def parse_json_line(line: bytes) -> Any:
    """Return the value of a line; None if it is not JSON."""
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        return None


def content_suffix(path: Path) -> str:
    """Return the lower-case suffix without the suffix of a compression: .jsonl for A.JSONL.gz."""
    plain = path.with_suffix("") if path.suffix.lower() in SUFFIXES else path
    return plain.suffix.lower()
