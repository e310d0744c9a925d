"""Tool `plan`: decide which raw files make a shard, which shards are merged, and by which job.

The plan follows from file sizes alone, so every job is known before one has run. The workflow calls
`make_plan` each time it is read, and writes plan.json when it starts. A new plan extends the
earlier one: its shards, merged datasets and batches stay, and later files make new ones.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path

from tokamake.config.data import PlanSettings, TokenizeSettings
from tokamake.config.fetch_urls import FetchUrlsSettings
from tokamake.config_files import parse_json
from tokamake.data.corpus.corpora import Corpus, patterns, read_corpora
from tokamake.data.corpus.documents import Fields, split_keys
from tokamake.data.corpus.plan_file import (
    JobBatch,
    Plan,
    PlannedDownload,
    PlannedMerge,
    PlannedShard,
    TokenizerCorpus,
    read_plan,
    write_plan,
)
from tokamake.data.corpus.plan_shards import (
    Check,
    cut_shards,
    group_shards,
    is_divisible,
    make_shard,
)
from tokamake.data.corpus.raw_files import RawFile, dataset_pairs, raw_files, stamp
from tokamake.data.urls.url_list import is_url_list, list_url_shards, list_version
from tokamake.errors import UserError
from tokamake.files import digest
from tokamake.remote.addresses import is_remote
from tokamake.remote.download import list_files


def plan(
    *,
    corpora: Path,
    settings: str = "{}",
    declared: tuple[str, ...] = (),
    split_sentences: bool = False,
    output: Path,
) -> None:
    """Plan shards, merged datasets and job batches from the sizes of raw files.

    A row with the format indexed gets no shards: each of its datasets becomes a merged dataset.

    Args:
        corpora: table of corpora, such as config/corpora.tsv.
        settings: the config's `plan` section as JSON.
        declared: PATH=BYTES of raw files that do not exist yet.
        split_sentences: sequences are sentences; names of merged datasets end in _sentence.
        output: plan.json to write; an existing plan is extended.
    """
    sizes = {}
    for text in declared:
        path, _, size = text.rpartition("=")
        if not path or not size.isdigit():
            raise UserError(f"--declared {text}: give PATH=BYTES")
        sizes[path] = int(size)
    new_plan = make_plan(
        read_corpora(corpora),
        parse_json(PlanSettings, settings, where="--settings"),
        declared=sizes,
        previous=read_plan(output) if output.is_file() else None,
        tokenize=TokenizeSettings(split_sentences=split_sentences, on_bad_document="quarantine"),
    )
    write_plan(output, new_plan)
    print(
        f"{output}: {len(new_plan.shards):,} shards in {len(new_plan.tokenize_batches):,} jobs, "
        f"{len(new_plan.merged):,} merged datasets in {len(new_plan.merge_batches):,} jobs"
    )


def make_plan(
    corpora: Iterable[Corpus],
    settings: PlanSettings,
    *,
    declared: Mapping[str, int],
    previous: Plan | None = None,
    tokenize: TokenizeSettings | None = None,
    fetch_urls: FetchUrlsSettings | None = None,
) -> Plan:
    """Plan all corpora, and extend an earlier plan if its sizes are the same.

    `declared` has the sizes of raw files that do not exist yet. The first documents of some new
    files are read: a `text_key` that none of them has is refused. If `tokenize` stops at bad
    documents, any other fault of one of them is, too; if it compares documents, a job tokenizes one
    corpus only. Without `tokenize`, only formats are checked. `fetch_urls` says which URLs of lists
    are left out.
    """
    rows = list(corpora)
    check = _faults_to_refuse(tokenize)
    tokenize = tokenize or TokenizeSettings(on_bad_document="quarantine")
    # Another number of jobs changes no shard, and neither does deleting them.
    sizes = settings.model_dump(exclude={"max_jobs", "keep_shards"})
    extended = previous if previous and previous.settings == sizes else None
    downloads = _list_downloads(rows, previous, fetch_urls=fetch_urls or FetchUrlsSettings())
    remote = {address: [entry.file for entry in listed] for address, listed in downloads.items()}
    files = {
        corpus.corpus: raw_files(corpus, declared, downloads=remote)
        for corpus in rows
        if not corpus.is_indexed
    }
    shards: list[PlannedShard] = []
    merged: list[PlannedMerge] = []
    for corpus in rows:
        if corpus.is_indexed:
            merged += _plan_links(corpus, extended)
            continue
        suffixes = _suffixes(corpus, tokenize.split_sentences)
        kept_shards, kept_merged = _keep(
            corpus.corpus, files[corpus.corpus], suffixes=suffixes, previous=extended
        )
        planned_paths = {path for shard in kept_shards for path in shard.files}
        new_files = [file for file in files[corpus.corpus] if file.path not in planned_paths]
        new_shards = cut_shards(
            corpus,
            new_files,
            settings=settings,
            first=_next_number(kept_shards),
            check=check,
        )
        groups = group_shards(new_shards, settings.merged_bytes)
        shards += kept_shards + new_shards
        merged += kept_merged + _plan_merges(
            corpus.corpus, groups, suffixes=suffixes, first=_next_number(kept_merged)
        )
    tokenizer, tokenizer_stamp = _plan_tokenizer(rows, files, previous=previous)
    return Plan(
        sizes,
        tokenizer_stamp,
        tokenizer,
        _plan_batches(
            shards,
            extended.tokenize_batches if extended else (),
            max_jobs=settings.max_jobs,
            reading={row.corpus: _reading(row, alone=tokenize.compares_documents) for row in rows},
        ),
        # Merging takes a fraction of the time of tokenizing, so a quarter of the jobs is enough.
        _plan_batches(
            merged,
            extended.merge_batches if extended else (),
            max_jobs=-(-settings.max_jobs // 4),
            reading={row.corpus: str(row.is_indexed) for row in rows},
        ),
        tuple(merged),
        tuple(shards),
        tuple(entry for listed in downloads.values() for entry in listed),
        settings.keep_shards,
    )


def _faults_to_refuse(tokenize: TokenizeSettings | None) -> Check:
    """Faults of first documents for which a plan is refused."""
    if tokenize is None:
        return "format"
    # Quarantine takes unreadable documents, however many the first ones are.
    return "all" if tokenize.on_bad_document == "stop" else "keys"


def _list_downloads(
    corpora: Iterable[Corpus], previous: Plan | None, *, fetch_urls: FetchUrlsSettings
) -> dict[str, list[PlannedDownload]]:
    """List the files behind each address, or take them from the earlier plan, which pins them."""
    listed: dict[str, list[PlannedDownload]] = {}
    for download in previous.downloads if previous else ():
        listed.setdefault(download.address, []).append(download)
    named: dict[str, list[PlannedDownload]] = {}
    for corpus in corpora:
        for address in patterns(corpus):
            if address in named or not (is_remote(address) or is_url_list(address)):
                continue
            known = listed.get(address, [])
            try:
                if is_url_list(address) and not _is_current(known, address, fetch_urls=fetch_urls):
                    known = []
                named[address] = known or [
                    PlannedDownload(address, *file)
                    for file in (
                        list_url_shards(address, fetch_urls)
                        if is_url_list(address)
                        else list_files(address)
                    )
                ]
            except UserError as error:
                raise UserError(f"{corpus.where}: files: {error}") from None
    return named


def _is_current(
    planned: list[PlannedDownload], address: str, *, fetch_urls: FetchUrlsSettings
) -> bool:
    """Whether a list of URLs is as it was planned: cleaning millions of URLs takes minutes."""
    version = list_version(address, fetch_urls)
    return bool(planned) and planned[0].version.rpartition(" ")[0] == version


def _suffixes(corpus: Corpus, split_sentences: bool) -> dict[str, str]:
    """Map the name suffix of each merged dataset of a corpus to the text key of its shards.

    The key is empty if the corpus has a single text per document.
    """
    names = Fields(split_keys([corpus.text_key]), corpus.template).checked().names
    unit = "sentence" if split_sentences else "document"
    return {f"_{name}_{unit}": name if len(names) > 1 else "" for name in names}


def _keep(
    corpus: str, files: list[RawFile], *, suffixes: Mapping[str, str], previous: Plan | None
) -> tuple[list[PlannedShard], list[PlannedMerge]]:
    old_merged = [merge for merge in previous.merged if merge.corpus == corpus] if previous else []
    old_suffixes = {
        (re.sub(r"^-\d+", "", merge.name.removeprefix(corpus)), merge.key) for merge in old_merged
    }
    # Other text keys or sentences give other datasets: plan this corpus from scratch.
    if previous is None or old_suffixes != set(suffixes.items()):
        return [], []
    present = {file.path: file for file in files}
    old_shards = [shard for shard in previous.shards if shard.corpus == corpus]
    # A file that is planned in byte ranges and no longer fits them is planned again as a new file.
    for path in {shard.files[0] for shard in old_shards if not _fits(shard, present)}:
        del present[path]
    shards = {}
    for shard in old_shards:
        if kept_files := [present[path] for path in shard.files if path in present]:
            shards[shard.name] = make_shard(
                shard.name, kept_files, byte_range=shard.byte_range, size=shard.bytes
            )
    merged = []
    for merge in old_merged:
        if names := tuple(name for name in merge.shards if name in shards):
            merged.append(merge._replace(shards=names))
    return list(shards.values()), merged


def _fits(shard: PlannedShard, present: Mapping[str, RawFile]) -> bool:
    if not shard.byte_range or shard.files[0] not in present:
        return True
    file = present[shard.files[0]]
    if stamp([file]) == shard.stamp:
        return True
    last_byte = max(int(bound or 0) for bound in shard.byte_range.split(":"))
    return last_byte <= file.size and is_divisible(file)


def _plan_merges(
    corpus: str, groups: list[tuple[str, ...]], *, suffixes: Mapping[str, str], first: int
) -> list[PlannedMerge]:
    return [
        PlannedMerge(f"{corpus}-{number:04d}{suffix}", corpus, key, group)
        for number, group in enumerate(groups, first)
        for suffix, key in suffixes.items()
    ]


def _plan_links(corpus: Corpus, previous: Plan | None) -> list[PlannedMerge]:
    """Plan a merged dataset for each existing one; names of an earlier plan stay.

    Datasets of a pair have the same number.
    """
    old = [merge for merge in previous.merged if merge.corpus == corpus.corpus] if previous else []
    names = {merge.dataset: merge.name for merge in old if merge.dataset}
    merged, number = [], _next_number(old)
    for pair in dataset_pairs(corpus):
        suffixes = {dataset.prefix: f"_{key}_document" for key, dataset in pair.items()}
        stems = {names.get(prefix, "").removesuffix(end) for prefix, end in suffixes.items()}
        # One of them may be new, or have had another key.
        stem = stems.pop() if len(stems) == 1 else ""
        if not re.fullmatch(rf"{re.escape(corpus.corpus)}-\d+", stem):
            stem, number = f"{corpus.corpus}-{number:04d}", number + 1
        for dataset in pair.values():
            name = stem + suffixes[dataset.prefix]
            merged.append(PlannedMerge(name, corpus.corpus, "", (), *dataset))
    return sorted(merged, key=lambda merge: merge.name)


def _plan_batches(
    members: list[PlannedShard] | list[PlannedMerge],
    previous: tuple[JobBatch, ...],
    *,
    max_jobs: int,
    reading: Mapping[str, str],
) -> tuple[JobBatch, ...]:
    """Keep earlier batches without members that are gone; add new ones, about `max_jobs` at most.

    A new batch holds neighbours of one corpus. With more corpora than jobs, it holds corpora that
    are equal in `reading`. It has the name of its first corpus.
    """
    corpora = {member.name: member.corpus for member in members}
    batches, numbers = [], Counter[str]()  # number after the highest one of each corpus
    for batch in previous:
        numbers[batch.corpus] = max(numbers[batch.corpus], _next_number([batch]))
        # A job has the options of the corpus in its name.
        if kept := tuple(
            name
            for name in batch.members
            if name in corpora and reading[corpora[name]] == reading.get(batch.corpus)
        ):
            batches.append(JobBatch(batch.name, kept))
    batched = {name for batch in batches for name in batch.members}
    new = {name: corpus for name, corpus in corpora.items() if name not in batched}
    has_jobs_for_all = len(set(new.values())) <= max_jobs
    new_names: dict[str, list[str]] = {}
    for name, corpus in new.items():
        new_names.setdefault(corpus if has_jobs_for_all else reading[corpus], []).append(name)
    size = -(-len(new) // max_jobs)
    for names in new_names.values():
        count = -(-len(names) // size)
        bounds = [len(names) * number // count for number in range(count + 1)]
        for start, end in pairwise(bounds):
            corpus = corpora[names[start]]
            batches.append(JobBatch(f"{corpus}-{numbers[corpus]:05d}", tuple(names[start:end])))
            numbers[corpus] += 1
    return tuple(batches)


def _reading(corpus: Corpus, *, alone: bool) -> str:
    return (
        corpus.corpus
        if alone
        else repr((corpus.text_key, corpus.template, corpus.format, corpus.filters))
    )


def _next_number(items: Iterable[PlannedShard | PlannedMerge | JobBatch]) -> int:
    """Return the number after the highest one in names like code/00003 and code-0003."""
    numbers = (re.match(r"[/-](\d+)", item.name.removeprefix(item.corpus)) for item in items)
    return max((int(match[1]) for match in numbers if match), default=-1) + 1


def _plan_tokenizer(
    corpora: list[Corpus], files: Mapping[str, list[RawFile]], *, previous: Plan | None
) -> tuple[tuple[TokenizerCorpus, ...], str]:
    """Return the files that a tokenizer is trained on, and their stamp; see `Plan`.

    With an earlier plan, a tokenizer may exist and shards may depend on it. Therefore new files are
    left out, and removed files do not change the stamp. Another format, key or template does.
    """
    old_entries = {entry.corpus: entry for entry in previous.tokenizer} if previous else {}
    old_paths = {path for entry in old_entries.values() for path in entry.files}
    old, every = [], []
    for corpus in (row for row in corpora if not row.is_indexed):
        paths = tuple(file.path for file in files[corpus.corpus])
        fields = corpus.corpus, corpus.format, corpus.text_key, corpus.template
        every.append(TokenizerCorpus(*fields, paths))
        old.append(TokenizerCorpus(*fields, tuple(path for path in paths if path in old_paths)))
    kept = tuple(entry for entry in old if entry.files)
    if previous is None or not kept:
        return tuple(every), digest(every)
    is_same = all(entry[:4] == old_entries.get(entry.corpus, entry)[:4] for entry in kept)
    return kept, previous.tokenizer_stamp if is_same else digest(kept)
