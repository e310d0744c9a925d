"""Cut text that occurred before out of documents, and count the cuts as a filter's verdicts."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tokamake.data.corpus.passages import without
from tokamake.data.filters._samples import NUM_SAMPLES, VerdictSamples, candidates
from tokamake.data.readers import Input, RecordBlock, select_texts

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
        self._num_documents = self._num_cuts = 0
        self._changed = {"documents": 0, "characters": 0}
        self._dropped = {"documents": 0, "characters": 0}
        self._num_cut_documents = 0

    @property
    def dropped(self) -> int:
        return self._dropped["documents"]

    @property
    def counts(self) -> dict[str, Any]:
        """Counts in the form of a filter's, for the manifest."""
        cuts = {"documents": self._num_cut_documents, "value": self._num_cuts}
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
        bounds = np.array([first, first + len(block.records)])
        start, end = np.searchsorted(self._cuts["document"], bounds)
        cuts = self._cuts[start:end]
        documents = candidates(source, block)
        changed: list[dict[int, str]] = [{} for _ in columns]
        is_kept = np.ones(len(indices), bool)
        positions = np.searchsorted(indices, np.unique(cuts["document"]).astype(np.int64) - first)
        for position in positions.tolist():
            index = int(indices[position])
            before = [column[position] for column in columns]
            after = self._cut(before, cuts[cuts["document"] == first + index])
            is_dropped = not any(text.strip() for text in after)
            is_kept[position] = not is_dropped
            num_characters = sum(map(len, before)) - (0 if is_dropped else sum(map(len, after)))
            sums = self._dropped if is_dropped else self._changed
            sums["documents"] += 1
            sums["characters"] += num_characters
            verdict = ("dropped", _NOTHING_LEFT) if is_dropped else ("changed", "")
            if self._samples.wants(documents.hashes[index], verdict):
                number = next(i for i, text in enumerate(after) if text != before[i])
                texts = before[number], None if is_dropped else after[number]
                self._samples.add(documents, index, verdict, texts=texts)
            for changes, text, old in zip(changed, after, before, strict=True):
                if text != old:
                    changes[position] = text
        kept = np.flatnonzero(is_kept)
        texts_left = (
            select_texts(column, kept.tolist(), changed=changes)
            for column, changes in zip(columns, changed, strict=True)
        )
        return tuple(texts_left), indices[kept]

    def _cut(self, texts: list[str], cuts: npt.NDArray[Any]) -> list[str]:
        self._num_cut_documents += 1
        self._num_cuts += len(cuts)
        spans: list[list[tuple[int, int]]] = [[] for _ in texts]
        for _, text, begin, end in cuts.tolist():
            spans[text].append((begin, end))
        return [
            without(text, spans_of_text) if spans_of_text else text
            for text, spans_of_text in zip(texts, spans, strict=True)
        ]
