"""Plain text of wikitext, MediaWiki's markup (https://www.mediawiki.org/wiki/Help:Formatting).

The passes follow MediaWiki's parser: tags and comments, templates, tables, links, lines. Each scans
the text once with expressions that do not backtrack, and nested markup is kept on a stack. So the
time is linear in the length of the text, whatever is unbalanced in it. Expressions begin with the
characters of one mark: `re` searches for them ten times faster than for one of several marks, a
repeated character, or a look-behind.

What stays: prose, headings of sections that have text, list items, labels of links, code, TeX
source of formulas, and the text of a few templates. References, tables, files, categories and all
other templates go.
"""

import html
import re
from collections.abc import Callable, Collection

from tokamake.data.readers._wikitext_nesting import (
    GAP,
    UNCLOSED,
    spans,
    without_elements,
    without_tables,
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

_USUAL_LINK = re.compile(r"\[\[(?:[^\[\]|\n:]++\|)?+((?<=\|)[^\[\]\n]++|(?<!\|)[^\[\]|\n:]++)\]\]")
"""A link without a colon that encloses no other link; its text is the group."""
_BRACKETS = re.compile(r"\[\[\[*+"), re.compile(r"\]\]\]*+")
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
_SPACES = re.compile(r"[ \t]{2,}+")
_PLACEHOLDER = re.compile("\x01([0-9]+)\x02")
_USUAL_GAP = re.compile(f"{GAP}(?<=[^ (,;{GAP}]{GAP})(?= [^ )]|\n)")
"""A gap between a word and a space, which leaves nothing to clean."""
_GAPS = re.compile(f"{GAP}{GAP}*+")
_UNCLOSED_LINE = re.compile(f"^[ \t]*+{UNCLOSED}.*+\n?", re.MULTILINE)


def plain_text(wikitext: str, dropped: Collection[str] = DROPPED_NAMESPACES) -> str:
    """Return the plain text of a page.

    `wikitext` has no control characters, as is true of any XML. `dropped` names the namespaces of
    files and categories, in lower case.
    """
    literals: list[str] = []
    text = without_elements(wikitext, literals)
    text = without_templates(text)
    if UNCLOSED in text:
        text = _UNCLOSED_LINE.sub("", text).replace(UNCLOSED, "")
    text = without_tables(text)
    if "-{" in text:
        text = _VARIANT.sub(_first_variant, text)
    if "[[" in text or "]]" in text:
        text = _without_links(text, dropped)
    text = _EXTERNAL_LINK.sub(_label, text)
    text = _QUOTES.sub("", text)
    if "__" in text:
        text = _MAGIC_WORD.sub(_magic_word, text)
    if GAP in text:
        text = _close_gaps(text)
    text = _lines(text)
    if "&" in text:
        text = _ENTITY.sub(_character, text)
    text = text.replace("\xa0", " ")
    if literals:
        text = _PLACEHOLDER.sub(lambda match: literals[int(match[1])], text)
    return text


def _without_links(text: str, dropped: Collection[str]) -> str:
    """Replace [[links]] by their labels; files and categories go, with what they enclose."""
    text = "".join(_USUAL_LINK.split(text))  # faster than the scan below
    out: list[str] = []
    opened: list[int] = []  # index in `out` of the first piece of each open link
    position = 0
    for start, end in spans(text, *_BRACKETS):
        out.append(text[position:start])
        position = end
        pairs, is_odd = divmod(end - start, 2)
        if text[start] == "[":
            opened += [len(out)] * pairs
            out += ["["] * is_odd
        else:
            out += ["]"] * is_odd
            for _ in range(min(pairs, len(opened))):
                _close_link(out, opened.pop(), dropped=dropped)
    out.append(text[position:])
    for first in opened:  # never closed: only its line can be noise
        if _is_dropped(out[first].partition("|")[0], dropped):
            out[first] = "".join(out[first].partition("\n")[1:])
    return "".join(out)


def _close_link(out: list[str], first: int, *, dropped: Collection[str]) -> None:
    """Replace the pieces from `first` on by the label of the link that they form."""
    if first == len(out):
        return
    target, pipe, label = out[first].partition("|")
    if _is_dropped(target, dropped):
        del out[first:]
    elif "[" in target or "\n" in target or not (pipe or len(out) == first + 1):
        return  # no link: a link before its pipe, or brackets of another kind
    elif pipe and (label or len(out) > first + 1):
        out[first] = label
    elif pipe:  # [[Help:Page (topic)|]] shows Page
        out[first] = target.rpartition(":")[2].partition(" (")[0]
    else:
        out[first] = target.strip().removeprefix(":")


def _is_dropped(target: str, dropped: Collection[str]) -> bool:
    """Whether a link is a file, a category, or a link to the page in another language."""
    namespace, colon, _ = target.partition(":")
    namespace = namespace.strip()
    if not colon or not namespace:  # [[:Category:A]] is a link in the text
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


def _lines(text: str) -> str:
    """Clean the lines; drop blank ones at the ends, and headings without text below them."""
    out: list[str] = []
    headings: list[tuple[int, str]] = []  # without text so far: level and title
    for raw_line in text.split("\n"):
        line = raw_line.strip()
        if "  " in line or "\t" in line:
            line = _SPACES.sub(" ", line)
        if line[:1] == "=" and (heading := _heading(line)):
            while headings and headings[-1][0] >= heading[0]:
                headings.pop()
            headings.append(heading)
            continue
        if line[:1] in _LINE_STARTS:
            line = _LINE_STARTS[line[:1]](line)
        if line:
            if headings and out and not out[-1]:
                out.pop()
            for _, title in headings:
                out += ["", title]
            out += [""] * bool(headings)
            headings = []
            out.append(line)
        elif out and out[-1]:
            out.append("")
    return "\n".join(out).strip("\n")


def _heading(line: str) -> tuple[int, str] | None:
    level = min(len(line) - len(line.lstrip("=")), len(line) - len(line.rstrip("=")), 6)
    title = line[level:-level].strip() if level else ""
    return (level, title) if title else None


def _list_item(line: str) -> str:
    """Return an item without its marks; empty if templates have left no more than punctuation."""
    item = line.lstrip("*#:;").lstrip(" ,;").rstrip()
    if not any(map(str.isalnum, item)) and "\x01" not in item:
        return ""
    return f"- {item}" if line[0] in "*#" else item


_LINE_STARTS: dict[str, Callable[[str], str]] = {
    **dict.fromkeys("*#:;", _list_item),
    # What is left of a table or template that is not balanced.
    "|": lambda _: "",
    "-": lambda line: line.lstrip("-").strip() if line.startswith("----") else line,
}
"""Functions that clean a line, by its first character."""
