"""Classes of characters by which filters of a text's quality split it into words and sentences.

The classes are fixed: no verdict depends on the Unicode version of Python. Letters are defined in
`tokenizers._byte_level`. `docs/reference/quality-filters.md` has the rules of words, and
`lib/csrc/word_splitting.hpp` implements them.
"""

from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tokamake.data.tokenizers._byte_level import character_classes
from tokamake.data.tokenizers._unicode_differences import parse_ranges

if TYPE_CHECKING:
    from tokamake._csrc import TextStatistics

_LETTER = 4
_LETTER_CLASS = 1


def character_flags() -> NDArray[np.uint8]:
    """(0x110000,) flags of each code point, as in lib/csrc/word_splitting.hpp."""
    flags = np.where(character_classes() == _LETTER_CLASS, _LETTER, 0).astype(np.uint8)
    for text, flag in RANGES:
        for span in parse_ranges(text):
            flags[span] |= flag
    return flags


@cache
def statistics() -> "TextStatistics":
    """Return the statistics with their table, which a process needs once."""
    from tokamake._csrc import TextStatistics  # compiled code, which a dry run does without

    return TextStatistics(character_flags())


SPACE = "9-D 1C-20 85 A0 1680 2000-200A 2028-2029 202F 205F 3000"
"""White space of Python's str.split."""
LINE_BREAK = "A-D 1C-1E 85 2028-2029"
"""Ends of lines of Python's str.splitlines."""
PUNCTUATION = """
0-8 B-1F 22-2D 2F 3A-3E 40 5B-60 7B-9F AB B4 BB 2013-2014 2019 201C-201E 2026 2236 2501 25BA 3001
3008-300D 3010-3011 FF05 FF08-FF09 FF0C FF11 FF1A-FF1B FF5E
"""
"""With SENTENCE_END, PUNCTUATION_SET of datatrove 0.10.1 (utils/text.py)."""
SENTENCE_END = """
21 2E 3F 589 61D-61F 6D4 700-702 7F9 837 839 83D-83E 964-965 104A-104B 1362 1367-1368 166E 1735-1736
17D4-17D6 17D9-17DA 1803 1809 1944-1945 1AA8-1AAB 1B5A-1B5B 1B5E-1B5F 1B7D-1B7E 1C3B-1C3C 1C7E-1C7F
203C-203D 2047-2049 2E2E 2E3C 2E53-2E54 3002 A4FF A60E-A60F A6F3 A6F7 A876-A877 A8CE-A8CF A92F
A9C8-A9C9 AA5D-AA5F AAF0-AAF1 ABEB FE52 FE56-FE57 FF01 FF0E FF1F FF61 10A56-10A57 10F55-10F59
10F86-10F89 11047-11048 110BE-110C1 11141-11143 111C5-111C6 111CD 111DE-111DF 11238-11239
1123B-1123C 112A9 1144B-1144C 115C2-115C3 115C9-115D7 11641-11642 1173C-1173E 11944 11946
11A42-11A43 11A9B-11A9C 11C41-11C42 11EF7-11EF8 11F43-11F44 16A6E-16A6F 16AF5 16B37-16B38 16B44
16E98 1BC9F 1DA88
"""
"""Unicode's property Sentence_Terminal, as TERMINAL_PUNCTUATION of datatrove 0.10.1."""
MARK = """
21-23 26-2A 2C 3A-3C 3E-3F 5B 5D 5F-60 7B 7D A1 AB B4 B7 BB BF 60C 61B 61F 66A 6D4 964 2013-2014
2018-201A 201C-201E 2026 2329-232A 27E6-27E7 3001-3002 3008-3011 3014-3015 FF01
FF08-FF09 FF0C FF1A-FF1B FF1F FF5E
"""
"""Punctuation and quotes that spaCy 3.8 cuts from both ends of words."""
SIGN = "24-25 3D A3 A5 A7 E3F 20A0-20BF FDFC"
"""$ % = § and currencies: cut from the start of words, and from the end after a digit."""
SYMBOL = "A6 A9 AE B0 2026 2300-2328 232B-27BF 2800-28FF 2B00-2BFF FFFC-FFFD 1F000-1FAFF"
"""Ellipsis, ©, ®, °, boxes, dingbats and emoji: words of their own everywhere."""

RANGES = (
    (SPACE, 1),
    (LINE_BREAK, 2),
    (PUNCTUATION, 8),
    (SENTENCE_END, 8 | 16),
    (MARK, 32),
    (SYMBOL, 32 | 64),
    (SIGN, 32 | 128),
)
"""Hexadecimal ranges of code points, first-last, and their flags."""
