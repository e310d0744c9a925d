"""Counts of documents in manifests: whether they add up, sums of filters, and rows for tables."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from tokamake.runtime.console import counted


def merge_counts(datasets: Iterable[Iterable[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Sum the counts of several datasets: equal filters with equal options are one entry."""
    merged: dict[str, dict[str, Any]] = {}
    for counts in datasets:
        for entry in counts:
            identity = {key: entry.get(key) for key in ("filter", "options", "source")}
            known = merged.get(name := str(identity))
            merged[name] = dict(entry) if known is None else _sum(known, entry)
    return list(merged.values())


def _sum(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Add the numbers of two mappings, at all levels; other values are equal."""
    summed = dict(first)
    for key, value in second.items():
        if key == "samples":
            from tokamake.data.filters._samples import smallest  # imports pydantic: 0.25 s

            summed[key] = smallest([*first.get(key, ()), *value])
        elif isinstance(value, Mapping) and key != "options":
            summed[key] = _sum(first.get(key, {}), value)
        elif isinstance(value, int | float):
            summed[key] = first.get(key, 0) + value
        else:
            summed[key] = value
    return summed


_LEFT_OUT = ("empty", "quarantined", "duplicate", "filtered")


def count_faults(manifest: Mapping[str, Any]) -> Iterator[str]:
    """Yield how the counts of a manifest contradict each other; skip counts that it lacks."""
    filters = manifest.get("filters", [])
    filtered, dropped = manifest.get("filtered_documents", 0), sum(map(num_dropped, filters))
    if dropped != filtered:
        yield f"filters dropped {dropped:,} documents, but filtered_documents is {filtered:,}"
    parts = [manifest.get(f"{reason}_documents") for reason in _LEFT_OUT[:3]]
    if "documents_in" in manifest and None not in parts:
        stated, found = manifest["documents_in"], sum((manifest["documents"], *parts, filtered))
        if stated != found:
            names = ", ".join(_LEFT_OUT)
            yield f"documents_in is {stated:,}, but documents and {names} ones are {found:,}"
    if "inputs" not in manifest:  # merged: equal filters of shards with other lists are one entry
        return
    for entry, following in pairwise(filters):
        passed = num_kept(entry)
        if following["documents"] != passed:
            yield (
                f"filter {entry['filter']} passed {passed:,} documents, but "
                f"{following['filter']} saw {following['documents']:,}"
            )
    if filters:
        last = num_kept(filters[-1])
        kept = manifest["documents"] + manifest["empty_documents"]
        if last != kept:
            yield f"filters passed {last:,} documents, but {kept:,} are left"


def left_out(manifest: Mapping[str, Any]) -> str:
    """Number of documents read, and of those left out by cause; empty: none is, or not known."""
    near = manifest.get("near_duplicate_documents") or 0
    numbers = {
        "equal duplicates": (manifest.get("duplicate_documents") or 0) - near,
        "near-duplicates": near,
        "empty": manifest.get("empty_documents") or 0,
        "quarantined": manifest.get("quarantined_documents") or 0,
        "dropped by filters": manifest.get("filtered_documents") or 0,
    }
    parts = [f"{number:,} {name}" for name, number in numbers.items() if number]
    if not parts or manifest.get("documents_in") is None:
        return ""
    return f"{counted(manifest['documents_in'], 'document')} read: {', '.join(parts)}"


def skipped(manifest: Mapping[str, Any]) -> dict[str, int]:
    """Number of records of the raw files that are no documents, by kind."""
    numbers = Counter[str]()
    for shard in manifest.get("sources") or [manifest]:
        for raw in shard.get("inputs", ()):
            numbers.update(raw.get("skipped", {}))
    return dict(numbers.most_common())


def num_kept(entry: Mapping[str, Any]) -> int:
    """Number of documents that a filter kept, changed or not."""
    return int(entry["documents"] - num_dropped(entry) - num_failed(entry))


def num_dropped(entry: Mapping[str, Any]) -> int:
    """Number of documents that a filter dropped."""
    return sum(sums["documents"] for sums in entry["dropped"].values())


def num_failed(entry: Mapping[str, Any]) -> int:
    """Number of documents on which a filter failed."""
    return sum(sums["documents"] for sums in entry.get("quarantined", {}).values())


_MAX_SHOWN = 60
"""Characters of a filter's options in a table."""
_MAX_METRICS = 10
"""Metrics of a filter in a table: `language` has one for each of 176 languages."""


class Verdict(NamedTuple):
    """Documents that a filter dropped for a reason, changed, failed on or measured, for tables."""

    filter: str
    """Name and options."""
    reason: str
    """Reason of the drop, "changed", "quarantined" with the kind of failure, or a metric."""
    documents: int
    share: float
    """Share of the documents that the filter saw, 0 to 1."""
    characters: int | None
    """Change in characters: negative if they were removed or dropped; None for a metric."""
    mean: float | None
    """Mean of the numbers of the verdicts, or of the metric; None without numbers."""


def verdicts(counts: Iterable[Mapping[str, Any]]) -> list[Verdict]:
    """Return the verdicts of filters, from entries of a manifest; the most frequent first."""
    listed = []
    for entry in counts:
        name = filter_name(entry)
        changed = {"changed": entry["changed"]} if entry["changed"] else {}
        other = changed or entry["metrics"] or entry.get("quarantined")
        nothing = {} if other else {"none dropped": {"documents": 0}}
        for sums in (entry["dropped"] or nothing, changed):
            for reason, each in _most_frequent_first(sums):
                listed.append(_verdict_row(name, reason, entry=entry, sums=each))
        for kind, each in _most_frequent_first(entry.get("quarantined", {})):
            listed.append(_verdict_row(name, f"quarantined: {kind}", entry=entry, sums=each))
        for metric, each in _frequent_metrics(entry["metrics"]):
            listed.append(_verdict_row(name, metric, entry=entry, sums=each))
    return listed


def _most_frequent_first(sums: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return sorted(sums.items(), key=lambda item: -item[1]["documents"])


def _frequent_metrics(metrics: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The most frequent metrics, then the number of all others as one row."""
    listed = _most_frequent_first(metrics)
    shown, rest = listed[:_MAX_METRICS], listed[_MAX_METRICS:]
    documents = sum(sums["documents"] for _, sums in rest)
    if rest:
        shown.append((f"{len(rest)} rarer metrics, see the manifest", {"documents": documents}))
    return shown


def filter_name(entry: Mapping[str, Any]) -> str:
    """Name and options of a filter, for tables: length (min_words: 50). Long options are cut."""
    options = ", ".join(f"{name}: {_shown(value)}" for name, value in entry["options"].items())
    if len(options) > _MAX_SHOWN:
        options = f"{options[:_MAX_SHOWN]}…"
    return f"{entry['filter']} ({options})" if options else str(entry["filter"])


def _shown(value: Any) -> str:
    """Value of an option; of a mapping, such as evaluation sets with their files, the names."""
    if isinstance(value, Mapping):
        return f"[{', '.join(value)}]"
    return json.dumps(value, ensure_ascii=False)


def _verdict_row(
    name: str, reason: str, *, entry: Mapping[str, Any], sums: Mapping[str, Any]
) -> Verdict:
    documents, value = sums["documents"], sums.get("value")
    share = documents / entry["documents"] if entry["documents"] else 0.0
    mean = None if value is None else value / documents
    removed = sums.get("characters")
    added = None if removed is None else -removed
    return Verdict(name, reason, documents, share, added, mean)
