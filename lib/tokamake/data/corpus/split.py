"""Tool `split`: distribute the lines of jsonl files to a train, a valid and a test file.

A keyed hash of a line's text decides, so equal texts go to the same file.
"""

from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import IO

import orjson

from tokamake.data.corpus.corpora import find_corpus, patterns
from tokamake.data.corpus.documents import Fields, refuse_bad, split_keys, texts
from tokamake.data.corpus.splits import NAMES, shares
from tokamake.data.readers import expand, open_input, sniff
from tokamake.errors import UserError
from tokamake.files import atomic
from tokamake.runtime.console import counted

_HASH_RANGE = 1 << 64


def split(
    files: list[str],
    /,
    *,
    output: Path,
    split: str = "98,1,1",
    seed: int = 1234,
    text_key: tuple[str, ...] = (),
    corpora: Path | None = None,
) -> None:
    """Split jsonl files into a train, a valid and a test file.

    Lines keep their bytes and their order; blank lines are dropped. Only the seed and the text of a
    line decide its file. Therefore documents with the same text go to the same file, no test
    document is also a training document, and the number and order of the files do not matter.
    Memory does not grow with the input. The tool writes all files or none.

    Args:
        files: jsonl files, folders or glob patterns, uncompressed or compressed; or the name of one
            corpus in the table of corpora.
        output: prefix of the files: PREFIX.train.jsonl, PREFIX.valid.jsonl and PREFIX.test.jsonl;
            a share of 0 gives no file.
        split: shares of the training, validation and test documents.
        seed: another seed gives another split.
        text_key: key whose text decides (default "text"). Several keys, in repeated options or
            separated by commas, decide together.
        corpora: table of corpora, such as config/corpora.tsv.
    """
    if corpora is not None:
        row = find_corpus(files, corpora)
        files, text_key = list(patterns(row)), text_key or (row.text_key,)
    fields = Fields(split_keys(text_key))
    shares_of_outputs = {
        output.with_name(f"{output.name}.{name}.jsonl"): share
        for name, share in zip(NAMES, shares(split), strict=True)
    }
    paths = _jsonl_files(files, shares_of_outputs)
    outputs = [path for path, share in shares_of_outputs.items() if share]
    cumulative_shares = accumulate(filter(None, shares_of_outputs.values()))
    bounds = [round(share * _HASH_RANGE) for share in cumulative_shares]
    bounds[-1] = _HASH_RANGE  # rounded shares may add up to less than 1
    num_blank = [0]
    with atomic(*outputs) as temporaries:
        streams = [path.open("wb") for path in temporaries]
        try:
            lines = _read_lines(paths, fields, num_blank=num_blank)
            counts = _distribute(lines, streams, bounds=bounds, seed=seed)
        finally:
            for stream in streams:
                stream.close()
        if not sum(counts):
            raise UserError(f"split: no document in {', '.join(files)}; name other files")
    for path, count in zip(outputs, counts, strict=True):
        print(f"{path}: {counted(count, 'document')}, {count / sum(counts):.2%}")
    print(
        f"{counted(sum(counts), 'document')} from {counted(len(paths), 'file')}, "
        f"{counted(num_blank[0], 'blank line')} left out"
    )


def _jsonl_files(files: list[str], shares_of_outputs: dict[Path, float]) -> list[Path]:
    """Return the input files.

    Raise UserError if one is not jsonl or is also an output, or if an old output would remain.
    """
    paths = expand(files)
    for path in paths:
        format, _ = sniff(path)
        if format != "jsonl":
            raise UserError(
                f"{path}: is {format}, not jsonl; convert it to one JSON object per line"
            )
    for output, share in shares_of_outputs.items():
        if any(output.exists() and output.samefile(path) for path in paths):
            raise UserError(f"{output}: is both input and output; name another --output")
        if output.exists() and not share:
            raise UserError(f"{output}: is from another split; remove it or name another --output")
    return paths


def _read_lines(
    paths: list[Path], fields: Fields, *, num_blank: list[int]
) -> Iterator[tuple[bytes, tuple[str, ...]]]:
    """Yield each line and its texts; add the number of blank lines to `num_blank[0]`."""
    for path in paths:
        source = open_input(path, format="jsonl")
        for block in source.blocks(fields.read_keys):
            columns, _, bad = texts(block, fields)
            refuse_bad(source, block, bad=bad)
            assert block.raw is not None
            yield from zip(block.raw, zip(*columns, strict=True), strict=True)
        num_blank[0] += source.blank_lines


def _distribute(
    lines: Iterable[tuple[bytes, tuple[str, ...]]],
    streams: Sequence[IO[bytes]],
    *,
    bounds: list[int],
    seed: int,
) -> list[int]:
    """Write each line to the first stream whose bound is above its hash; return line counts."""
    counts = [0] * len(streams)
    key = blake2b(str(seed).encode(), digest_size=16).digest()
    for line, parts in lines:
        value = _hash(parts, key)
        index = next(index for index, bound in enumerate(bounds) if value < bound)
        # A byte order mark belongs to the beginning of a file, not to the line.
        streams[index].write(line.removeprefix(BOM_UTF8) + b"\n")
        counts[index] += 1
    return counts


def _hash(texts: tuple[str, ...], key: bytes) -> int:
    digest = blake2b(orjson.dumps(texts), digest_size=8, key=key).digest()
    return int.from_bytes(digest, "little")
