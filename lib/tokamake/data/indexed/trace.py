"""Tool `trace`: find the raw line, row or page of a document or token of an indexed dataset."""

import json
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from tokamake.data.corpus.documents import Fields
from tokamake.data.indexed.dataset import IndexedDataset
from tokamake.data.indexed.document_sources import RawLocation, locate_document
from tokamake.data.indexed.manifest import find_manifest, raw_inputs
from tokamake.data.readers import is_one_document, join_format, open_input, value_of
from tokamake.errors import UserError
from tokamake.runtime.console import counted

_DECOMPRESSORS = {"gz": "zcat", "zst": "zstdcat", "xz": "xzcat", "lzma": "xzcat", "bz2": "bzcat"}


def trace(
    prefix: Path,
    document: int | None = None,
    /,
    *,
    token: int | None = None,
    data_root: Path = Path(),
    max_characters: int = 300,
) -> None:
    """Find the raw file and line (or row, or record) of a document of an indexed dataset.

    Args:
        prefix: dataset of tokenize or merge, without .bin or .idx.
        document: number of the document, from 0; a negative number counts from the end.
        token: number of a token in the .bin file, from 0, instead of a document.
        data_root: folder that relative paths of raw files start from.
        max_characters: number of characters of the raw line to print; 0 prints only its location.
    """
    dataset = IndexedDataset(prefix)
    number = _document_number(dataset, prefix, document=document, token=token)
    first, last = (int(bound) for bound in dataset.document_bounds[number : number + 2])
    manifest = _read_manifest(prefix)
    raw, location = _locate(prefix, manifest, document=number)
    tokens = int(dataset.lengths[first:last].sum())
    print(f"document {number}, {counted(tokens, 'token')}: {_describe(raw, location)}")
    if max_characters:
        keys = Fields((manifest["text_key"],), manifest["template"]).read_keys
        text = _raw_text(data_root / raw["path"], raw, location=location, keys=keys)
        _print_text(text, max_characters)


def _print_text(text: str, max_characters: int) -> None:
    shown = max(max_characters, 0)
    # A text in parentheses is a message of `trace`, which must not be shortened.
    if text.startswith("(") or len(text) <= shown:
        print(text)
        return
    print(text[:shown])
    print(f"({shown:,} of {len(text):,} characters; --max-characters {len(text)} shows all)")


def origin(prefix: Path, document: int) -> str:
    """Return the raw file and line (or row, or record) of a document, as text."""
    return origins(prefix, [document])[0]


def origins(prefix: Path, documents: Iterable[int]) -> list[str]:
    """`origin` of several documents of a dataset."""
    manifest = _read_manifest(prefix)
    return [_describe(*_locate(prefix, manifest, document=number)) for number in documents]


def document_of(dataset: IndexedDataset, sequence: int) -> int:
    return int(np.searchsorted(dataset.document_bounds, sequence, side="right")) - 1


def _read_manifest(prefix: Path) -> dict[str, Any]:
    manifest = find_manifest(prefix)
    if manifest is None:
        raise UserError(
            f"{prefix}: has no manifest and no sources file, like datasets of other programs and "
            "of `repair`; trace a dataset of `tokenize` or `merge`"
        )
    return manifest


def _locate(
    prefix: Path, manifest: dict[str, Any], *, document: int
) -> tuple[dict[str, Any], "RawLocation"]:
    location, inputs = locate_document(prefix, document), raw_inputs(manifest)
    if location.input >= len(inputs):
        raise UserError(
            f"{prefix}: its sources file does not match its manifest; rebuild the dataset"
        )
    return inputs[location.input], location


def _describe(raw: dict[str, Any], location: RawLocation) -> str:
    start = (raw["byte_range"] or [0])[0]
    text = f"{raw['path']}: {raw['unit']} {location.number}"
    if raw["unit"] == "record" and location.offset >= 0 and not location.skip:
        return f"{text} at byte {location.offset}"
    return text + (f" counted from byte {start}" if start and raw["unit"] == "line" else "")


