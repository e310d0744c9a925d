"""An index of the words of passages, by the package bm25s."""

from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from tokamake.errors import UserError
from tokamake.retrieval.embeddings import check_unique
from tokamake.retrieval.evidence import read_evidence
from tokamake.retrieval.found import Found
from tokamake.retrieval.top_k import TopK
from tokamake.retrieval.words import is_run, words


class _Words:
    """Numbers of the words of passages, in one array; bm25s reads them passage by passage."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.vocab: dict[str, int] = {}
        ids, self._ends, self._numbers = array("q"), array("q"), array("i")
        for passage in read_evidence(paths):
            ids.append(passage.id)
            for word in _words(f"{passage.title} {passage.text}"):
                self._numbers.append(self.vocab.setdefault(word, len(self.vocab)))
            self._ends.append(len(self._numbers))
        if not self._numbers:
            raise UserError(f"--passages: no word in {len(ids):,} passages; give texts")
        self.passage_ids = np.array(ids)
        check_unique(self.passage_ids, "--passages")

    @property
    def ids(self) -> "_Words":
        """This object: bm25s looks for the lists of numbers here."""
        return self

    def __len__(self) -> int:
        return len(self._ends)

    def __iter__(self) -> Iterator[list[int]]:
        start = 0
        for end in self._ends:
            yield self._numbers[start:end].tolist()
            start = end


def _words(text: str) -> Iterator[str]:
    return filter(is_run, words(text))


class WordIndex:
    """Passages that can be searched by words."""

    def __init__(self, paths: Sequence[Path], *, k1: float, b: float) -> None:
        try:
            import bm25s
        except ModuleNotFoundError:
            message = "bm25s is not installed; pip install 'tokamake[retrieval]'"
            raise UserError(message) from None
        corpus = _Words(paths)
        self.num_passages, self._ids, self._vocab = len(corpus), corpus.passage_ids, corpus.vocab
        self._bm25 = bm25s.BM25(k1=k1, b=b, method="lucene", backend="numpy", csc_backend="numpy")
        # With the empty word, the vocabulary would have a word without a column.
        self._bm25.index(corpus, create_empty_token=False, show_progress=False)

    def find(self, questions: Sequence[str], *, k: int) -> Found:
        """Find the k passages with the largest scores; of equal ones, the earlier first.

        A passage without a word of the question is not found: its id is -1.
        """
        top = TopK(len(questions), k)
        for row, question in enumerate(questions):
            numbers = [self._vocab[word] for word in _words(question) if word in self._vocab]
            if numbers:
                scores = self._bm25.get_scores_from_ids(numbers).astype(np.float32)
                scores[scores <= 0] = -np.inf
                top.update(scores[None], queries=slice(row, row + 1), start=0)
        return Found(np.arange(len(questions)), top.ids(self._ids), top.scores)
