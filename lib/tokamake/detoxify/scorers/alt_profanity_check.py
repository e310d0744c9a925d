"""Scorer `alt_profanity_check`: a small linear model for English, by sentence.

The model dilutes: an insult alone scores 1.0, after five plain sentences 0.05. So the score of a
text is the maximum of its sentences.
"""

import re
from collections.abc import Sequence
from itertools import accumulate

from tokamake.detoxify.scorers import TextScorer

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|\n+")


class ToxicityScorer(TextScorer):
    """The maximum of the scores that the package alt-profanity-check gives to the sentences."""

    packages = ("profanity_check",)

    def score(self, texts: Sequence[str]) -> list[float | None]:
        """Maximum over the sentences of each text."""
        from profanity_check import predict_prob

        sentences = [
            [part for part in _SENTENCE_END.split(text) if part.strip()] or [text] for text in texts
        ]
        scores = predict_prob([part for parts in sentences for part in parts])
        ends = list(accumulate(map(len, sentences), initial=0))
        return [float(max(scores[ends[i] : ends[i + 1]])) for i in range(len(texts))]
