"""Items of evaluation sets, and search for passages that hold most of the information of one.

The score of a passage and an item is the sum of the IDF of the item's n-grams in the passage, as a
share of the sum of all its n-grams; as in allenai/decon (https://github.com/allenai/decon,
doc/simple-details.md). An n-gram in few items weighs much. Short items need higher scores. This
search looks at each n-gram of a document; decon samples each tenth.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt

from tokamake import _csrc
from tokamake.data.filters._words import word_characters

_MAX_MISSES = 11
"""N-grams of a passage, one after the other, that the item does not have: about seven words that
were changed or added."""
_PERFECT_WORDS, NORMAL_WORDS = 20, 50
"""Items of at most the first number of words need a score of 1; items of at least the second need
the score of the settings; between them, the score falls linearly."""
_MAX_ITEMS = 1000
"""No passage is searched around n-grams of more items, such as phrases of instructions."""
_TOLERANCE = 1e-9  # of sums in floating point

Numbers = npt.NDArray[np.int64]


class IdfIndex:
    """N-grams of the items of evaluation sets."""

    def __init__(self, *, ngram_words: int, min_words: int, score: float) -> None:
        self._windows = _csrc.WordWindows(word_characters(), size=ngram_words, group=1)
        self._ngram_words, self._min_words, self._score = ngram_words, min_words, score
        # Of each text: its n-grams, the set, the record, and the number of words.
        self._hashes: list[npt.NDArray[np.uint64]] = []
        self._texts: list[tuple[int, int, int]] = []
        self._num_records = 0

    def add(self, texts: Iterable[str], set: int) -> bool:
        """Add an item: texts of its fields. False: all are shorter than `min_words`."""
        is_added = False
        for text in texts:
            hashes, _ = self._windows.choose(text)
            num_words = len(hashes) + self._ngram_words - 1 if len(hashes) else 0
            if num_words >= self._min_words:
                self._hashes.append(np.unique(hashes))
                self._texts.append((set, self._num_records, num_words))
                is_added = True
        self._num_records += is_added
        return is_added

    def finish(self) -> None:
        """Weigh the n-grams, after the last item is added."""
        sets, records, words = np.array(self._texts, np.int64).T
        self._sets = sets
        sizes = np.array([len(hashes) for hashes in self._hashes])
        self._known, ngrams = np.unique(np.concatenate(self._hashes), return_inverse=True)
        texts = np.repeat(np.arange(len(sizes)), sizes)
        pairs = np.unique(records[texts] * len(self._known) + ngrams)
        frequencies = np.bincount(pairs % len(self._known), minlength=len(self._known))
        # decon has ln(records / frequency), which is 0 for a single record.
        self._idf = np.log((self._num_records + 1) / frequencies)
        self._ngrams_of_text = np.split(ngrams, np.cumsum(sizes)[:-1])
        self._totals = np.bincount(texts, self._idf[ngrams], minlength=len(sizes))
        share = np.clip((words - _PERFECT_WORDS) / (NORMAL_WORDS - _PERFECT_WORDS), 0, 1)
        self._needed = self._totals * (1 - (1 - self._score) * share - _TOLERANCE)
        # Texts of each n-gram that is rare enough; the IDF of all others by text.
        is_rare = np.bincount(ngrams, minlength=len(self._known)) <= _MAX_ITEMS
        common = np.where(is_rare[ngrams], 0.0, self._idf[ngrams])
        self._common = np.bincount(texts, common, minlength=len(sizes))
        order = np.argsort(ngrams, kind="stable")
        order = order[is_rare[ngrams[order]]]
        self._rare_texts = texts[order]
        self._ends = np.cumsum(np.bincount(ngrams[order], minlength=len(self._known)))
        self._hashes, self._texts = [], []

    def overlaps(self, text: str) -> tuple[dict[int, float], list[tuple[int, int]]]:
        """Number of each set with an item that a text holds → highest score; and the passages."""
        hashes, spans = self._windows.choose(text)
        places = np.searchsorted(self._known, hashes)
        places[places == len(self._known)] = 0
        positions = np.flatnonzero(self._known[places] == hashes)
        ngrams = places[positions]
        scores: dict[int, float] = {}
        passages = set[tuple[int, int]]()
        for item in self._candidates(np.unique(ngrams)).tolist():
            of_item = np.isin(ngrams, self._ngrams_of_text[item])
            for first, last, total in self._passages(positions[of_item], ngrams[of_item]):
                if total >= self._needed[item]:
                    number = int(self._sets[item])
                    score = round(min(1.0, total / float(self._totals[item])), 6)
                    scores[number] = max(score, scores.get(number, 0.0))
                    passages.add((int(spans[first, 0]), int(spans[last, 1])))
        return dict(sorted(scores.items())), sorted(passages)

    def _candidates(self, ngrams: Numbers) -> Numbers:
        """Texts that all n-grams of a document together could hold, from at least a rare one."""
        ends = self._ends[ngrams]
        sizes = ends - np.where(ngrams > 0, self._ends[ngrams - 1], 0)
        offsets = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        texts = self._rare_texts[np.repeat(ends - sizes, sizes) + offsets]
        found, numbers = np.unique(texts, return_inverse=True)
        sums = np.bincount(numbers, np.repeat(self._idf[ngrams], sizes), minlength=len(found))
        return found[sums + self._common[found] >= self._needed[found]]

    def _passages(self, positions: Numbers, ngrams: Numbers) -> Iterator[tuple[int, int, float]]:
        """Yield the first and last n-gram of each passage, and the sum of its different IDF."""
        gaps = np.flatnonzero(np.diff(positions) > _MAX_MISSES + 1) + 1
        parts = zip(np.split(positions, gaps), np.split(ngrams, gaps), strict=True)
        for places, found in parts:
            total = float(self._idf[np.unique(found)].sum())
            yield int(places[0]), int(places[-1]), total
