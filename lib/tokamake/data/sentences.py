"""Texts to sentences, for data whose sequences are sentences (BERT, T5, ICT).

Boundaries are those of the sentencex package (Wikimedia), which has rules and abbreviations of many
languages inside; white space around a sentence belongs to none.
"""

import numpy as np
import numpy.typing as npt


def split(texts: list[str], language: str) -> tuple[list[str], npt.NDArray[np.int64]]:
    """Split texts into sentences.

    Args:
        texts: documents.
        language: ISO 639 code; a language that sentencex has no rules for takes those of the
            nearest one that it has, at last English.

    Returns:
        Sentences of all texts, one after the other, and (texts,) how many each text has.
    """
    import sentencex

    sentences: list[str] = []
    counts = np.empty(len(texts), np.int64)
    for index, text in enumerate(texts):
        before = len(sentences)
        for part in sentencex.segment(language, text):
            if sentence := part.strip():
                sentences.append(sentence)
        counts[index] = len(sentences) - before
    return sentences, counts
