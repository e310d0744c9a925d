"""Divide raw files into shards of about equal size, and shards into merged datasets."""

import re
from collections.abc import Iterable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Literal

from tokamake import plugins
from tokamake.config.data import PlanSettings
from tokamake.data.corpus.corpora import Corpus
from tokamake.data.corpus.documents import Fields, check_first_documents, split_keys
from tokamake.data.corpus.plan_file import PlannedShard
from tokamake.data.corpus.raw_files import RawFile, stamp, stamps
from tokamake.data.readers import COMPRESSION_SUFFIXES, has_byte_ranges, parse_format, sniff
from tokamake.errors import UserError

# Rough bytes of jsonl per byte of the file. Wrong factors only make shards uneven.
_EXPANSION = {
    ".gz": 3.5,
    ".tgz": 3.5,
    ".zip": 3.5,
    ".zst": 4.0,
    ".xz": 5.0,
    ".bz2": 4.5,
    ".lzma": 4.5,
    ".parquet": 3.0,
}
_EXPANDED = tuple(_EXPANSION)
_MULTISTREAM = re.compile(r"-multistream\d*\.xml(-p\d+p\d+)?\.bz2$")
"""Names of Wikipedia's dumps that have byte ranges although they are compressed."""


Check = Literal["format", "keys", "all"]
"""Faults of the first documents for which a file is refused."""


def cut_shards(
    corpus: Corpus,
    files: list[RawFile],
    *,
    settings: PlanSettings,
    first: int,
    check: Check = "format",
) -> list[PlannedShard]:
    """Group small files into shards, and cut large files into byte ranges where readers can."""
    _check_files(corpus, files, check=check)
    parts: list[tuple[list[RawFile], str, float]] = []  # files, byte range, bytes of text
    group: list[RawFile] = []
    group_bytes = 0
    for file in files:
        if group and group_bytes + file.size > settings.shard_bytes:
            parts.append((group, "", sum(map(_text_bytes, group))))
            group, group_bytes = [], 0
        if file.size > settings.shard_bytes and is_divisible(file, corpus.format):
            expansion = _text_bytes(file) / file.size
            for byte_range, num_bytes in _byte_ranges(file.size, settings.shard_bytes):
                parts.append(([file], byte_range, num_bytes * expansion))
        else:
            group.append(file)
            group_bytes += file.size
    if group:
        parts.append((group, "", sum(map(_text_bytes, group))))
    ratio = settings.token_bytes_per_text_byte
    return [
        make_shard(
            f"{corpus.corpus}/{number:05d}", members, byte_range=byte_range, size=int(size * ratio)
        )
        for number, (members, byte_range, size) in enumerate(parts, first)
    ]


def _check_files(corpus: Corpus, files: Iterable[RawFile], *, check: Check) -> None:
    """Look at the first file of each suffix, so that a dry run finds files that no reader reads."""
    first: dict[str, RawFile] = {}
    for file in files:
        extension = _extension(file.path)
        if extension in COMPRESSION_SUFFIXES:
            extension = _extension(file.path.removesuffix(extension)) + extension
        first.setdefault(extension, file)
    fields = Fields(split_keys([corpus.text_key]), corpus.template)
    for file in first.values():
        if file.modified is None:  # there is no content to look at yet
            continue
        try:
            if check == "format":
                sniff(Path(file.path), parse_format(corpus.format)[0])
                continue
            check_first_documents(
                Path(file.path), fields, format=corpus.format, keys_only=check == "keys"
            )
        except UserError as error:
            raise UserError(f"{corpus.where}: {error}") from None


def make_shard(name: str, files: list[RawFile], *, byte_range: str, size: int) -> PlannedShard:
    paths = tuple([file.path for file in files])
    parts = stamps(files)
    return PlannedShard(name, paths, byte_range, size, stamp(files, parts), parts)


def is_divisible(file: RawFile, format: str = "") -> bool:
    """Tell whether a reader can read byte ranges of a file.

    Most compressed files have none, as their names tell: they are not opened.
    """
    format, _ = parse_format(format)
    if format and not plugins.constant("data/readers", format, "HAS_BYTE_RANGES", default=False):
        return False
    if file.modified is None:  # there is no content to look at yet
        return _is_named_divisible(file)
    extension = _extension(file.path)
    if extension in COMPRESSION_SUFFIXES and extension not in _divisible_suffixes():
        return False
    return has_byte_ranges(Path(file.path), format)


def _is_named_divisible(file: RawFile) -> bool:
    if not file.is_remote:
        return file.path.endswith(".jsonl")
    return file.path.endswith((".jsonl", ".parquet")) or bool(_MULTISTREAM.search(file.path))


@cache
def _divisible_suffixes() -> frozenset[str]:
    """Suffixes of compressed files that some reader can read byte ranges of."""
    folder = "data/readers"
    names = plugins.names(folder)
    found = (plugins.constant(folder, name, "DIVISIBLE", default=()) for name in names)
    return frozenset(f".{compression}" for divisible in found for compression in divisible)


def _extension(path: str) -> str:
    name = path[path.rfind("/") + 1 :]  # a Path for each of 100,000 files takes too long
    return name[name.rfind(".") :] if "." in name else ""


def _byte_ranges(size: int, shard_bytes: int) -> list[tuple[str, int]]:
    """Return equal byte ranges of a file, each as START:END and its length.

    The last range has no end, so that no byte is lost if the file grows.
    """
    count = -(-size // shard_bytes)
    bounds = [size * number // count for number in range(count + 1)]
    return [
        (f"{start}:{end if end < size else ''}", end - start) for start, end in pairwise(bounds)
    ]


def _text_bytes(file: RawFile) -> float:
    if file.modified is None and not file.is_remote:  # a declared size is uncompressed already
        return file.size
    if not file.path.endswith(_EXPANDED):
        return file.size
    return file.size * _EXPANSION.get(_extension(file.path), 1.0)


def group_shards(shards: list[PlannedShard], merged_bytes: int) -> list[tuple[str, ...]]:
    """Group neighbouring shards up to the size of a merged dataset."""
    groups: list[list[str]] = []
    size = 0
    for shard in shards:
        if not groups or size + shard.bytes > merged_bytes:
            groups.append([])
            size = 0
        groups[-1].append(shard.name)
        size += shard.bytes
    return [tuple(group) for group in groups]
