"""Samples of the documents that a filter kept, changed or dropped.

A hash of a document's place chooses them: the smallest hashes of each verdict. So neither shards
nor threads matter, and the samples of several shards are the smallest of all their samples.
"""

import bisect
import hashlib
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokamake.data.readers import Input, RecordBlock

NUM_SAMPLES = 3
"""Samples of each verdict in manifests."""
_MAX_REASONS = 16
"""Reasons that have samples, for a filter that makes up reasons."""
_CHARACTERS = 240
"""Length of a sample's text."""
_CONTEXT = 80
"""Characters of a sample's text before the first change."""
_COUNTED_BYTES = 1 << 30
"""Lines further into a file are named by their first byte, in all shards: a shard would read all
bytes before it to count lines."""

Sample = dict[str, Any]


class Sampled(NamedTuple):
    """Documents of a block, as candidates for samples."""

    source: Input
    block: RecordBlock
    hashes: list[int]
    """Hash of the place of each document of the block."""

    def place(self, index: int) -> str:
        """Return the place of a document: the same one in any shard."""
        number, offset = int(self.block.numbers[index]), int(self.block.offsets[index])
        if self.source.unit == "line" and offset > _COUNTED_BYTES:
            return f"{self.source.path}: byte {offset}"
        return self.source.place(number, offset)


def candidates(source: Input, block: RecordBlock) -> Sampled:
    """Hash the places of the documents of a block: path, and first byte of the line or number."""
    has_bytes = (block.offsets >= 0) & (source.unit == "line")
    places = np.where(has_bytes, block.offsets, block.numbers).astype(np.uint64)
    return Sampled(source, block, _mix(places ^ _path_hash(str(source.path))).tolist())


@cache
def _path_hash(path: str) -> np.uint64:
    digest = hashlib.blake2b(path.encode(errors="surrogateescape"), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64 (Steele, Lea and Flood 2014)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


class VerdictSamples:
    """Samples of the verdicts of a filter."""

    def __init__(self, number: int = NUM_SAMPLES) -> None:
        self._number = number
        self._samples: dict[tuple[str, str], list[tuple[int, Sample]]] = {}
        self._bounds: dict[tuple[str, str], int] = {}

    def wants(self, hashed: int, verdict: tuple[str, str]) -> bool:
        """Whether a document with this hash becomes a sample of the verdict."""
        return hashed < self._bounds.get(verdict, (1 << 64) * (self._number > 0))

    def add(
        self,
        documents: Sampled,
        index: int,
        verdict: tuple[str, str],
        *,
        texts: tuple[str, str | None],
        value: float | None = None,
    ) -> None:
        """Add a document that `wants` asks for.

        Args:
            index: the document in its block.
            verdict: "kept", "changed" or "dropped", and the reason.
            texts: text before, and after a change.
        """
        hashed, (kind, reason) = documents.hashes[index], verdict
        sample: Sample = {"hash": f"{hashed:016x}", "verdict": kind}
        sample |= {"reason": reason} if reason else {}
        sample |= {} if value is None else {"value": value}
        sample |= {"place": documents.place(index), **_excerpts(*texts)}
        chosen = self._samples.setdefault(verdict, [])
        bisect.insort(chosen, (hashed, sample), key=lambda item: item[0])
        del chosen[self._number :]
        if len(chosen) == self._number:
            self._bounds[verdict] = chosen[-1][0]

    def chosen(self) -> list[Sample]:
        """Return the samples, sorted by verdict and hash."""
        samples = (sample for chosen in self._samples.values() for _, sample in chosen)
        return smallest(samples, self._number)


def _excerpts(before: str, after: str | None) -> dict[str, str]:
    """Cut texts to a part with the first change."""
    if after is None:
        return {"text": _cut(before, 0)}
    difference = _first_difference(before, after)
    start = max(0, difference - _CONTEXT)
    if removed := _removed(before, after, difference=difference):
        return _without(before, after, removed=removed)
    return {"text": _cut(before, start), "after": _cut(after, start)}


class _Removed(NamedTuple):
    """A long piece of a text that a filter has removed."""

    start: int
    end: int
    after: int
    """Character of the changed text with which the text behind the piece begins."""


def _removed(before: str, after: str, *, difference: int) -> _Removed | None:
    """Find the piece that the first change removes; None if it is short, or there is none.

    A piece of whole lines begins with a line.
    """
    line = before.rfind("\n", 0, difference) + 1
    for start in (line, difference):
        resumed = start + len(after[start:]) - len(after[start:].lstrip())
        found = before.find(after[resumed : resumed + _CONTEXT], start + 1)
        is_whole = start == difference or before[max(found, 1) - 1] == "\n"
        if resumed < len(after) and found - start > _CONTEXT and is_whole:
            return _Removed(start, found, resumed)
    return None


def _without(before: str, after: str, *, removed: _Removed) -> dict[str, str]:
    """Excerpts around a removed piece, with its first and last characters."""
    start, end, resumed = removed
    first = max(0, start - _CONTEXT)
    left = "…" * (first > 0) + before[first:start]
    piece = before[start:end]
    if len(piece) > _CHARACTERS:
        half, number = _CHARACTERS // 2, len(piece) - _CHARACTERS
        piece = f"{piece[:half]} […{number:,} characters…] {piece[-half:]}"
    same = _first_difference(before[end : end + _CONTEXT], after[resumed : resumed + _CONTEXT])
    right = before[end : end + same] + "…" * (end + same < len(before))
    return {"text": left + piece + right, "after": left + after[start:resumed] + right}


def _cut(text: str, start: int) -> str:
    end = start + _CHARACTERS
    return "…" * (start > 0) + text[start:end] + "…" * (end < len(text))


def _first_difference(first: str, second: str) -> int:
    """Return the number of characters that two different texts begin with in common."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def smallest(samples: Iterable[Mapping[str, Any]], number: int = NUM_SAMPLES) -> list[Sample]:
    """Return the samples with the smallest hashes of each verdict, sorted by verdict and hash."""
    verdicts: dict[tuple[str, str], list[Sample]] = {}
    for sample in sorted(samples, key=lambda sample: (sample["hash"], sample["place"])):
        chosen = verdicts.setdefault((sample["verdict"], sample.get("reason", "")), [])
        if len(chosen) < number:
            chosen.append(dict(sample))
    # In the order of their first hashes: the last reasons are left out in any order of shards.
    names = [*verdicts][: _MAX_REASONS + 2]
    return [sample for name in sorted(names) for sample in verdicts[name]]
