"""Plain text of wikitext, MediaWiki's markup (https://www.mediawiki.org/wiki/Help:Formatting).

The passes follow MediaWiki's parser: tags and comments, templates, tables, links, lines. lib/csrc
matches marks and cleans lines; expressions for the rest do not backtrack. So the time is linear in
the length of the text, whatever is unbalanced in it. Expressions begin with the characters of one
mark: `re` searches for them ten times faster than for one of several marks, a repeated character,
or a look-behind.

What stays: prose, headings of sections that have text, list items, labels of links, code, TeX
source of formulas, and the text of a few templates. References, tables, files, categories and all
other templates go.
"""

import html
import re
from functools import lru_cache

from tokamake import _csrc
from tokamake.data.readers._wikitext_nesting import (
    GAP,
    UNCLOSED,
    without_elements,
    without_templates,
)

DROPPED_NAMESPACES = frozenset(
    {
        *("file", "image", "category"),
        # Older names of files in large Wikipedias, which siteinfo does not list.
        *("bild", "afbeelding", "archivo", "imagen", "imagem", "immagine", "fichier", "plik"),
        *("grafika", "obraz", "resim", "dosya", "файл", "изображение", "категория"),
        *("画像", "图像", "图片", "분류", "ملف", "تصنيف"),
    }
)
"""Namespaces whose links are not part of the text, in lower case."""

_LANGUAGE = re.compile(r"[a-z]{2,3}(?:-[a-z]+)*+$")
_NOT_LANGUAGES = frozenset({"doi", "hdl", "rfc", "mw"})
"""Prefixes of links to other sites that look like languages."""
_EXTERNAL_LINK = re.compile(
    r"\[(?:[a-z][a-z0-9+.-]{1,20}+:)?+(?://|(?<=mailto:)|(?<=news:)|(?<=tel:))"
    r'[^\s\[\]<>"]*+[ \t]*+([^\[\]\n]*+)\]',
    re.IGNORECASE,
)
_QUOTES = re.compile("''(?:'''|'|)(?!')")
"""Marks of bold and italic text. Of longer runs, the first apostrophes are text."""
_MAGIC_WORD = re.compile(r"__(\w{2,40}?)__")
_ENTITY = re.compile(r"&#?\w{1,40};")
_VARIANT = re.compile(r"-\{([^{}]*+)\}-")
_PLACEHOLDER = re.compile("\x01([0-9]+)\x02")
_USUAL_GAP = re.compile(f"{GAP}(?<=[^ (,;{GAP}]{GAP})(?= [^ )]|\n)")
"""A gap between a word and a space, which leaves nothing to clean."""
_GAPS = re.compile(f"{GAP}{GAP}*+")
_UNCLOSED_NAME = re.compile(rf"^[ \t]*+{UNCLOSED}[^|\n]*+(?=\n?[ \t]*+\|)", re.MULTILINE)
"""Braces without an end, and the name of a template, which has parameters."""


def plain_text(wikitext: str, dropped: frozenset[str] = DROPPED_NAMESPACES) -> str:
    """Return the plain text of a page.

    `wikitext` has no control characters, as is true of any XML. `dropped` names the namespaces of
    files and categories, in lower case.
    """
    literals: list[str] = []
    text = without_elements(wikitext, literals)
    if "{{" in text or "}}" in text:
        text = without_templates(text)
    if UNCLOSED in text:
        text = _UNCLOSED_NAME.sub("", text).replace(UNCLOSED, "")
    if "{|" in text:
        text = _csrc.without_tables(text)
    if "-{" in text:
        text = _VARIANT.sub(_first_variant, text)
    if "[[" in text or "]]" in text:
        text = _csrc.without_links(text, lambda namespace: _is_dropped(namespace, dropped))
    text = _EXTERNAL_LINK.sub(_label, text)
    text = _QUOTES.sub("", text)
    if "__" in text:
        text = _MAGIC_WORD.sub(_magic_word, text)
    if GAP in text:
        text = _close_gaps(text)
    text = _csrc.clean_lines(text, _has_word)
    if "&" in text:
        text = _ENTITY.sub(_character, text)
    text = text.replace("\xa0", " ")
    if literals:
        text = _PLACEHOLDER.sub(lambda match: literals[int(match[1])], text)
    return text


@lru_cache(1024)
def _is_dropped(namespace: str, dropped: frozenset[str]) -> bool:
    """Whether a link is a file, a category, or a link to the page in another language."""
    namespace = namespace.strip()
    if not namespace:  # [[:Category:A]] is a link in the text
        return False
    is_language = _LANGUAGE.match(namespace) and namespace not in _NOT_LANGUAGES
    return bool(is_language) or namespace.lower().replace("_", " ") in dropped


def _label(match: re.Match[str]) -> str:
    return match[1].strip() or GAP


def _magic_word(match: re.Match[str]) -> str:
    return "" if match[1].isupper() else match[0]


def _character(match: re.Match[str]) -> str:
    return html.unescape(match[0])


def _first_variant(match: re.Match[str]) -> str:
    """Text of -{zh-hans:a;zh-hant:b}-, which Wikipedias with several scripts have."""
    variant = match[1].rpartition("|")[2].partition(";")[0]
    return variant.rpartition(":")[2].strip()


def _close_gaps(text: str) -> str:
    """Remove the marks of what went, and the brackets and spaces that it leaves empty."""
    first, *rest = _GAPS.split(_USUAL_GAP.sub("", text))
    out = [first]
    for part in rest:
        # What stands before the gap: the last piece that is not empty.
        while len(out) > 1 and not out[-1]:
            out.pop()
        before, after = out[-1], part
        trimmed, following = before.rstrip(" ,;"), after.lstrip(" ,;")
        if trimmed.endswith("("):
            if following.startswith(")"):
                before, after = trimmed[:-1].rstrip(" "), following[1:]
            else:
                before, after = trimmed, following
        elif following.startswith(")"):
            before, after = trimmed, following
        elif after.startswith((".", ",", ";", ":")):
            before = trimmed
        elif after.startswith(" ") and before.endswith(" "):
            before = before[:-1]
        out[-1] = before
        out.append(after)
    return "".join(out)


def _has_word(item: str) -> bool:
    return any(map(str.isalnum, item))
