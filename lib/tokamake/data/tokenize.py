"""Stage `tokenize`: raw files become one .bin/.idx pair, one sequence a document.

Texts stream from `readers` in file order through the tokenizer in batches to the pair's writer.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from tokamake import __version__
from tokamake.errors import UserError

if TYPE_CHECKING:
    from tokamake.data.indexed import Writer
    from tokamake.data.tokenizers import Tokenizer

_BATCH_CHARACTERS = 2_000_000


def tokenize(
    files: list[Path],
    /,
    *,
    output: Path,
    tokenizer: Path,
    text_key: str = "text",
    append_eod: bool = True,
    byte_range: str = "",
    workers: int = 1,
) -> None:
    """Tokenize raw files into a Megatron .bin/.idx pair with a manifest.

    Blank lines and documents without a token are left out and counted. Any bad document stops the
    stage, and nothing is written.

    Args:
        files: jsonl (plain, gz, zst, xz, bz2) or parquet files, read in this order.
        output: prefix of the pair: PREFIX.bin, PREFIX.idx and PREFIX.json are written.
        tokenizer: folder or file of a tokenizer: tokenizer.json, vocab.json with merges.txt,
            SentencePiece .model, or vocab.txt.
        text_key: key or column that holds the text.
        append_eod: end each document with the tokenizer's end-of-document token.
        byte_range: START:END in bytes, of a single plain jsonl file; END may be empty.
        workers: threads; the output does not depend on it.

    Raises:
        UserError: a file is missing or damaged, a document is bad, or there is no such tokenizer.
    """
    import os

    os.environ["RAYON_NUM_THREADS"] = str(workers)  # read once, when the first batch is encoded
    from tokamake.data.indexed import Writer, token_dtype
    from tokamake.data.pairs import bin_path, hashes, idx_path, manifest_path, write_manifest
    from tokamake.data.tokenizers import open_tokenizer
    from tokamake.files import atomic

    opened = open_tokenizer(tokenizer)
    dtype = token_dtype(opened.vocab_size)
    counts: Counter[str] = Counter()
    texts = _texts(files, text_key, _parse_range(byte_range, files))
    pair = bin_path(output), idx_path(output), manifest_path(output)
    with atomic(*pair) as (bin_file, idx_file, manifest):
        with Writer(bin_file, idx_file, dtype) as writer:
            for batch in _batches(texts):
                counts.update(_write(batch, opened, append_eod, writer))
        write_manifest(
            manifest,
            {
                "tokamake": __version__,
                "inputs": [{"path": str(path), "bytes": path.stat().st_size} for path in files],
                "byte_range": byte_range,
                "tokenizer": opened.fingerprint,
                "vocab_size": opened.vocab_size,
                "eod": opened.eod,
                "append_eod": append_eod,
                "dtype": dtype.__name__,
                "documents": counts["documents"],
                "empty_documents": counts["empty"],
                "sequences": counts["documents"],
                "tokens": counts["tokens"],
                "text_bytes": counts["bytes"],
                **hashes(bin_file, idx_file),
            },
        )
    print(
        f"{output}: {counts['documents']:,} documents, {counts['tokens']:,} tokens from "
        f"{len(files)} files, {counts['empty']} empty documents left out"
    )


def _parse_range(text: str, files: list[Path]) -> tuple[int, int | None] | None:
    if not text:
        return None
    match = re.fullmatch(r"(\d+):(\d*)", text)
    if len(files) != 1 or match is None:
        raise UserError(f"--byte-range {text}: give START:END in bytes, and a single file")
    return int(match[1]), int(match[2]) if match[2] else None


def _texts(
    files: list[Path], text_key: str, byte_range: tuple[int, int | None] | None
) -> Iterator[str]:
    from tokamake.data import readers
    from tokamake.runtime import progress

    each = (readers.read(path, text_key, byte_range) for path in files)
    yield from progress(chain.from_iterable(each), label="tokenize", unit="documents")


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _write(
    texts: list[str], tokenizer: "Tokenizer", append_eod: bool, writer: "Writer"
) -> dict[str, int]:
    import numpy as np

    encoded = [ids for ids in tokenizer.encode_batch(texts) if ids]
    if append_eod:
        for ids in encoded:
            ids.append(tokenizer.eod)
    lengths = np.array([len(ids) for ids in encoded], np.int32)
    total = int(lengths.sum(dtype=np.int64))
    tokens = np.fromiter((token for ids in encoded for token in ids), np.int64, total)
    writer.add(tokens, lengths)
    return {
        "documents": len(encoded),
        "empty": len(texts) - len(encoded),
        "tokens": total,
        "bytes": sum(len(text.encode("utf-8", "surrogatepass")) for text in texts),
    }
