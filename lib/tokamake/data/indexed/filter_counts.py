"""Counts of filters in manifests: their sums, and rows for tables."""

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


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
        if isinstance(value, Mapping) and key != "options":
            summed[key] = _sum(first.get(key, {}), value)
        elif isinstance(value, int | float):
            summed[key] = first.get(key, 0) + value
        else:
            summed[key] = value
    return summed


class Verdict(NamedTuple):
    """Documents that a filter dropped for a reason, changed or measured, for tables."""

    filter: str
    """Name and options."""
    reason: str
    """Reason of the drop, or "changed", or the name of a metric."""
    documents: int
    share: float
    """Share of the documents that the filter saw, 0 to 1."""
    characters: int | None
    """Characters of dropped documents, or removed from changed ones; None for a metric."""
    mean: float | None
    """Mean of the numbers of the verdicts, or of the metric; None if there are none."""


def verdicts(counts: Iterable[Mapping[str, Any]]) -> list[Verdict]:
    """Return the verdicts of filters, from entries of a manifest; the most frequent first."""
    listed = []
    for entry in counts:
        shown = {option: json.dumps(value) for option, value in entry["options"].items()}
        options = ", ".join(f"{option}: {value}" for option, value in shown.items())
        name = f"{entry['filter']} ({options})" if options else entry["filter"]
        changed = {"changed": entry["changed"]} if entry["changed"] else {}
        nothing = {} if changed or entry["metrics"] else {"none dropped": {"documents": 0}}
        for sums in (entry["dropped"] or nothing, changed):
            for reason, each in _most_frequent_first(sums):
                listed.append(_verdict_row(name, reason, entry=entry, sums=each))
        for metric, each in _most_frequent_first(entry["metrics"]):
            listed.append(_verdict_row(name, metric, entry=entry, sums=each))
    return listed


def _most_frequent_first(sums: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return sorted(sums.items(), key=lambda item: -item[1]["documents"])


def _verdict_row(
    name: str, reason: str, *, entry: Mapping[str, Any], sums: Mapping[str, Any]
) -> Verdict:
    documents, value = sums["documents"], sums.get("value")
    share = documents / entry["documents"] if entry["documents"] else 0.0
    mean = None if value is None else value / documents
    return Verdict(name, reason, documents, share, sums.get("characters"), mean)
