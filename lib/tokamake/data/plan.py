"""Stage `plan`: which raw files make a shard and which shards make a merged file, from sizes alone.

The workflow calls `make_plan` each time it is read, so every job is known before any has run; the
stage writes the same plan to a file, which keeps later plans stable: files that come later make new
shards and new merged files, and finished ones stay as they are.
"""

import os
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from glob import glob
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokamake.config import Corpus, PlanSettings, read_corpora
from tokamake.data.readers._compression import EXPANSION
from tokamake.errors import UserError
from tokamake.files import read_json, write_json
from tokamake.validation import parse_json


@dataclass(frozen=True)
class Shard:
    """What one `tokenize` job reads."""

    name: str
    """<corpus>/<number>: the pair's path below the folder of shards."""
    files: tuple[str, ...]
    """Raw files in order."""
    byte_range: str
    """Part of a single large file, START:END, or empty."""
    bytes: int
    """Estimated size of its .bin file."""


@dataclass(frozen=True)
class Merged:
    """What one `merge` job makes."""

    name: str
    """<corpus>-<number>_<text key>_document, as Megatron names pairs."""
    corpus: str
    """Corpus it belongs to."""
    shards: tuple[str, ...]
    """Names of its shards in order."""


@dataclass(frozen=True)
class Plan:
    """All shards and merged files."""

    settings: dict[str, Any]
    """Settings the plan was made with; another value makes a plan from scratch."""
    shards: tuple[Shard, ...]
    """All shards."""
    merged: tuple[Merged, ...]
    """All merged files."""
    tokenizer_files: tuple[str, ...]
    """Raw files that a tokenizer is trained on: later ones must not change the finished tokens."""


def plan(
    *,
    corpora: Path,
    settings: str = "{}",
    declared: tuple[str, ...] = (),
    output: Path,
) -> None:
    """Decide shards and merged files from the sizes of raw files.

    Args:
        corpora: table of corpora, as config/corpora.tsv.
        settings: the config's `plan` section as JSON.
        declared: PATH=BYTES of raw files that are still to be made.
        output: JSON file of the plan; an earlier one there is extended.

    Raises:
        UserError: a pattern matches no file, or the table or earlier plan cannot be read.
    """
    sizes = {}
    for text in declared:
        path, _, size = text.rpartition("=")
        if not path or not size.isdigit():
            raise UserError(f"--declared {text}: give PATH=BYTES")
        sizes[path] = int(size)
    parsed = parse_json(PlanSettings, settings, "--settings")
    made = make_plan(read_corpora(corpora), parsed, sizes, previous=read_plan(output))
    write_json(output, asdict(made))
    print(f"{output}: {len(made.shards)} shards, {len(made.merged)} merged files")


def read_plan(path: Path) -> Plan | None:
    """Read a plan, or None where there is none yet."""
    if not path.exists():
        return None
    value = read_json(path, "remove it to plan from scratch")
    try:
        return Plan(
            value["settings"],
            tuple(
                Shard(s["name"], tuple(s["files"]), s["byte_range"], s["bytes"])
                for s in value["shards"]
            ),
            tuple(Merged(m["name"], m["corpus"], tuple(m["shards"])) for m in value["merged"]),
            tuple(value["tokenizer_files"]),
        )
    except (KeyError, TypeError) as error:
        raise UserError(f"{path}: not a plan ({error}); remove it to plan from scratch") from None


def raw_files(corpus: Corpus, declared: Mapping[str, int]) -> list[str]:
    """Raw files of a corpus, on disk or declared, in natural order (2 before 10).

    Raises:
        UserError: a pattern matches nothing.
    """
    found: dict[str, str] = {}
    made = {str(Path(path).parent) for path in declared}
    for pattern in _patterns(corpus):
        expression = re.compile(_glob_expression(pattern))
        on_disk = (path for path in glob(pattern, recursive=True) if Path(path).is_file())
        # What else lies beside declared files is left from an earlier declaration.
        matches = {path for path in on_disk if str(Path(path).parent) not in made}
        matches |= {path for path in declared if expression.fullmatch(path)}
        if not matches:
            raise UserError(
                f'corpus "{corpus.corpus}": no file matches {pattern}; '
                "fix the files column of the corpora table"
            )
        for path in sorted(matches):
            found.setdefault(os.path.realpath(path), path)  # the same file may have several names
    return sorted(found.values(), key=_natural)


def _patterns(corpus: Corpus) -> list[str]:
    try:
        return shlex.split(corpus.files)
    except ValueError as error:
        raise UserError(
            f'corpus "{corpus.corpus}": {corpus.files}: {str(error).lower()}; '
            "fix the files column of the corpora table"
        ) from None


