"""Samples of the documents that filters kept, changed or dropped, as HTML."""

import difflib
import re
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from tokamake.report import html_pages

_PIECES = re.compile(r"\w+|.", re.DOTALL)
"""Units of a change: words, and other characters one by one."""


def samples(name: str, chosen: Iterable[Mapping[str, Any]]) -> str:
    """Samples of a filter, folded under its name; empty if there are none."""
    listed = [_sample(sample) for sample in in_order(chosen)]
    return html_pages.folded(name, "\n".join(listed)) if listed else ""


def described(sample: Mapping[str, Any]) -> str:
    """Verdict of a sample with its reason and number: "dropped: too few words, 34"."""
    verdict = ": ".join(filter(None, [sample["verdict"], sample.get("reason")]))
    return verdict if (value := sample.get("value")) is None else f"{verdict}, {value:,.6g}"


def changes(before: str, after: str) -> list[tuple[str, str]]:
    """Split two texts into pieces: "" and a text of both, "-" of the first, "+" of the second."""
    first, second = _PIECES.findall(before), _PIECES.findall(after)
    pieces = []
    matcher = difflib.SequenceMatcher(None, first, second, autojunk=False)
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        if tag == "equal":
            pieces.append(("", "".join(first[i1:i2])))
            continue
        removed, added = "".join(first[i1:i2]), "".join(second[j1:j2])
        pieces += [piece for piece in (("-", removed), ("+", added)) if piece[1]]
    return _without_cut(pieces)


def _without_cut(pieces: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Leave out a difference at the end of two cut texts: the cuts are at different places."""
    first = len(pieces) - 1
    while first > 0 and pieces[first - 1][0]:
        first -= 1
    is_change = any(kind for kind, _ in pieces[:first])
    return [*pieces[:first], pieces[-1]] if is_change and pieces[-1] == ("", "…") else pieces


def in_order(chosen: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Dropped documents first, then changed ones."""
    places = {"dropped": 0, "changed": 1, "kept": 2}
    return sorted(chosen, key=lambda sample: (places[sample["verdict"]], sample.get("reason", "")))


def _sample(sample: Mapping[str, Any]) -> str:
    text = escape(sample["text"])
    if "after" in sample:
        tags = {"": "{}", "-": "<del>{}</del>", "+": "<ins>{}</ins>"}
        pieces = changes(sample["text"], sample["after"])
        text = "".join(tags[kind].format(escape(piece)) for kind, piece in pieces)
    note = f"{described(sample)} · {sample['place']}"
    return f'<div class="sample">{text}<p class="note">{escape(note)}</p></div>'
