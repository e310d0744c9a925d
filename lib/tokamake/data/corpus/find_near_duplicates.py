"""Stage `find_near_duplicates`: documents that share a MinHash band key with an earlier one.

Clusters are the connected components of documents that share keys. The first document of each
cluster, in the order of the files, is kept. So the result depends neither on jobs and threads nor
on the parts in which keys are sorted.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokamake import _csrc
from tokamake.data.corpus.document_rows import (
    HASH,
    NEAR,
    ORDINAL,
    RowsWriter,
    read_rows,
    read_table,
    rows_width,
)
from tokamake.data.corpus.near_duplicate_keys import KeyFile, Keys, Shard, write_key_file
from tokamake.data.corpus.plan_file import read_plan
from tokamake.errors import UserError
from tokamake.files import atomic, emptied

_PART_ROWS = 1 << 24  # keys sorted at once; sorting them takes about 0.7 GB of memory
_CHUNK_ROWS = 1 << 20  # rows read at once
_MOST_DOCUMENTS = (1 << 32) - 1
_ENTRY = np.dtype([("key", HASH), ("row", "<u4")])

Rows = npt.NDArray[np.uint32]


def find_near_duplicates(
    files: list[Path],
    /,
    *,
    plan: Path,
    output: Path,
    table: Path,
    keys: Path | None = None,
    against: tuple[Path, ...] = (),
    workers: int = 1,
) -> None:
    """Find documents that are nearly the same as an earlier one, by their MinHash band keys.

    The first document of each cluster is kept. Memory is 4 bytes per document and about 0.7 GB per
    worker; keys that are more than that are sorted in parts, on the disk of `output`.

    Args:
        files: files of keys from `sign-documents`, in the order of the corpora.
        plan: plan.json of the workflow, which names the raw files.
        output: file of duplicates to write; an input of `tokenize`.
        table: parquet file to write: place of each duplicate, and of the document that is kept.
        keys: file of sorted keys to write, with which later documents can be compared.
        against: such files of earlier data; documents near one of theirs are duplicates.
        workers: threads that sort.
    """
    # pyarrow takes long to import, and `--help` should be instant.
    from tokamake.data.corpus.near_duplicate_table import PlacedDocuments, Twins, write_table

    if not files:
        raise UserError("find-near-duplicates: no file given; name at least one")
    signed = _Signed.open(files)
    earlier = [KeyFile.open(path, num_bands=signed.num_bands) for path in against]
    with emptied(output.with_name(f".{output.name}.parts")) as folder:
        bands = _Bands(signed, folder)
        roots = _clusters(bands, workers=workers)
        matches = _matches(bands, earlier, roots=roots)
        dropped = np.flatnonzero((roots != np.arange(len(roots), dtype=np.uint32)) | (matches >= 0))
        with ExitStack() as stack:
            (rows_file,) = stack.enter_context(atomic(output))
            (table_file,) = stack.enter_context(atomic(table))
            _write_rows(rows_file, signed, dropped=dropped)
            own = PlacedDocuments(signed.shards(plan), signed.places())
            twins = Twins(dropped, roots, matches)
            write_table(table_file, twins, own=own, earlier=PlacedDocuments.of_files(earlier))
            if keys:
                (keys_file,) = stack.enter_context(atomic(keys))
                write_key_file(
                    keys_file, _kept_keys(bands, roots), places=own.places, shards=own.shards
                )
    share = len(dropped) / len(roots) if len(roots) else 0.0
    print(
        f"{output}: {len(dropped):,} of {len(roots):,} documents are near-duplicates ({share:.2%})"
    )


class _Signed(NamedTuple):
    """Documents with keys, of all files together."""

    files: list[Path]
    tables: list[tuple[str, int]]
    """Shards and their numbers of documents."""
    num_bands: int
    num_documents: int

    @classmethod
    def open(cls, files: list[Path]) -> "_Signed":
        """Read the tables of the files, after all their bytes are compared with their CRC-32."""
        tables = [entry for path in files for entry in read_table(path, verify=True)]
        total = sum(rows for _, rows in tables)
        if total > _MOST_DOCUMENTS:
            raise UserError(
                f"{total:,} documents are too many to compare at once; set "
                "near_duplicates.scope to corpus"
            )
        widths = {rows_width(path, HASH) for path in files} - {0}
        if len(widths) > 1:
            raise UserError(
                f"{files[0].parent}: keys of several settings; remove the folder and rerun the "
                "workflow"
            )
        return cls(files, tables, max(widths, default=1) - 1, total)

    def shards(self, plan: Path) -> list[Shard]:
        """Shards, their numbers of documents, and their raw files."""
        files = {shard.name: shard.files for shard in read_plan(plan).shards}
        return [(name, rows, files[name]) for name, rows in self.tables]

    def places(self) -> Keys:
        """(documents,) place of each document in its shard."""
        return np.concatenate([np.zeros(0, HASH), *(rows[:, -1] for _, rows in self.chunks())])

    def chunks(self) -> Iterator[tuple[int, Keys]]:
        """Yield first document and (documents, bands + 1) rows, without reading ahead."""
        first = 0
        for path in self.files:
            rows = read_rows(path, HASH, width=self.num_bands + 1)
            for start in range(0, len(rows), _CHUNK_ROWS):
                chunk = rows[start : start + _CHUNK_ROWS]
                yield first + start, chunk
            first += len(rows)


class _Bands:
    """Keys of documents by band, each in parts of a range of keys, in files of a folder."""

    def __init__(self, signed: _Signed, folder: Path) -> None:
        self.signed, self._folder = signed, folder
        self.num_parts = max(1, -(-signed.num_documents // _PART_ROWS))
        for first, chunk in signed.chunks():
            for band in range(signed.num_bands):
                self._add(band, np.ascontiguousarray(chunk[:, band]), first=first)

    def _add(self, band: int, keys: Keys, *, first: int) -> None:
        rows = np.flatnonzero(keys)  # 0: no key
        entries = np.empty(len(rows), _ENTRY)
        entries["key"], entries["row"] = keys[rows], rows + first
        if self.num_parts == 1:
            self._write(band, 0, entries=entries)
            return
        # The top 32 bits as a fraction of 1, times the parts: equal keys share a part.
        parts = ((entries["key"] >> np.uint64(32)) * self.num_parts >> np.uint64(32)).astype(int)
        order = np.argsort(parts, kind="stable")
        ends = np.searchsorted(parts[order], np.arange(1, self.num_parts + 1))
        for part, indices in enumerate(np.split(order, ends[:-1])):
            self._write(band, part, entries=entries[indices])

    def _write(self, band: int, part: int, *, entries: npt.NDArray[Any]) -> None:
        with (self._folder / f"{band}-{part}").open("ab") as stream:
            stream.write(entries.data)

    def part(self, band: int, part: int) -> tuple[Keys, Rows]:
        """Keys of a part of a band, ascending, and the document of each."""
        path = self._folder / f"{band}-{part}"
        entries = np.fromfile(path, _ENTRY) if path.exists() else np.zeros(0, _ENTRY)
        order = np.argsort(entries["key"])
        return entries["key"][order], entries["row"][order]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yield each band and part, bands one after the other."""
        for band in range(self.signed.num_bands):
            for part in range(self.num_parts):
                yield band, part


