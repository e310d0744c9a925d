"""Cut text that occurred before out of documents, and count the cuts as a filter's verdicts."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from tokamake.data.corpus.passages import without
from tokamake.data.filters._samples import NUM_SAMPLES, Sampled, VerdictSamples, candidates
from tokamake.data.readers import Input, RecordBlock, select_texts

Span = tuple[int, int]
"""First character and end."""

_NOTHING_LEFT = "nothing else is left"


class RepeatCuts:
    """Spans to cut out of the documents of a shard. A document without other text is dropped."""

    def __init__(self, cuts: npt.NDArray[Any]) -> None:
        """Prepare to cut.

        Args:
            cuts: rows of `passages.CUT`, by document, text and character.
        """
        self._cuts = cuts
        self._samples = VerdictSamples(NUM_SAMPLES)
        self._num_documents = 0
        self._num_cuts = 0
        self._changed = {"documents": 0, "characters": 0}
        self._dropped = {"documents": 0, "characters": 0}

    @property
    def dropped(self) -> int:
        return self._dropped["documents"]

    @property
    def counts(self) -> dict[str, Any]:
        """Counts in the form of a filter's, for the manifest."""
        num_documents = self._changed["documents"] + self._dropped["documents"]
        cuts = {"documents": num_documents, "value": self._num_cuts}
        return {
            **{"filter": "repeats", "options": {}, "documents": self._num_documents},
            "changed": self._changed if self._changed["documents"] else {},
            "dropped": {_NOTHING_LEFT: self._dropped} if self.dropped else {},
            "metrics": {"passages cut": cuts} if self._num_cuts else {},
            "samples": self._samples.chosen(),
        }

    def apply(
        self,
        columns: tuple[Sequence[str], ...],
        block: RecordBlock,
        *,
        indices: npt.NDArray[np.int64],
        first: int,
        source: Input,
    ) -> tuple[tuple[Sequence[str], ...], npt.NDArray[np.int64]]:
        """Cut the documents of a block that have the given indices in it.

        `first` is the number of the block's first document in the shard. Returns the texts of the
        documents that are left, and their indices.
        """
        self._num_documents += len(indices)
        changed: list[dict[int, str]] = [{} for _ in columns]
        is_kept = np.ones(len(indices), bool)
        documents = candidates(source, block)
        for index, spans in self._spans(first, first + len(block.records)):
            position = int(np.searchsorted(indices, index))
            if position == len(indices) or indices[position] != index:
                continue  # a filter failed now, for example at its time limit
            before = [column[position] for column in columns]
            after = [
                without(text, spans[number]) if number in spans else text
                for number, text in enumerate(before)
            ]
            is_kept[position] = self._count(documents, index, before=before, after=after)
            self._num_cuts += sum(map(len, spans.values()))
            for number in spans:
                changed[number][position] = after[number]
        kept = np.flatnonzero(is_kept)
        texts_left = (
            select_texts(column, kept.tolist(), changed=changes)
            for column, changes in zip(columns, changed, strict=True)
        )
        return tuple(texts_left), indices[kept]

    def _spans(self, first: int, end: int) -> Iterator[tuple[int, dict[int, list[Span]]]]:
        """Yield each document of a range that has cuts: index, and text → its spans."""
        bounds = np.searchsorted(self._cuts["document"], [first, end])
        cuts = self._cuts[slice(*bounds)].tolist()
        for document, group in groupby(cuts, key=itemgetter(0)):
            spans: dict[int, list[Span]] = {}
            for _, text, begin, after in group:
                spans.setdefault(text, []).append((begin, after))
            yield document - first, spans

    def _count(
        self, documents: Sampled, index: int, *, before: list[str], after: list[str]
    ) -> bool:
        """Count a document, and take it as a sample; returns whether any text is left."""
        is_left = any(text.strip() for text in after)
        sums = self._changed if is_left else self._dropped
        sums["documents"] += 1
        sums["characters"] += sum(map(len, before)) - is_left * sum(map(len, after))
        verdict = ("changed", "") if is_left else ("dropped", _NOTHING_LEFT)
        if self._samples.wants(documents.hashes[index], verdict):
            pair = next(pair for pair in zip(before, after, strict=True) if pair[0] != pair[1])
            texts = pair if is_left else (pair[0], None)
            self._samples.add(documents, index, verdict, texts=texts)
        return is_left
