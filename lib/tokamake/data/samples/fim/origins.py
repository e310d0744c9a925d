"""From parts of a rearranged sample back to the places of the plain sample that they come from.

`fim_documents` makes the parts; `fim` hands the places to `trace-sample`.
"""

from collections.abc import Callable
from itertools import accumulate

import numpy as np

from tokamake.data.samples.fim.documents import Fragment, Rearranger, Tokens

NOWHERE = -1
"""Origin of tokens that come from no plain token."""

_Span = tuple[Tokens, Tokens]


def origins(parts: list[Fragment], rearranger: Rearranger) -> Tokens:
    """(tokens,) places in the plain sample that the tokens of parts come from, in their order.

    A token that stayed comes from where it stood. One that was made of cut text comes from the
    first plain token whose text it overlaps, told by characters: the character that it begins at,
    or within, is looked up, and then the plain token in which this character begins. So several
    tokens can come from one, where a cut or another way to encode parts its text; and of several
    that became one the first is told. Where a character has several tokens, the second of them
    comes from the second plain one that holds a bit of it, and so on, or from the last there is.

    Where a tokenizer changes a text that it encodes again, places behind the change are off by as
    many characters as it adds or takes away. `NOWHERE`: special tokens that mark the parts.
    """
    found = [np.zeros(0, np.int64)]
    places: dict[int, _Span] = {}
    for part in parts:
        if part.start is None:
            found.append(np.full(len(part.tokens), NOWHERE))
        elif part.fragment is None:
            found.append(part.start + np.arange(len(part.tokens)))
        else:
            if part.start not in places:
                places[part.start] = _tokens_of_units(part.fragment, rearranger)
            first, last = places[part.start]
            unit, nth = _units_of_tokens(part, rearranger.decode)
            unit += part.unit
            found.append(part.start + np.minimum(first[unit] + nth, last[unit]))
    return np.concatenate(found)


def _tokens_of_units(fragment: Tokens, rearranger: Rearranger) -> _Span:
    """(units,) the first and the last token of a fragment that hold a bit of each of its units."""
    found = [(np.zeros(0, np.int64), np.zeros(0, np.int64))]
    at = 0
    for ids, text in rearranger.stretches(fragment):
        first = last = np.arange(len(ids))
        if text:
            whole, begun = _progress(ids, rearranger.decode)
            first, last = (_first_beyond(ends, np.arange(len(text))) for ends in (begun, whole))
        found.append((at + first, at + last))
        at += len(ids)
    firsts, lasts = zip(*found, strict=True)
    return np.concatenate(firsts), np.concatenate(lasts)


def _units_of_tokens(part: Fragment, decode: Callable[[list[int]], str]) -> _Span:
    """(tokens,) the unit of a part that each token begins in, and which of its tokens it is."""
    numbers = np.arange(len(part.tokens))
    if not part.text:
        return numbers, np.zeros_like(numbers)
    whole, begun = _progress(part.tokens.tolist(), decode)
    unit = np.minimum(np.append(0, whole[:-1]), len(part.text) - 1)
    return unit, np.maximum(numbers - _first_beyond(begun, unit), 0)


def _first_beyond(ends: Tokens, units: Tokens) -> Tokens:
    return np.searchsorted(ends, units, side="right")


def _progress(ids: list[int], decode: Callable[[list[int]], str]) -> _Span:
    """(tokens,) characters of the text of tokens that end, and that begin, in those up to each.

    Where a token ends within a character, tokens up to it decode to the text's characters and then
    to others. Tokens are decoded from the last one on that ends where a character does.
    """
    text = decode(ids)
    whole, begun = [], []
    start = done = 0
    for end in range(1, len(ids) + 1):
        part = decode(ids[start:end])
        rest = text[done : done + len(part)]
        pairs = enumerate(zip(part, rest, strict=False))
        same = next((at for at, (one, other) in pairs if one != other), len(rest))
        # What a bit of a character decodes to may be the text's next character, too.
        if part[:same].endswith("\ufffd") and decode(ids[end:]) != text[done + same :]:
            same -= 1
        whole.append(done + same)
        begun.append(done + min(same + 1, len(part)))
        if same == len(part):
            start, done = end, done + same
    return np.array(whole, np.int64), np.array(list(accumulate(begun, max)), np.int64)
