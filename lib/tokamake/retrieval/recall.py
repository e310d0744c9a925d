"""Recall of a search: whether passages have an answer to the question that found them."""

import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokamake.config.retrieval import Match
from tokamake.errors import UserError
from tokamake.retrieval.evidence import EvidencePassage
from tokamake.retrieval.found import Found
from tokamake.retrieval.questions import FLAGS, Question
from tokamake.retrieval.words import words

RANKS = (1, 5, 20, 100)
"""k of the recalls; larger ones than the search found are left out."""
_SAMPLES, _SAMPLE_PASSAGES, _SAMPLE_CHARACTERS = 20, 3, 200


class Hits:
    """Looks for answers in passages, which come in any order."""

    def __init__(self, questions: list[Question], found: Found, *, match: Match) -> None:
        """Look for answers.

        Args:
            questions: (n,) of the rows of `found`.
            found: results of the search.
            match: how answers match a passage.
        """
        self._questions, self._found, self._match = questions, found, match
        self._finder = _word_finder if match == "string" else _pattern_finder
        self.ranks = [0] * len(questions)
        """Rank of the first hit of each question, from 1; 0: no passage has an answer."""
        self._places: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for row, ids in enumerate(found.ids):
            for rank, number in enumerate(ids.tolist(), 1):
                if number >= 0:
                    self._places[number].append((row, rank))
        self._seen: set[int] = set()
        self._passages: dict[tuple[int, int], dict[str, Any]] = {}

    def look_at(self, passage: EvidencePassage) -> None:
        """Look for the answers to all questions that found this passage."""
        places = self._places.get(passage.id)
        if places is None:
            return
        if passage.id in self._seen:
            raise UserError(f"--passages: two have the id {passage.id}; give each its own")
        self._seen.add(passage.id)
        has = self._finder(passage.text)
        for row, rank in places:
            is_sample = row < _SAMPLES and rank <= _SAMPLE_PASSAGES
            if not is_sample and 0 < self.ranks[row] < rank:
                continue
            is_hit = any(map(has, self._questions[row].answers))
            if is_hit:
                self.ranks[row] = min(rank, self.ranks[row] or rank)
            if is_sample:
                answers = self._questions[row].answers if is_hit else []
                text, answer = self._excerpt(passage.text, answers)
                facts = {"id": passage.id, "title": passage.title, "text": text}
                self._passages[row, rank] = {**facts, "hit": is_hit, "answer": answer}

    def _excerpt(self, text: str, answers: list[str]) -> tuple[str, str]:
        """Part of a text around the first answer, and the answer as the text has it, or ''."""
        patterns = answers
        if self._match == "string":
            patterns = [r"\W*".join(map(re.escape, words(answer))) for answer in answers]
        found = [match for pattern in patterns if (match := re.search(pattern, text, FLAGS))]
        first = min(found, key=lambda match: match.start(), default=None)
        start, answer = 0, ""
        if first and first.group():
            answer = first.group()[: _SAMPLE_CHARACTERS // 2]
            if first.end() > _SAMPLE_CHARACTERS:
                start = first.start() - _SAMPLE_CHARACTERS // 4
        end = start + _SAMPLE_CHARACTERS
        return "…" * (start > 0) + text[start:end] + "…" * (end < len(text)), answer

    def check_all_seen(self, found: Path) -> None:
        """Refuse files that lack a passage that the search found."""
        if missing := sorted(self._places.keys() - self._seen):
            raise UserError(
                f"--passages: no passage has the id {missing[0]}, which {found} has found; give "
                f"all files of passages that were searched"
            )

    def recall(self) -> dict[str, float]:
        """Share of questions with a hit among the first k passages, by k."""
        _, most = self._found.ids.shape
        number = len(self.ranks)
        return {
            str(k): sum(0 < rank <= k for rank in self.ranks) / number for k in RANKS if k <= most
        }

    def samples(self) -> list[dict[str, Any]]:
        """The first questions with the best passages that they found."""
        return [
            {
                "question": question.text,
                "answers": question.answers,
                "rank": self.ranks[row] or None,
                "found": [
                    {**facts, "score": float(self._found.scores[row, rank - 1])}
                    for rank in range(1, _SAMPLE_PASSAGES + 1)
                    if (facts := self._passages.get((row, rank)))
                ],
            }
            for row, question in enumerate(self._questions[:_SAMPLES])
        ]


def _word_finder(text: str) -> Callable[[str], bool]:
    """Function that says whether the words of an answer are in a text, in a row."""
    # No word has a blank in it.
    joined = f" {' '.join(words(text))} "
    return lambda answer: f" {' '.join(words(answer))} " in joined


def _pattern_finder(text: str) -> Callable[[str], bool]:
    normalized = unicodedata.normalize("NFD", text)
    return lambda answer: bool(
        re.search(unicodedata.normalize("NFD", answer), normalized, flags=FLAGS)
    )
