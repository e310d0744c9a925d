"""Words of a text, by the rule of DPR's SimpleTokenizer (dpr/utils/tokenizers.py)."""

import re
import sys
import unicodedata
from collections.abc import Callable
from functools import cache
from itertools import groupby


def words(text: str) -> list[str]:
    """Split a text into runs of letters, digits and marks, and single symbols; all in lower case.

    The text is decomposed first (NFD), so that a letter and its accent are two characters.
    """
    return [word.lower() for word in _pattern().findall(unicodedata.normalize("NFD", text))]


def is_run(word: str) -> bool:
    """Whether a word is a run of letters, digits and marks, and no symbol."""
    return unicodedata.category(word[0])[0] in "LNM"


@cache
def _pattern() -> re.Pattern[str]:
    letters = _character_class(lambda kind: kind in "LNM")
    blanks = _character_class(lambda kind: kind in "ZC")
    return re.compile(f"[{letters}]+|[^{blanks}]")


def _character_class(is_member: Callable[[str], bool]) -> str:
    """Ranges of characters whose major category `is_member`; `re` has no such classes."""
    codes = range(sys.maxunicode + 1)
    ranges = []
    for member, group in groupby(codes, lambda code: is_member(unicodedata.category(chr(code))[0])):
        if member:
            first, *rest = group
            ranges.append(f"\\U{first:08x}-\\U{rest[-1] if rest else first:08x}")
    return "".join(ranges)
