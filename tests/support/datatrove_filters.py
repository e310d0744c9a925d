"""Decisions of datatrove's filters, with its own words or with ours."""

import contextlib
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any
from unittest.mock import patch

from tokamake.data.filters._characters import statistics

REASONS = {
    "lorem_ipsum": "lorem ipsum",
    "curly_bracket": "curly bracket",
    "too_few_sentences": "too few sentences",
    "< 3 paragraphs": "too few paragraphs",
    "gopher_short_doc": "too few words",
    "gopher_long_doc": "too many words",
    "gopher_below_avg_threshold": "short words",
    "gopher_above_avg_threshold": "long words",
    "gopher_too_many_hashes": "hashes",
    "gopher_too_many_ellipsis": "ellipses",
    "gopher_too_many_bullets": "bullet lines",
    "gopher_too_many_end_ellipsis": "ellipsis lines",
    "gopher_below_alpha_threshold": "no letters",
    "gopher_enough_stop_words": "too few stop words",
    "dup_para_frac": "duplicate paragraphs",
    "dup_para_char_frac": "duplicate paragraph characters",
    "dup_line_frac": "duplicate lines",
    "dup_line_char_frac": "duplicate line characters",
    **{f"top_{n}_gram": f"top {n} gram" for n in (2, 3, 4)},
    **{f"duplicated_{n}_n_grams": f"duplicate {n} grams" for n in range(5, 11)},
    "line_punct_ratio": "lines without end mark",
    "short_line_ratio": "short lines",
    "char_dup_ratio": "duplicate lines",
    "list_ratio": "line feeds",
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
