"""Trace the tokens of a rearranged sample back to their positions in the plain sample."""

from collections.abc import Callable
from itertools import accumulate

import numpy as np

from tokamake.data.samples.fim.transform import FimSegment, Rearranger, Tokens

NOWHERE = -1
"""Origin of tokens that come from no plain token."""

_ArrayPair = tuple[Tokens, Tokens]


def origins(parts: list[FimSegment], rearranger: Rearranger) -> Tokens:
    """Return (tokens,) positions in the plain sample of the tokens of all parts, in order.

    - A kept token comes from its own position.
    - An encoded token comes from the plain token that holds the beginning of its first character.
      Several tokens can come from one, if a cut or another encoding splits its text. A token that
      joins several plain tokens comes from the first.
    - If a character has several tokens, the second comes from the second plain token that holds a
      part of it, and so on. If there are fewer plain tokens, the last one counts.
    - A special token of the rearrangement has the origin `NOWHERE`.

    If the tokenizer changes a text when it encodes it again, positions after the change are wrong
    by the number of added or removed characters.
    """
    arrays = [np.zeros(0, np.int64)]
    unit_tokens: dict[int, _ArrayPair] = {}  # by start: several parts share a fragment
    for part in parts:
        if part.start is None:
            arrays.append(np.full(len(part.tokens), NOWHERE))
        elif part.original is None:
            arrays.append(part.start + np.arange(len(part.tokens)))
        else:
            if part.start not in unit_tokens:
                unit_tokens[part.start] = _tokens_of_units(part.original, rearranger)
            first, last = unit_tokens[part.start]
            unit, nth = _units_of_tokens(part, rearranger.decode)
            unit += part.unit
            arrays.append(part.start + np.minimum(first[unit] + nth, last[unit]))
    return np.concatenate(arrays)


def _tokens_of_units(fragment: Tokens, rearranger: Rearranger) -> _ArrayPair:
    """(units,) the first and the last token of a fragment that hold a part of each unit."""
    firsts, lasts = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    start = 0
    for ids, text in rearranger.split_texts(fragment):
        first = last = np.arange(len(ids))
        if text:
            completed, begun = _count_characters(ids, rearranger.decode)
            units = np.arange(len(text))
            first, last = _first_beyond(begun, units), _first_beyond(completed, units)
        firsts.append(start + first)
        lasts.append(start + last)
        start += len(ids)
    return np.concatenate(firsts), np.concatenate(lasts)


def _units_of_tokens(part: FimSegment, decode: Callable[[list[int]], str]) -> _ArrayPair:
    """(tokens,) the unit in which each token of a part begins, and its rank among the unit's
    tokens."""
    numbers = np.arange(len(part.tokens))
    if not part.text:
        return numbers, np.zeros_like(numbers)
    completed, begun = _count_characters(part.tokens.tolist(), decode)
    unit = np.minimum(np.append(0, completed[:-1]), len(part.text) - 1)
    return unit, np.maximum(numbers - _first_beyond(begun, unit), 0)


def _first_beyond(counts: Tokens, units: Tokens) -> Tokens:
    return np.searchsorted(counts, units, side="right")


def _count_characters(ids: list[int], decode: Callable[[list[int]], str]) -> _ArrayPair:
    """(tokens,) number of characters that are completed, and begun, up to and with each token.

    If a token ends inside a character, the tokens up to it decode to the characters of the text
    and then to other characters. Decoding starts at the last boundary of both a token and a
    character.
    """
    text = decode(ids)
    completed, begun = [], []
    start = done = 0  # token and character of that boundary
    for end in range(1, len(ids) + 1):
        decoded = decode(ids[start:end])
        expected = text[done : done + len(decoded)]
        pairs = enumerate(zip(decoded, expected, strict=False))
        same = next((place for place, (a, b) in pairs if a != b), len(expected))
        # An incomplete character decodes to U+FFFD, which the text itself may have here.
        if decoded[:same].endswith("\ufffd") and decode(ids[end:]) != text[done + same :]:
            same -= 1
        completed.append(done + same)
        begun.append(done + min(same + 1, len(decoded)))
        if same == len(decoded):
            start, done = end, done + same
    return np.array(completed, np.int64), np.array(list(accumulate(begun, max)), np.int64)
