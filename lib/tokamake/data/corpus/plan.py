"""Tool `plan`: which raw files make a shard, which shards a merged file, and what each job makes.

All comes from sizes, so that every job is known before any has run. The workflow calls `make_plan`
each time it is read, and writes the plan down when it starts: shards, merged files and batches of
an earlier plan stay as they are, and files that come later make new ones.
"""

import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path

from tokamake.config.data import PlanSettings
from tokamake.data.corpus.corpora import Corpus, read_corpora
from tokamake.data.corpus.documents import Fields, split_keys
from tokamake.data.corpus.plan_file import (
    JobBatch,
    Plan,
    PlannedMerge,
    PlannedShard,
    TokenizerCorpus,
    read_plan,
    write_plan,
)
from tokamake.data.corpus.raw_files import RawFile, raw_files, stamp
from tokamake.data.readers import sniff
from tokamake.data.readers._compression import SUFFIXES
from tokamake.errors import UserError
from tokamake.files import digest
from tokamake.validation import parse_json

_EXPANSION = {".gz": 3.5, ".zst": 4.0, ".xz": 5.0, ".bz2": 4.5, ".parquet": 3.0}
"""Bytes of jsonl per compressed byte of text, roughly."""


def plan(
    *,
    corpora: Path,
    settings: str = "{}",
    declared: tuple[str, ...] = (),
    split_sentences: bool = False,
    output: Path,
) -> None:
    """Decide shards, merged files and batches from the sizes of raw files.

    Args:
        corpora: table of corpora, as config/corpora.tsv.
        settings: the config's `plan` section as JSON.
        declared: PATH=BYTES of raw files that are still to be made.
        split_sentences: sequences are sentences, as the merged files' names tell.
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
    made = make_plan(
        read_corpora(corpora),
        parse_json(PlanSettings, settings, "--settings"),
        sizes,
        previous=read_plan(output) if output.exists() else None,
        split_sentences=split_sentences,
    )
    write_plan(output, made)
    print(
        f"{output}: {len(made.shards):,} shards in {len(made.tokenize_batches):,} jobs, "
        f"{len(made.merged):,} merged files in {len(made.merge_batches):,} jobs"
    )


def make_plan(
    corpora: Iterable[Corpus],
    settings: PlanSettings,
    declared: Mapping[str, int],
    *,
    previous: Plan | None = None,
    split_sentences: bool = False,
) -> Plan:
    """Plan all corpora; see the module's words on stability.

    Args:
        corpora: rows of the table.
        settings: sizes, and the most jobs.
        declared: path to size of raw files that are still to be made.
        previous: an earlier plan, which is extended if its sizes are the same.
        split_sentences: sequences are sentences, as the merged files' names tell.

    Raises:
        UserError: a pattern matches no file.
    """
    rows = list(corpora)
    sizes = settings.model_dump(exclude={"max_jobs"})
    alike = previous if previous and previous.settings == sizes else None
    files = {corpus.corpus: raw_files(corpus, declared) for corpus in rows}
    shards: list[PlannedShard] = []
    merged: list[PlannedMerge] = []
    for corpus in rows:
        suffixes = _suffixes(corpus, split_sentences)
        kept_shards, kept_merged = _kept(corpus.corpus, files[corpus.corpus], suffixes, alike)
        known = {path for shard in kept_shards for path in shard.files}
        fresh = [file for file in files[corpus.corpus] if file.path not in known]
        new_shards = _cut(corpus, fresh, settings, first=_next(kept_shards))
        groups = _gather(new_shards, settings.merged_bytes)
        shards += kept_shards + new_shards
        merged += kept_merged + _merged(corpus.corpus, groups, suffixes, first=_next(kept_merged))
    tokenizer, tokenizer_stamp = _tokenizer(rows, files, previous)
    return Plan(
        sizes,
        tokenizer_stamp,
        tokenizer,
        _batches(shards, alike.tokenize_batches if alike else (), settings.max_jobs),
        # Merging takes a fraction of the time that tokenizing takes.
        _batches(merged, alike.merge_batches if alike else (), -(-settings.max_jobs // 4)),
        tuple(merged),
        tuple(shards),
    )


def _suffixes(corpus: Corpus, split_sentences: bool) -> dict[str, str]:
    """End of a merged pair's name to the key of its shards' pairs, for each text the corpus has."""
    names = Fields(split_keys([corpus.text_key]), corpus.template).checked().names
    unit = "sentence" if split_sentences else "document"
    return {f"_{name}_{unit}": name if len(names) > 1 else "" for name in names}


def _kept(
    corpus: str, files: list[RawFile], suffixes: Mapping[str, str], previous: Plan | None
) -> tuple[list[PlannedShard], list[PlannedMerge]]:
    """Shards and merged pairs of an earlier plan, without files that are gone or no longer fit."""
    before = [pair for pair in previous.merged if pair.corpus == corpus] if previous else []
    named = {(re.sub(r"^[^-]*-\d+", "", pair.name), pair.key) for pair in before}
    if previous is None or named != set(suffixes.items()):
        return [], []
    present = {file.path: file for file in files}
    own = [shard for shard in previous.shards if _corpus(shard.name) == corpus]
    for path in {shard.files[0] for shard in own if not _fits(shard, present)}:
        del present[path]
    shards = {}
    for shard in own:
        if left := [present[path] for path in shard.files if path in present]:
            shards[shard.name] = _shard(shard.name, left, shard.byte_range, shard.bytes)
    merged = []
    for pair in before:
        if names := tuple(name for name in pair.shards if name in shards):
            merged.append(pair._replace(shards=names))
    return list(shards.values()), merged


def _fits(shard: PlannedShard, present: Mapping[str, RawFile]) -> bool:
    """Tell whether a part of a file can still be read from what the file has become since."""
    if not shard.byte_range or shard.files[0] not in present:
        return True
    file = present[shard.files[0]]
    if stamp([file]) == shard.stamp:
        return True
    reaches = max(int(bound or 0) for bound in shard.byte_range.split(":"))
    return reaches <= file.size and _divisible(file)


def _cut(
    corpus: Corpus, files: list[RawFile], settings: PlanSettings, *, first: int
) -> list[PlannedShard]:
    """Gather small files into shards and cut large ones that can be read from within."""
    parts: list[tuple[list[RawFile], str, float]] = []
    waiting: list[RawFile] = []
    waiting_bytes = 0
    for file in files:
        if waiting and waiting_bytes + file.size > settings.shard_bytes:
            parts.append((waiting, "", sum(map(_text_bytes, waiting))))
            waiting, waiting_bytes = [], 0
        if file.size > settings.shard_bytes and _divisible(file, corpus.format):
            scale = _text_bytes(file) / file.size
            for text, length in _ranges(file.size, settings.shard_bytes):
                parts.append(([file], text, length * scale))
        else:
            waiting.append(file)
            waiting_bytes += file.size
    if waiting:
        parts.append((waiting, "", sum(map(_text_bytes, waiting))))
    ratio = settings.token_bytes_per_text_byte
    return [
        _shard(f"{corpus.corpus}/{number:05d}", members, byte_range, int(size * ratio))
        for number, (members, byte_range, size) in enumerate(parts, first)
    ]


def _shard(name: str, files: list[RawFile], byte_range: str, size: int) -> PlannedShard:
    return PlannedShard(name, tuple([file.path for file in files]), byte_range, size, stamp(files))


def _divisible(file: RawFile, format: str = "") -> bool:
    """Tell whether parts of a large file can be read by themselves, as of no compressed one."""
    if format not in ("", "jsonl", "parquet"):
        return False
    if file.modified is None:
        return file.path.endswith(".jsonl")
    if _ending(file.path) in SUFFIXES:
        return False
    kind, compression = sniff(Path(file.path), format)
    return kind in ("jsonl", "parquet") and not compression


def _ending(path: str) -> str:
    return path[path.rfind(".") :]


def _ranges(size: int, shard_bytes: int) -> list[tuple[str, int]]:
    """Equal byte ranges of a file; the last is open, so that no byte is lost if the file grows."""
    count = -(-size // shard_bytes)
    bounds = [size * number // count for number in range(count + 1)]
    return [
        (f"{start}:{end if end < size else ''}", end - start) for start, end in pairwise(bounds)
    ]


def _text_bytes(file: RawFile) -> float:
    """Estimated size of a raw file when decompressed; a declared size is uncompressed already."""
    if file.modified is None:
        return file.size
    return file.size * _EXPANSION.get(_ending(file.path), 1.0)


def _gather(shards: list[PlannedShard], merged_bytes: int) -> list[tuple[str, ...]]:
    """Put neighbouring shards together up to the size of a merged file."""
    groups: list[list[str]] = []
    size = 0
    for shard in shards:
        if not groups or size + shard.bytes > merged_bytes:
            groups.append([])
            size = 0
        groups[-1].append(shard.name)
        size += shard.bytes
    return [tuple(group) for group in groups]


def _merged(
    corpus: str, groups: list[tuple[str, ...]], suffixes: Mapping[str, str], *, first: int
) -> list[PlannedMerge]:
    return [
        PlannedMerge(f"{corpus}-{number:04d}{suffix}", corpus, key, group)
        for number, group in enumerate(groups, first)
        for suffix, key in suffixes.items()
    ]


def _batches(
    members: list[PlannedShard] | list[PlannedMerge], previous: tuple[JobBatch, ...], max_jobs: int
) -> tuple[JobBatch, ...]:
    """Earlier batches without what is gone, and about `max_jobs` new ones of neighbours at most."""
    names = {member.name for member in members}
    batches = []
    for batch in previous:
        if left := tuple(name for name in batch.members if name in names):
            batches.append(JobBatch(batch.name, left))
    batched = {name for batch in batches for name in batch.members}
    fresh: dict[str, list[str]] = {}
    for member in members:
        if member.name not in batched:
            fresh.setdefault(_corpus(member.name), []).append(member.name)
    size = -(-sum(map(len, fresh.values())) // max_jobs)
    for corpus, waiting in fresh.items():
        first = _next([batch for batch in batches if _corpus(batch.name) == corpus])
        count = -(-len(waiting) // size)
        bounds = [len(waiting) * number // count for number in range(count + 1)]
        for number, (start, end) in enumerate(pairwise(bounds), first):
            batches.append(JobBatch(f"{corpus}-{number:05d}", tuple(waiting[start:end])))
    return tuple(batches)


def _corpus(name: str) -> str:
    """Corpus of code/00003, code-00003 or code-0003_text_document."""
    return name.replace("/", "-").partition("-")[0]


def _next(named: Iterable[PlannedShard | PlannedMerge | JobBatch]) -> int:
    """Number after the highest one in names like code/00003 or code-0003_text_document."""
    numbers = (re.search(r"[/-](\d+)", item.name) for item in named)
    return max((int(match[1]) for match in numbers if match), default=-1) + 1


def _tokenizer(
    corpora: list[Corpus], files: Mapping[str, list[RawFile]], previous: Plan | None
) -> tuple[tuple[TokenizerCorpus, ...], str]:
    """What a tokenizer is trained on, and its stamp; see `Plan`.

    Where a tokenizer may have been trained before, files that come later are left out of it and
    ones that are gone leave its stamp as it is; another way of reading them does not.
    """
    before = {source.corpus: source for source in previous.tokenizer} if previous else {}
    known = {path for source in before.values() for path in source.files}
    old, every = [], []
    for corpus in corpora:
        paths = tuple(file.path for file in files[corpus.corpus])
        fields = corpus.corpus, corpus.format, corpus.text_key, corpus.template
        every.append(TokenizerCorpus(*fields, paths))
        old.append(TokenizerCorpus(*fields, tuple(path for path in paths if path in known)))
    kept = tuple(source for source in old if source.files)
    if previous is None or not kept:
        return tuple(every), digest(every)
    same = all(source[:4] == before.get(source.corpus, source)[:4] for source in kept)
    return kept, previous.tokenizer_stamp if same else digest(kept)
