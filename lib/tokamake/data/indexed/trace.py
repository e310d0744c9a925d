"""Tool `trace`: a document or token of a pair back to the raw line that it came from.

The map beside the pair says which line it is; the line is read from the raw file if that is there.
"""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokamake.errors import UserError
from tokamake.runtime.console import counted

if TYPE_CHECKING:
    from tokamake.data.indexed.dataset import IndexedDataset
    from tokamake.data.indexed.document_sources import RawLocation


def trace(
    prefix: Path,
    document: int | None = None,
    /,
    *,
    token: int | None = None,
    data_root: Path = Path(),
    max_characters: int = 300,
) -> None:
    """Find the raw file and line (or row) that a document of a pair was made from.

    Args:
        prefix: pair made by tokenize or merge, named without .bin or .idx.
        document: number of the document, from 0; negative ones count from the end.
        token: number of a token in the .bin file instead, from 0.
        data_root: folder that the raw files' relative paths count from.
        max_characters: how much of the raw line to show; 0 shows only its place.

    Raises:
        UserError: there is no such document, or the pair has no map of sources.
    """
    from tokamake.data.corpus.documents import Fields
    from tokamake.data.indexed.dataset import IndexedDataset

    pair = IndexedDataset(prefix)
    number = _document(pair, prefix, document, token)
    first, last = (int(bound) for bound in pair.document_bounds[number : number + 2])
    stated = _manifest(prefix)
    source, place = _origin(prefix, stated, number)
    tokens = int(pair.lengths[first:last].sum())
    print(f"document {number}, {counted(tokens, 'token')}: {_where(source, place)}")
    if max_characters:
        keys = Fields((stated["text_key"],), stated["template"]).read_keys
        text = _text(data_root / source["path"], source, place, keys)
        print(text if text.startswith("(") else text[: max(max_characters, 0)])


def origin(prefix: Path, document: int) -> str:
    """Raw file and line (or row) of a document of a pair, for people.

    Raises:
        UserError: there is no such document, or the pair has no map of sources.
    """
    return _where(*_origin(prefix, _manifest(prefix), document))


def _manifest(prefix: Path) -> dict[str, Any]:
    from tokamake.data.indexed.merge_inputs import find_manifest

    stated = find_manifest(prefix)
    if stated is None:
        raise UserError(
            f"{prefix}: has no manifest and no map of sources, as pairs of other programs and of "
            "`repair`; pairs of `tokenize` and `merge` can be traced"
        )
    return stated


def document_of(pair: "IndexedDataset", sequence: int) -> int:
    """Number of the document that a sequence of a pair belongs to."""
    import numpy as np

    return int(np.searchsorted(pair.document_bounds, sequence, side="right")) - 1


def _origin(
    prefix: Path, stated: dict[str, Any], document: int
) -> tuple[dict[str, Any], "RawLocation"]:
    """The raw file of a document, as the manifest describes it, and the place in it."""
    from tokamake.data.indexed.document_sources import find
    from tokamake.data.indexed.manifest import raw_inputs

    place, sources = find(prefix, document), raw_inputs(stated)
    if place.input >= len(sources):
        raise UserError(f"{prefix}: its map of sources and manifest disagree; make the pair again")
    return sources[place.input], place


def _where(source: dict[str, Any], place: "RawLocation") -> str:
    start = (source["byte_range"] or [0])[0]
    where = f"{source['path']}: {source['unit']} {place.number}"
    return where + (f" counted from byte {start}" if start and source["unit"] == "line" else "")


def _document(pair: "IndexedDataset", prefix: Path, document: int | None, token: int | None) -> int:
    """Number of the document that the user means."""
    import numpy as np

    documents = len(pair.document_bounds) - 1
    if (document is None) == (token is None):
        raise UserError("give either the number of a document or --token and that of a token")
    if token is not None:
        if not 0 <= token < len(pair.tokens):
            raise UserError(f"{prefix}: no token {token}; it has {len(pair.tokens):,}, from 0")
        byte = token * pair.tokens.itemsize
        return document_of(pair, int(np.searchsorted(pair.pointers, byte, side="right")) - 1)
    assert document is not None
    if not -documents <= document < documents:
        raise UserError(f"{prefix}: no document {document}; it has {documents:,}, from 0")
    return document % documents


def _text(path: Path, source: dict[str, Any], place: "RawLocation", keys: tuple[str, ...]) -> str:
    """The raw line, or what keeps it from being shown."""
    if not path.is_file():
        return f"({path} is not there; --data-root names the folder it counts from)"
    if source["byte_range"] is None and path.stat().st_size != source["bytes"]:
        return f"({path} has changed since: it has another size)"
    if source["format"] == "text":
        return "(the whole file)"
    if source["compression"]:
        tool = {"gz": "zcat", "zst": "zstdcat", "xz": "xzcat", "bz2": "bzcat"}
        name = shlex.quote(str(path))
        return f"(compressed; {tool[source['compression']]} {name} | sed -n {place.number}p)"
    if source["unit"] == "row":
        return _row(path, source, place.number, keys)
    with path.open("rb") as stream:
        stream.seek(max(place.offset - 1, 0))
        if place.offset and stream.read(1) != b"\n":
            return f"({path} has changed since: no line begins at byte {place.offset})"
        for _ in range(place.skip):
            stream.readline()
        return stream.readline().decode("utf-8", "replace").rstrip("\n")


def _row(path: Path, source: dict[str, Any], number: int, keys: tuple[str, ...]) -> str:
    """A row of a table, as JSON."""
    import json

    find = _parquet_row if source["format"] == "parquet" else _arrow_row
    row = find(path, number, keys)
    if row is None:
        return f"({path} has changed since: it has no row {number})"
    return json.dumps(row, default=str)


def _arrow_row(path: Path, number: int, keys: tuple[str, ...]) -> Any:
    from tokamake.data.readers import open_input

    for block in open_input(path).blocks(keys):
        if number <= block.numbers[-1]:
            return block.records[number - int(block.numbers[0])]
    return None


def _parquet_row(path: Path, number: int, keys: tuple[str, ...]) -> Any:
    """Read a row of the row group that holds it, and nothing else."""
    from pyarrow import parquet

    file = parquet.ParquetFile(path)
    for group in range(file.num_row_groups):
        rows = file.metadata.row_group(group).num_rows
        if number < rows:
            return file.read_row_group(group, columns=list(keys)).slice(number, 1).to_pylist()[0]
        number -= rows
    return None
