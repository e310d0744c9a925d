"""Filter `fix_text`: repair mojibake and other damage of characters, with ftfy.

The defaults are from datatrove 0.10.1 (pipeline/formatters/ftfy.py) for corpora of the web:
damage is repaired, but quotes, ligatures, widths and line breaks stay as people wrote them, and no
normalization is applied. A normalization such as NFC belongs to the tokenizer, which knows what it
needs.
"""

import re
from typing import Any, Literal
from unicodedata import is_normalized

from pydantic import PrivateAttr

from tokamake.data.filters import Document, DocumentFilter


class Filter(DocumentFilter):
    """Repair texts that were decoded by a wrong encoding, and other damage of characters."""

    packages = ("ftfy",)

    unescape_html: Literal["auto"] | bool = "auto"
    """Replace HTML entities such as &amp;; auto: until a < shows that the text is HTML."""
    remove_terminal_escapes: bool = True
    """Remove ANSI escape sequences, such as colours of a terminal."""
    fix_encoding: bool = True
    """Repair mojibake: text that was decoded by a wrong encoding. The next four are parts of it."""
    restore_byte_a0: bool = True
    """Take a space for a no-break space where that makes mojibake readable."""
    replace_lossy_sequences: bool = True
    """Replace mojibake that has lost characters by U+FFFD."""
    decode_inconsistent_utf8: bool = True
    """Repair mojibake also in a part of a line."""
    fix_c1_controls: bool = True
    """Replace C1 control characters by characters of Windows-1252, as browsers do."""
    fix_latin_ligatures: bool = False
    """Replace ligatures such as ﬁ by letters."""
    fix_character_width: bool = False
    """Replace full-width letters and half-width katakana; harms Chinese and Japanese."""
    uncurl_quotes: bool = False
    """Replace curly quotes by straight ones."""
    fix_line_breaks: bool = False
    """Replace \\r\\n, \\r, U+2028, U+2029 and U+0085 by a line feed."""
    fix_surrogates: bool = True
    """Replace surrogate pairs by their character."""
    remove_control_chars: bool = True
    """Remove control characters that do not belong to text, such as U+0000 or U+FEFF."""
    normalization: Literal["NFC", "NFD", "NFKC", "NFKD"] | None = None
    """Unicode normalization; null: none."""
    _ftfy: Any = PrivateAttr(default=None)
    _config: Any = PrivateAttr(default=None)
    _suspicious: re.Pattern[str] = PrivateAttr(default=re.compile(""))

    def setup(self) -> None:
        """Load ftfy."""
        import ftfy

        self._ftfy = ftfy
        # Without an explanation, ftfy 6.3.1 ignores the options of fix_encoding.
        self._config = ftfy.TextFixerConfig(**self.model_dump(), explain=True)
        self._suspicious = _suspicious_characters(ftfy.badness.BADNESS_RE.pattern)

    def apply(self, document: Document) -> None:
        """Repair a document, unless ftfy cannot change it: it reads 1 MB/s."""
        if self._can_change(document.text):
            document.text = self._ftfy.fix_text(document.text, config=self._config)

    def _can_change(self, text: str) -> bool:
        """Whether ftfy may change a text."""
        if "&" in text and self.unescape_html and _ENTITY.search(text):
            return True
        if _DAMAGE.search(text) or (self.fix_line_breaks and "\r" in text):
            return True
        if text.isascii():
            return False
        if self.fix_latin_ligatures or self.fix_character_width or self.uncurl_quotes:
            return True
        if self.fix_line_breaks or (
            self.normalization and not is_normalized(self.normalization, text)
        ):
            return True
        return self.fix_encoding and self._has_mojibake(text)

    def _has_mojibake(self, text: str) -> bool:
        """Whether ftfy finds mojibake in a text: it looks around suspicious characters only."""
        is_bad = self._ftfy.badness.is_bad
        return any(
            is_bad(text[max(0, match.start() - _CONTEXT) : match.end() + _CONTEXT])
            for match in self._suspicious.finditer(text)
        )


_ENTITY = re.compile("&#?[0-9A-Za-z]{1,24};")
_CONTEXT = 7
"""Characters of the longest mojibake that ftfy looks for."""
# Control characters, surrogates, and characters that are mojibake at the beginning of a line or
# beside ASCII characters: ftfy decides.
_DAMAGE = re.compile(
    "[\x00-\x08\x0b\x0e-\x1f\x7f-\x9f\u206a-\u206f\ud800-\udfff\ufeff\ufff9-\ufffcŒœÂÃ]"
    "(?:(?<![ŒœÂÃ])|(?<=[Œœ])(?![A-Za-z])|(?<=[ÂÃ]) )"
)


def _suspicious_characters(mojibake: str) -> re.Pattern[str]:
    """Expression for characters of mojibake next to another one that is not ASCII.

    All mojibake has such a character, or one of `_DAMAGE`: lower-case letters alone are none.

    Args:
        mojibake: ftfy's expression for mojibake.
    """
    ranges = re.findall("([^\x00-\x7f])-([^\x00-\x7f])", mojibake)
    single = set(re.findall("[^\x00-\x7f]", mojibake))
    within = {chr(code) for first, last in ranges for code in range(ord(first), ord(last) + 1)}
    characters = [c for c in sorted(single | within) if c in _LOWER_SIGNS or not c.islower()]
    return re.compile(f"[{''.join(characters)}](?:(?=[^\x00-\x7f])|(?<=[^\x00-\x7f]{{2}}))")


_LOWER_SIGNS = "ªºµƒ"
"""Signs that Unicode calls lower-case letters."""
