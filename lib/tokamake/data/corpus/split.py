"""Tool `split`: lines of jsonl files go to a train, a valid and a test file, by what they say.

Lines come from `readers`; a keyed hash of a line's text decides, so that equal texts stay together.
"""

from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import accumulate
from pathlib import Path
from typing import IO, TYPE_CHECKING

import orjson

if TYPE_CHECKING:
    from tokamake.data.corpus.documents import Fields

_POINTS = 1 << 64


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

    Lines keep their bytes and their order; blank ones are left out. Where a line goes depends on
    the seed and its text alone: documents of the same text go to the same file, so that no test
    document is also trained on, and neither the number nor the order of the files matters.
    Memory does not grow with the input. Either all files are written or none.

    Args:
        files: jsonl files, folders or glob patterns, plain or compressed; or one corpus by its name
            in the table of corpora given.
        output: prefix of the files: PREFIX.train.jsonl, PREFIX.valid.jsonl and PREFIX.test.jsonl;
            a share of 0 makes no file.
        split: shares of the documents that train, validate and are kept for tests.
        seed: another one splits otherwise.
        text_key: key whose text decides ("text" if not told); several, repeated or with commas,
            decide together.
        corpora: table of corpora, as config/corpora.tsv.

    Raises:
        UserError: a line is not a JSON object with text, or a file would be lost.
    """
    from tokamake.data.corpus import corpora as tables
    from tokamake.data.corpus.documents import Fields, split_keys
    from tokamake.data.corpus.splits import NAMES, shares
    from tokamake.errors import UserError
    from tokamake.files import atomic
    from tokamake.runtime.console import counted

    if corpora is not None:
        row = tables.find_corpus(files, corpora)
        files, text_key = list(tables.patterns(row)), text_key or (row.text_key,)
    fields = Fields(split_keys(text_key))
    parts = {
        output.with_name(f"{output.name}.{name}.jsonl"): share
        for name, share in zip(NAMES, shares(split), strict=True)
    }
    paths = _jsonl(files, parts)
    wanted = [path for path, share in parts.items() if share]
    bounds = [round(bound * _POINTS) for bound in accumulate(filter(None, parts.values()))]
    bounds[-1] = _POINTS  # whatever the shares' rounding
    blank = [0]
    with atomic(*wanted) as temporaries:
        streams = [path.open("wb") for path in temporaries]
        try:
            lines = _lines(paths, fields, blank)
            counts = _distribute(lines, streams, bounds, seed=seed)
        finally:
            for stream in streams:
                stream.close()
        if not sum(counts):
            raise UserError(f"split: no document in {', '.join(files)}; name other files")
    for path, count in zip(wanted, counts, strict=True):
        print(f"{path}: {counted(count, 'document')}, {count / sum(counts):.2%}")
    print(
        f"{counted(sum(counts), 'document')} from {counted(len(paths), 'file')}, "
        f"{counted(blank[0], 'blank line')} left out"
    )


def _jsonl(files: list[str], parts: dict[Path, float]) -> list[Path]:
    """The files named, none of which may be lost to an output or hide behind an old one."""
    from tokamake.data.readers import expand, sniff
    from tokamake.errors import UserError

    paths = expand(files)
    for path in paths:
        form, _ = sniff(path)
        if form != "jsonl":
            raise UserError(f"{path}: is {form}, not jsonl; convert it, one JSON object a line")
    for part, share in parts.items():
        if any(part.exists() and part.samefile(path) for path in paths):
            raise UserError(f"{part}: is to be read and written; name another --output")
        if part.exists() and not share:
            raise UserError(f"{part}: is from another split; remove it or name another --output")
    return paths


def _lines(
    paths: list[Path], fields: "Fields", blank: list[int]
) -> Iterator[tuple[bytes, tuple[str, ...]]]:
    """Yield each line and the texts that decide on it; blank lines are counted in `blank`."""
    from tokamake.data.corpus.documents import place, texts
    from tokamake.data.readers import open_input
    from tokamake.errors import UserError

    for path in paths:
        opened = open_input(path, format="jsonl")
        for block in opened.blocks(fields.read_keys):
            found = texts(block, fields)
            if found.bad:
                index, reason = found.bad[0]
                raise UserError(f"{place(opened, block, index)}: {reason}")
            assert block.raw is not None
            yield from zip(block.raw, zip(*found.columns, strict=True), strict=True)
        blank[0] += opened.blank_lines


def _distribute(
    lines: Iterable[tuple[bytes, tuple[str, ...]]],
    streams: Sequence[IO[bytes]],
    bounds: list[int],
    *,
    seed: int,
) -> list[int]:
    """Write each line to the first stream whose bound its hash lies below; return the counts."""
    counts = [0] * len(streams)
    key = blake2b(str(seed).encode(), digest_size=16).digest()
    for line, texts in lines:
        point = _point(texts, key)
        part = next(number for number, bound in enumerate(bounds) if point < bound)
        # A byte order mark belongs to the file that it begins, not to its first line.
        streams[part].write(line.removeprefix(BOM_UTF8) + b"\n")
        counts[part] += 1
    return counts


def _point(texts: tuple[str, ...], key: bytes) -> int:
    """Hash of texts, evenly spread over the integers below 2 to the power of 64."""
    digest = blake2b(orjson.dumps(texts), digest_size=8, key=key).digest()
    return int.from_bytes(digest, "little")
