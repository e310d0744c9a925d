"""Stage `sign_documents`: MinHash band keys of each document of a job batch.

A row of the output has a key for each band and, last, the place of the document in its raw files,
as `pack_places` packs it. Duplicates, documents that filters drop, bad documents and texts without
words have the key 0 in each band.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from tokamake.data.corpus.batch_rows import write_batch_rows
from tokamake.data.corpus.document_rows import HASH, read_rows
from tokamake.data.corpus.documents import Fields, split_keys
from tokamake.data.corpus.filtered_documents import DocumentSource, FilteredBlock
from tokamake.runtime.console import counted

if TYPE_CHECKING:
    from tokamake._csrc import MinHash

_NUMBER_BITS = 43  # of a packed place; 20 bits are left for the file


class Places(NamedTuple):
    """Places of documents in the raw files of their shards, (documents,) each."""

    file: npt.NDArray[np.int64]
    """Index of the raw file."""
    number: npt.NDArray[np.int64]
    """First byte of the line in the file, or the number of the row, line, page or record."""
    is_byte: npt.NDArray[np.bool_]


def pack_places(
    file: int, numbers: npt.NDArray[np.int64], *, offsets: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint64]:
    """(documents,) places in one file; the arguments are as in `RecordBlock`."""
    is_byte = offsets >= 0
    flags = is_byte.astype(np.int64) | file << 1
    return (flags << _NUMBER_BITS | np.where(is_byte, offsets, numbers)).astype(np.uint64)


def unpack_places(packed: npt.NDArray[np.uint64]) -> Places:
    """The places that `pack_places` packed."""
    flags = (packed >> np.uint64(_NUMBER_BITS)).astype(np.int64)
    numbers = (packed & np.uint64((1 << _NUMBER_BITS) - 1)).astype(np.int64)
    return Places(flags >> 1, numbers, (flags & 1).astype(bool))


def sign_documents(
    *,
    plan: Path,
    batch: str,
    output: Path,
    text_key: tuple[str, ...] = ("text",),
    template: str = "",
    format: str = "",
    filters: str = "",
    filter_seconds: float = 60,
    on_bad_document: Literal["stop", "quarantine"] = "stop",
    duplicates: tuple[Path, ...] = (),
    bands: int = 14,
    rows: int = 8,
    shingle: int = 5,
    unit: Literal["words", "characters"] = "words",
) -> None:
    """Compute the MinHash band keys of each document of a job batch, to find near-duplicates.

    Filters run first, as in `tokenize`. Several text keys count as one text. Duplicates and bad
    documents have no keys.

    Args:
        plan: plan.json of the workflow.
        batch: name of a `tokenize` batch in the plan.
        output: file of keys to write.
        text_key: key or column that holds the text; several keys are compared together.
        template: text of a document as a combination of keys.
        format: format of the files, if the stage cannot detect it.
        filters: filters of documents, as in `tokenize`.
        filter_seconds: time limit of the filters of a document, as in `tokenize`.
        on_bad_document: stop at a bad document and at one on which a filter fails, or leave it out
            (quarantine); `tokenize` sets it aside.
        duplicates: files of `find-duplicates`: `tokenize` leaves these documents out, so that none
            of them can be kept in place of another.
        bands: keys of a document; documents that share one are near-duplicates.
        rows: hashes in a band.
        shingle: consecutive words, or characters, whose sets are compared.
        unit: words or characters.
    """
    # These modules import pydantic, and `--help` should be instant.
    from tokamake.config.near_duplicates import MinHashSettings
    from tokamake.config_files import validate
    from tokamake.data.corpus.minhash import make_minhash

    settings = {"bands": bands, "rows": rows, "shingle": shingle, "unit": unit}
    minhash = make_minhash(validate(MinHashSettings, settings, "sign-documents"))
    fields = Fields(split_keys(text_key), template)
    source = DocumentSource(fields, format, filters, filter_seconds, on_bad_document, duplicates)
    shards = (
        (shard, (_rows(filtered, minhash) for filtered in blocks))
        for shard, blocks in source.shards(plan, batch)
    )
    made_from = {"settings": settings, **source.made_from()}
    width = bands + 1
    num_documents = write_batch_rows(output, shards, dtype=HASH, width=width, made_from=made_from)
    num_signed = int(np.count_nonzero(read_rows(output, HASH, width=width)[:, 0]))
    print(f"{output}: {counted(num_documents, 'document')}, {num_signed:,} with keys")


def _rows(filtered: FilteredBlock, minhash: "MinHash") -> npt.NDArray[np.uint64]:
    """(documents, bands + 1) keys and places of all documents of a block."""
    file, block, columns, kept, unit = filtered
    signed = minhash.sign(["\n".join(row) for row in zip(*columns, strict=True)])
    rows = np.zeros((len(block.records), signed.shape[1] + 1), HASH)
    rows[kept, :-1] = signed
    # Pages of a stream of bz2 share an offset, but no number.
    offsets = np.full_like(block.offsets, -1) if unit == "page" else block.offsets
    rows[:, -1] = pack_places(file, block.numbers, offsets=offsets)
    return rows
