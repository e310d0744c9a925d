"""Words of a text, as near-duplicates and decontamination compare them.

Words are runs of letters, marks and digits in lower case; other characters separate them. Letters
of scripts without spaces are words of their own.
"""

import unicodedata
from functools import cache

import numpy as np
import numpy.typing as npt

_ALONE = np.uint32(1 << 31)
_TABLE_SIZE = 0x20000
"""Code points after the first two planes are ideographs, words of their own."""
# Unicode blocks of scripts that separate words rarely by spaces: Thai and Lao, Myanmar, Khmer,
# Hiragana and Katakana, ideographs.
_WITHOUT_SPACES = (
    *((0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x3040, 0x30FF)),
    *((0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xF900, 0xFAFF)),
)


@cache
def word_characters() -> npt.NDArray[np.uint32]:
    """(0x20000,) lower-case code point of each character of a word, 0 for separators."""
    # The same version of Unicode in each version of Python, so that keys stay the same.
    category = unicodedata.ucd_3_2_0.category
    table = np.zeros(_TABLE_SIZE, np.uint32)
    for code_point in range(_TABLE_SIZE):
        character = chr(code_point)
        kind = category(character)
        if kind == "Cn":  # a letter of a later version of Unicode, perhaps
            table[code_point] = code_point | _ALONE
        elif kind[0] in "LMN":
            lower = character.lower()
            table[code_point] = ord(lower) if len(lower) == 1 else code_point
    for first, last in _WITHOUT_SPACES:
        block = table[first : last + 1]
        block[block > 0] |= _ALONE
    return table