def _document_number(
    dataset: IndexedDataset, prefix: Path, *, document: int | None, token: int | None
) -> int:
    num_documents = len(dataset.document_bounds) - 1
    if (document is None) == (token is None):
        raise UserError("give either the number of a document, or --token and a token's number")
    if token is not None:
        if not 0 <= token < len(dataset.tokens):
            raise UserError(
                f"{prefix}: no token {token}; it has {len(dataset.tokens):,}, counted from 0"
            )
        byte = token * dataset.tokens.itemsize
        return document_of(dataset, int(np.searchsorted(dataset.pointers, byte, side="right")) - 1)
    assert document is not None
    if not -num_documents <= document < num_documents:
        raise UserError(
            f"{prefix}: no document {document}; it has {num_documents:,}, counted from 0"
        )
    return document % num_documents


def _raw_text(
    path: Path, raw: dict[str, Any], *, location: RawLocation, keys: tuple[str, ...]
) -> str:
    """Return the raw line, or the reason in parentheses why it cannot be shown."""
    if not path.is_file():
        return f"({path} does not exist; --data-root names the folder that the path starts from)"
    # For a byte range, the manifest states the size of the range, not of the file.
    if raw["byte_range"] is None and path.stat().st_size != raw["bytes"]:
        return f"({path} has changed since: it has another size)"
    if is_one_document(raw["format"]):
        return "(the whole file)"
    if raw["compression"] and raw["unit"] == "line":
        tool, name = _DECOMPRESSORS[raw["compression"]], shlex.quote(str(path))
        return f"(compressed; {tool} {name} | sed -n {location.number}p)"
    if raw["unit"] == "page":
        return _page(path, location, keys=keys, format=raw["format"])
    if raw["unit"] != "line":
        return _row(path, raw, location.number, keys)
    return _line(path, location)


def _line(path: Path, location: RawLocation) -> str:
    with path.open("rb") as stream:
        stream.seek(max(location.offset - 1, 0))
        if location.offset and stream.read(1) != b"\n":
            return f"({path} has changed since: no line begins at byte {location.offset})"
        for _ in range(location.skip):
            stream.readline()
        return stream.readline().decode("utf-8", "replace").rstrip("\n")


def _page(path: Path, location: RawLocation, *, keys: tuple[str, ...], format: str) -> str:
    """Read the stream that holds the page, or the file from the page on."""
    source = open_input(path, byte_range=(max(location.offset, 0), None), format=format)
    for block in source.blocks(keys):
        for index in np.flatnonzero(block.numbers == location.number).tolist():
            return json.dumps({key: value_of(block.records[index], key) for key in keys})
    return f"({path} has changed since: it has no page {location.number})"


def _row(path: Path, raw: dict[str, Any], number: int, keys: tuple[str, ...]) -> str:
    if raw["format"] == "parquet":
        row = _parquet_row(path, number, keys=keys)
    else:
        format = join_format(raw["format"], raw.get("settings", {}))
        row = _read_row(path, number, keys=keys, format=format)
    if row is None:
        return f"({path} has changed since: it has no {raw['unit']} {number})"
    return json.dumps(row, default=str)


def _read_row(path: Path, number: int, *, keys: tuple[str, ...], format: str) -> Any:
    for block in open_input(path, format=format).blocks(keys):
        if number <= block.numbers[-1]:
            return block.records[int(np.searchsorted(block.numbers, number))]
    return None


def _parquet_row(path: Path, number: int, *, keys: tuple[str, ...]) -> Any:
    """Read only the row group that holds the row."""
    from pyarrow import parquet

    file = parquet.ParquetFile(path)
    for group in range(file.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        if number < rows:
            return file.read_row_group(group, columns=list(keys)).slice(number, 1).to_pylist()[0]
        number -= rows
    return None
