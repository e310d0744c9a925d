"""Decisions of datatrove's filters, with its own words or with ours."""

import contextlib
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any
from unittest.mock import patch

from tokamake.data.filters._characters import statistics

_SHARES = {"top": (0.2, 0.18, 0.16), "duplicate": (0.15, 0.14, 0.13, 0.12, 0.11, 0.1)}
"""Default limits of gopher_repetition: from 2 words for the top, from 5 for duplicates."""
REASONS = {
    "lorem_ipsum": 'number of "lorem ipsum" above 0',
    "curly_bracket": "number of { above 0",
    "too_few_sentences": "number of sentences below 5",
    "< 3 paragraphs": "number of lines of 200 characters or more below 3",
    "gopher_short_doc": "number of words below 50",
    "gopher_long_doc": "number of words above 100,000",
    "gopher_below_avg_threshold": "mean word length below 3",
    "gopher_above_avg_threshold": "mean word length above 10",
    "gopher_too_many_hashes": "# per word above 0.1",
    "gopher_too_many_ellipsis": "ellipses per word above 0.1",
    "gopher_too_many_bullets": "share of lines with a bullet above 0.9",
    "gopher_too_many_end_ellipsis": "share of lines that end in an ellipsis above 0.3",
    "gopher_below_alpha_threshold": "share of words with a letter below 0.8",
    "gopher_enough_stop_words": "number of stop words below 2",
    "dup_para_frac": "share of duplicate paragraphs above 0.3",
    "dup_para_char_frac": "share of characters in duplicate paragraphs above 0.2",
    "dup_line_frac": "share of duplicate lines above 0.3",
    "dup_line_char_frac": "share of characters in duplicate lines above 0.2",
    **{
        f"top_{n}_gram": f"share of characters in the most frequent {n}-gram above {limit:g}"
        for n, limit in enumerate(_SHARES["top"], start=2)
    },
    **{
        f"duplicated_{n}_n_grams": f"share of characters in duplicate {n}-grams above {limit:g}"
        for n, limit in enumerate(_SHARES["duplicate"], start=5)
    },
    "line_punct_ratio": "share of lines with an end mark below 0.12",
    "short_line_ratio": "share of short lines above 0.67",
    "char_dup_ratio": "share of characters in duplicate lines above 0.01",
    "list_ratio": "line feeds per word above 0.3",
    "empty": "empty",
}
"""Our reason for each reason of datatrove."""

CLASSES = {
    "c4": ("c4_filters", "C4QualityFilter"),
    "gopher_quality": ("gopher_quality_filter", "GopherQualityFilter"),
    "gopher_repetition": ("gopher_repetition_filter", "GopherRepetitionFilter"),
    "fineweb": ("fineweb_quality_filter", "FineWebQualityFilter"),
}
"""Module and class of datatrove for each filter."""


def filter_of(name: str, **options: Any) -> Callable[[str], tuple[str | None, str]]:
    """A filter of datatrove: text → our reason of the drop or None, and the text that is left."""
    module, cls = CLASSES[name]
    loaded = getattr(import_module(f"datatrove.pipeline.filters.{module}"), cls)(**options)
    document = import_module("datatrove.data").Document

    def decide(text: str) -> tuple[str | None, str]:
        given = document(text=text, id="")
        verdict = loaded.filter(given)
        return (REASONS[verdict[1]], text) if isinstance(verdict, tuple) else (None, given.text)

    return decide


@contextlib.contextmanager
def our_words() -> Iterator[None]:
    """Let datatrove's filters split words and sentences as ours do."""
    with contextlib.ExitStack() as stack:
        for module, _ in CLASSES.values():
            loaded = import_module(f"datatrove.pipeline.filters.{module}")
            for function, ours in (
                ("split_into_words", lambda text, _: statistics().split_words(text)),
                ("split_into_sentences", lambda line, _: [""] * statistics().sentences(line)),
            ):
                if hasattr(loaded, function):
                    stack.enter_context(patch.object(loaded, function, ours))
        yield
