"""Remove elements such as <ref>, and templates. lib/csrc matches their marks; names are here."""

import html
import re
from functools import cache

from tokamake import _csrc

GAP = "\x04"
"""Stands for a template or reference that went, until spaces and brackets around it are cleaned."""
UNCLOSED = "\x03"
"""Stands for the braces of a template that never ends."""

_DROPPED = {
    *("ref", "references", "gallery", "timeline", "graph", "score", "hiero", "imagemap"),
    *("inputbox", "templatedata", "templatestyles", "categorytree", "indicator", "mapframe"),
    *("maplink", "includeonly", "table", "style", "script", "charinsert", "rss", "phonos"),
}
"""Elements that go with their content."""
_LITERAL = {"nowiki", "pre", "syntaxhighlight", "source", "math", "chem", "ce"}
"""Elements whose content is no wikitext."""
_BREAKING = {
    *("br", "p", "div", "li", "ul", "ol", "dl", "dt", "dd", "blockquote", "center", "hr", "poem"),
    *("h1", "h2", "h3", "h4", "h5", "h6", "tr", "caption"),
}
"""Tags that end a line."""
_INLINE = {
    *("b", "i", "em", "strong", "u", "s", "strike", "del", "ins", "small", "big", "sub", "sup"),
    *("span", "font", "tt", "code", "kbd", "samp", "var", "cite", "dfn", "abbr", "bdi", "bdo"),
    *("q", "mark", "time", "data", "wbr", "ruby", "rb", "rt", "rp", "rtc", "td", "th", "tbody"),
    *("thead", "tfoot", "col", "colgroup", "noinclude", "onlyinclude", "section", "translate"),
    *("tvar", "languages"),
}
"""Tags that go; what they enclose stays."""


# ---- Elements ----


@cache
def _elements() -> "_csrc.WikitextElements":
    return _csrc.WikitextElements(
        dropped=_DROPPED, literal=_LITERAL, breaking=_BREAKING, inlined=_INLINE
    )


def without_elements(text: str, literals: list[str]) -> str:
    """Remove comments and tags, and elements that are no text with their content.

    The content of <nowiki>, <pre>, <math> and the like is appended to `literals`; a mark with its
    index, between \\x01 and \\x02, takes its place.
    """

    def mark(name: str, content: str) -> str:
        literals.append(_literal(name, content))
        line_end = "\n" * ("\n" in literals[-1])
        return f"{line_end}\x01{len(literals) - 1}\x02{line_end}"

    return _elements().remove(text, mark) if "<" in text else text


def _literal(name: str, content: str) -> str:
    if name == "math":
        return f"${content.strip()}$"
    if name == "nowiki":
        return html.unescape(content)
    if name in ("chem", "ce"):
        return content.strip()
    code = content.strip("\n")
    return html.unescape(code) if name == "pre" else code


# ---- Templates ----


def without_templates(text: str) -> str:
    """Remove {{templates}} and {{{parameters}}}; the text of some templates stays.

    Braces are matched as MediaWiki does. `UNCLOSED` marks braces without an end.
    """
    return _csrc.without_templates(text, _is_shown, _template_text)


def _is_shown(begin: str) -> bool:
    """Whether the text of a template stays that begins so; its name ends at the first "|"."""
    name = begin.strip().lower()
    return name in _SHOWN or name.startswith(("lang-", "formatnum:"))


_SHOWN: dict[str, int | str] = {
    **dict.fromkeys(("nowrap", "nobr", "abbr", "tooltip", "small", "big", "em", "strong"), 1),
    **dict.fromkeys(("quote", "blockquote", "cquote", "block indent", "sic", "mvar", "var"), 1),
    **dict.fromkeys(("ill", "interlanguage link", "sup", "sub", "angbr", "not a typo"), 1),
    **{"lang": 2, "transl": -1, "transliteration": -1, "convert": 0, "cvt": 0},
    **dict.fromkeys(("nbsp", "space", "spaces", "thinsp"), " "),
    **dict.fromkeys(("spaced ndash", "snd", "spnd"), " – "),
    **{"ndash": "–", "en dash": "–", "mdash": "—", "em dash": "—", "'": "'", "!": "|", "=": "="},
}
"""Text that stays of a template: itself, or the number of the parameter (-1: the last one)."""

_PIPE = re.compile(r"\|(?![^\[\]]*+\]\])")  # not one inside a link
_NAMED = re.compile(r"\s*+[a-z_ -]++=", re.IGNORECASE)
_NUMBERED = re.compile(r"\s*+[0-9]++\s*+=")
_BETWEEN = frozenset({"to", "-", "–", "and", "x", "by", "or", "to(-)"})


def _template_text(content: str) -> str:
    name, _, parameters = content.partition("|")
    name = name.strip().lower()
    values = [
        _NUMBERED.sub("", value).strip()
        for value in _PIPE.split(parameters)
        if not _NAMED.match(value)
    ]
    if name.startswith("formatnum:"):
        return name.partition(":")[2].strip()
    shown = 1 if name.startswith("lang-") else _SHOWN.get(name, GAP)  # GAP: {{small{{a}}caps}}
    if isinstance(shown, str):
        return shown
    if shown == 0:  # a measure: its number or range, and its unit
        return " ".join(values[: 4 if values[1:2] and values[1] in _BETWEEN else 2])
    return (values[shown if shown < 0 else shown - 1] if len(values) >= abs(shown) else "") or GAP
