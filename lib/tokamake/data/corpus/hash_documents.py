"""Stage `hash_documents`: hash each document of a job batch, to find duplicates."""

from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tokamake.data.corpus.batch_rows import write_batch_rows
from tokamake.data.corpus.document_rows import HASH
from tokamake.data.corpus.documents import Fields, split_keys, texts
from tokamake.data.corpus.filtered_documents import DocumentSource, FilteredBlock
from tokamake.data.readers import select_texts
from tokamake.runtime.console import counted


def hash_documents(
    *,
    plan: Path,
    batch: str,
    output: Path,
    text_key: tuple[str, ...] = ("text",),
    template: str = "",
    format: str = "",
    filters: str = "",
    filter_seconds: float = 60,
) -> None:
    """Hash the text of each document of a job batch, to find duplicates.

    The hash is BLAKE2b with 128 bits over the UTF-8 text, or over the texts of all keys, as they
    are before filters change them. Bad and empty documents, and documents that filters drop, get
    unique hashes, because they are not duplicates; `tokenize` handles them.

    Args:
        plan: plan.json of the workflow.
        batch: name of a `tokenize` batch in the plan.
        output: file of hashes to write.
        text_key: key or column that holds the text; several keys are compared together.
        template: text of a document as a combination of keys.
        format: format of the files, if the stage cannot detect it.
        filters: filters of documents, as in `tokenize`. The workflow gives them if they may keep
            one of two documents with equal texts and drop the other.
        filter_seconds: time limit of the filters of a document, as in `tokenize`.
    """
    fields = Fields(split_keys(text_key), template)
    source = DocumentSource(fields, format, filters, filter_seconds)
    shards = (
        (shard, _hashes(shard.name, blocks, fields=fields if filters else None))
        for shard, blocks in source.shards(plan, batch)
    )
    num_documents = write_batch_rows(
        output, shards, dtype=HASH, width=2, made_from=source.made_from()
    )
    print(f"{output}: {counted(num_documents, 'document')}")


def _hashes(
    shard: str, blocks: Iterator[FilteredBlock], *, fields: Fields | None
) -> Iterator[npt.NDArray[np.uint64]]:
    """Yield the hashes (documents, 2) of blocks; `fields`: read texts that filters may change."""
    num_read = 0
    for _, block, columns, kept, _ in blocks:
        if fields:
            raw = texts(block, fields)
            indices = np.flatnonzero(np.isin(raw.kept, kept, assume_unique=True)).tolist()
            columns = tuple(select_texts(column, indices) for column in raw.columns)
        hashes = [b""] * len(block.records)
        for index, document in zip(kept.tolist(), zip(*columns, strict=True), strict=True):
            if any(document):
                hashes[index] = _hash(document)
        for index, value in enumerate(hashes):
            # Another BLAKE2b `person` than texts have, so that no text has this hash.
            hashes[index] = value or _hash((shard, str(num_read + index)), b"alone")
        num_read += len(hashes)
        yield np.frombuffer(b"".join(hashes), HASH).reshape(-1, 2)


def _hash(document: tuple[str, ...], person: bytes = b"") -> bytes:
    if len(document) == 1:
        return blake2b(document[0].encode(), digest_size=16, person=person).digest()
    encoded = [text.encode() for text in document]
    # With sizes, ("ab", "c") and ("a", "bc") have different hashes.
    sizes = b"".join(len(text).to_bytes(8, "little") for text in encoded)
    return blake2b(sizes + b"".join(encoded), digest_size=16, person=person).digest()