def make_plan(
    corpora: Iterable[Corpus],
    settings: PlanSettings,
    declared: Mapping[str, int],
    *,
    previous: Plan | None = None,
) -> Plan:
    """Plan all corpora; see the module's words on stability."""
    shards: list[Shard] = []
    merged: list[Merged] = []
    all_paths: list[str] = []
    stated = settings.model_dump()
    alike = previous if previous and previous.settings == stated else None
    for corpus in corpora:
        paths = raw_files(corpus, declared)
        kept_shards, kept_merged = _kept(corpus, paths, alike)
        known = {path for shard in kept_shards for path in shard.files}
        fresh = [path for path in paths if path not in known]
        number = _next([shard.name for shard in kept_shards])
        new_shards = _cut(corpus, fresh, settings, declared, first=number)
        number = _next([pair.name for pair in kept_merged])
        new_merged = _gather(corpus, new_shards, settings, first=number)
        all_paths += paths
        shards += kept_shards + new_shards
        merged += kept_merged + new_merged
    before = set(previous.tokenizer_files) if previous else set()
    tokenizer_files = [path for path in all_paths if path in before] or all_paths
    return Plan(stated, tuple(shards), tuple(merged), tuple(tokenizer_files))


def _kept(
    corpus: Corpus, paths: list[str], previous: Plan | None
) -> tuple[list[Shard], list[Merged]]:
    """Shards and merged files of an earlier plan, without the raw files that are gone."""
    if previous is None:
        return [], []
    present = set(paths)
    shards = []
    for shard in previous.shards:
        files = tuple(path for path in shard.files if path in present)
        if shard.name.split("/")[0] == corpus.corpus and files:
            shards.append(Shard(shard.name, files, shard.byte_range, shard.bytes))
    names = {shard.name for shard in shards}
    merged = []
    for pair in previous.merged:
        kept = tuple(name for name in pair.shards if name in names)
        if pair.corpus == corpus.corpus and pair.name.endswith(_suffix(corpus)) and kept:
            merged.append(Merged(pair.name, pair.corpus, kept))
    gathered = {name for pair in merged for name in pair.shards}
    return [shard for shard in shards if shard.name in gathered], merged


def _cut(
    corpus: Corpus,
    paths: list[str],
    settings: PlanSettings,
    declared: Mapping[str, int],
    *,
    first: int,
) -> list[Shard]:
    """Gather small files into shards and cut large plain ones."""
    parts: list[tuple[tuple[str, ...], str, int]] = []
    waiting: list[str] = []
    waiting_bytes = 0
    for path in paths:
        size = declared[path] if path in declared else Path(path).stat().st_size
        if waiting and waiting_bytes + size > settings.shard_bytes:
            parts.append((tuple(waiting), "", _text_bytes(waiting, declared)))
            waiting, waiting_bytes = [], 0
        if size > settings.shard_bytes and Path(path).suffix == ".jsonl":
            parts += [
                ((path,), text, length) for text, length in _ranges(size, settings.shard_bytes)
            ]
        else:
            waiting.append(path)
            waiting_bytes += size
    if waiting:
        parts.append((tuple(waiting), "", _text_bytes(waiting, declared)))
    ratio = settings.token_bytes_per_text_byte
    return [
        Shard(f"{corpus.corpus}/{number:05d}", files, byte_range, int(size * ratio))
        for number, (files, byte_range, size) in enumerate(parts, first)
    ]


def _ranges(size: int, shard_bytes: int) -> list[tuple[str, int]]:
    """Equal byte ranges of a file; the last is open, so that no byte is lost if the file grows."""
    count = -(-size // shard_bytes)
    bounds = [size * number // count for number in range(count + 1)]
    return [
        (f"{start}:{end if end < size else ''}", end - start) for start, end in pairwise(bounds)
    ]


def _text_bytes(paths: Iterable[str], declared: Mapping[str, int]) -> int:
    """Estimated size of raw files when decompressed; a declared size is uncompressed already."""
    total = 0.0
    for path in paths:
        factor = EXPANSION.get(Path(path).suffix, 1.0)
        total += declared[path] if path in declared else Path(path).stat().st_size * factor
    return int(total)


def _gather(
    corpus: Corpus, shards: list[Shard], settings: PlanSettings, *, first: int
) -> list[Merged]:
    """Put neighbouring shards together up to the size of a merged file."""
    groups: list[list[Shard]] = []
    for shard in shards:
        full = not groups or sum(s.bytes for s in groups[-1]) + shard.bytes > settings.merged_bytes
        if full:
            groups.append([])
        groups[-1].append(shard)
    return [
        Merged(
            f"{corpus.corpus}-{number:04d}{_suffix(corpus)}",
            corpus.corpus,
            tuple(shard.name for shard in group),
        )
        for number, group in enumerate(groups, first)
    ]


def _suffix(corpus: Corpus) -> str:
    return f"_{corpus.text_key}_document"


def _next(names: list[str]) -> int:
    """Number after the highest one in names like code/00003 or code-0003_text_document."""
    numbers = [int(match.group(1)) for name in names if (match := re.search(r"[/-](\d+)", name))]
    return max(numbers, default=-1) + 1


def _natural(path: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path)]


def _glob_expression(pattern: str) -> str:
    """Regular expression of a glob pattern in which * stops at a slash and ** does not."""
    pieces = re.split(r"(\*\*/?|\*|\?)", pattern)
    meaning = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return "".join(meaning.get(piece, re.escape(piece)) for piece in pieces)
