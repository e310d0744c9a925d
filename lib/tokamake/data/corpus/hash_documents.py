"""Stage `hash_documents`: the raw files of a batch of shards become a hash of each document."""

from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from tokamake.data.corpus.documents import Fields
    from tokamake.data.corpus.plan_file import PlannedShard


def hash_documents(
    *,
    plan: Path,
    batch: str,
    output: Path,
    text_key: tuple[str, ...] = ("text",),
    template: str = "",
    format: str = "",
) -> None:
    """Hash the text of each document of a batch, so that duplicates can be found.

    The hash is 128 bits of BLAKE2b over the UTF-8 text, or over the texts of all keys. Bad and
    empty documents get hashes that no other document has: `tokenize` deals with them.

    Args:
        plan: plan.json of the workflow.
        batch: name of a `tokenize` batch in it.
        output: file of hashes to write.
        text_key: key or column that holds the text; several: they are compared together.
        template: text of a document, from several keys.
        format: format of the files, where it cannot be told from them.

    Raises:
        UserError: a raw file is missing or damaged.
    """
    from tokamake.data.corpus.document_rows import RowsWriter
    from tokamake.data.corpus.documents import Fields, split_keys
    from tokamake.data.corpus.plan_file import batch_shards
    from tokamake.files import atomic
    from tokamake.runtime.console import counted

    documents = 0
    fields = Fields(split_keys(text_key), template)
    with atomic(output) as (temporary,), RowsWriter(temporary) as writer:
        for shard in batch_shards(plan, batch):
            for rows in _hashes(shard, fields, format):
                writer.add(shard.name, rows)
                documents += len(rows)
    print(f"{output}: {counted(documents, 'document')}")


def _hashes(
    shard: "PlannedShard", fields: "Fields", format: str
) -> "Iterator[npt.NDArray[np.uint64]]":
    """(documents, 2) hashes, block by block; at least one array, for a shard without documents."""
    import numpy as np

    from tokamake.data.corpus.document_rows import HASH
    from tokamake.data.corpus.documents import texts
    from tokamake.data.readers import open_input, parse_range

    read = 0
    yield np.zeros((0, 2), HASH)
    paths = [Path(path) for path in shard.files]
    byte_range = parse_range(shard.byte_range, paths)
    for path in paths:
        source = open_input(path, byte_range=byte_range, format=format)
        for block in source.blocks(fields.read_keys):
            found = texts(block, fields)
            hashes = [b""] * len(block.records)
            for index, parts in zip(
                found.kept.tolist(), zip(*found.columns, strict=True), strict=True
            ):
                if any(parts):
                    hashes[index] = _hash(parts)
            for index, value in enumerate(hashes):
                hashes[index] = value or _hash((shard.name, str(read + index)), b"alone")
            read += len(hashes)
            yield np.frombuffer(b"".join(hashes), HASH).reshape(-1, 2)


def _hash(parts: tuple[str, ...], person: bytes = b"") -> bytes:
    if len(parts) == 1:
        return blake2b(parts[0].encode(), digest_size=16, person=person).digest()
    encoded = [part.encode() for part in parts]
    sizes = b"".join(len(part).to_bytes(8, "little") for part in encoded)
    return blake2b(sizes + b"".join(encoded), digest_size=16, person=person).digest()