def _clusters(bands: _Bands, *, workers: int) -> Rows:
    """(documents,) first document of the cluster of each document."""
    roots = np.arange(bands.signed.num_documents, dtype=np.uint32)

    def pairs(band_and_part: tuple[int, int]) -> tuple[Rows, Rows]:
        return _equal_keys(*bands.part(*band_and_part))

    todo = list(bands)
    with ThreadPoolExecutor(max(1, workers)) as pool:
        # Few parts at once: the pairs of parts that wait take memory.
        for start in range(0, len(todo), max(1, workers)):
            for first, second in pool.map(pairs, todo[start : start + max(1, workers)]):
                _csrc.join_clusters(roots, first, second)
    _csrc.resolve_clusters(roots)
    return roots


def _run_starts(keys: Keys) -> npt.NDArray[np.int64]:
    """Index of the first of each run of equal keys."""
    return np.flatnonzero(np.concatenate(([True] * bool(len(keys)), keys[1:] != keys[:-1])))


def _equal_keys(keys: Keys, rows: Rows) -> tuple[Rows, Rows]:
    """Pairs of documents that join all with equal keys: each with the first of its run."""
    starts = _run_starts(keys)
    sizes = np.diff(starts, append=len(keys))
    is_repeated = np.repeat(sizes > 1, sizes)
    heads = np.repeat(rows[starts], sizes)
    return np.ascontiguousarray(heads[is_repeated]), np.ascontiguousarray(rows[is_repeated])


def _write_rows(path: Path, signed: _Signed, *, dropped: npt.NDArray[np.int64]) -> None:
    with RowsWriter(path, NEAR) as writer:
        first = 0
        for shard, rows in signed.tables:
            start, end = np.searchsorted(dropped, [first, first + rows])
            writer.add(shard, (dropped[start:end] - first).astype(ORDINAL))
            first += rows


# ---- Documents of earlier data ----


def _matches(bands: _Bands, earlier: Sequence[KeyFile], *, roots: Rows) -> npt.NDArray[np.int64]:
    """(documents,) document of earlier data that the cluster of each document is near to, or -1.

    Documents of earlier data are numbered over all files; the first one counts.
    """
    none = np.iinfo(np.int64).max
    nearest = np.full(len(roots), none)
    first = 0
    for file in earlier:
        for band, part in bands:
            old_keys = file.keys[band]
            keys, rows = bands.part(band, part)
            if not len(old_keys):
                continue
            places = np.searchsorted(old_keys, keys)
            places[places == len(old_keys)] = 0
            found = np.flatnonzero(old_keys[places] == keys)
            documents = file.kept[band][places[found]].astype(np.int64) + first
            np.minimum.at(nearest, roots[rows[found]], documents)
        first += len(file.places)
    nearest[nearest == none] = -1
    return nearest[roots]


def _kept_keys(bands: _Bands, roots: Rows) -> Iterator[tuple[Keys, Keys]]:
    """Different keys of each band, ascending, and the document that is kept of each."""
    for band in range(bands.signed.num_bands):
        parts = []
        for part in range(bands.num_parts):
            keys, rows = bands.part(band, part)
            starts = _run_starts(keys)
            parts.append((keys[starts], roots[rows[starts]].astype(np.uint64)))
        keys, kept = (np.concatenate(each) for each in zip(*parts, strict=True))
        yield keys, kept
