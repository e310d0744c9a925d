"""Remove what wikitext nests: elements such as <ref>, templates, and tables."""

import html
import re

GAP = "\x04"
"""Stands for a template or reference that went, until spaces and brackets around it are cleaned."""
UNCLOSED = "\x03"
"""Stands for the braces of a template that never ends."""

_TAG = re.compile(r"<!--|<(/?)([a-z][a-z0-9]*+)(?![a-z0-9-])([^<>]*+)>", re.IGNORECASE)
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
_KNOWN = _DROPPED | _LITERAL | _BREAKING | _INLINE

_INNERMOST = re.compile(r"\{\{(?<!\{\{\{)([^{}]++)\}\}(?!\})")
_BRACES = re.compile(r"\{\{\{*+"), re.compile(r"\}\}\}*+")
_TABLE = re.compile(f"\n[ \t:*#;{GAP}]*+(?:\\{{\\||\\|\\}})")


def spans(text: str, *marks: re.Pattern[str]) -> list[tuple[int, int]]:
    """Return where marks of several kinds start and end, in their order in the text."""
    return sorted(match.span() for mark in marks for match in mark.finditer(text))


# ---- Elements ----


def without_elements(text: str, literals: list[str]) -> str:
    """Remove comments and tags, and elements that are no text with their content.

    The content of <nowiki>, <pre>, <math> and the like is appended to `literals`; a mark with its
    index, between \\x01 and \\x02, takes its place.
    """
    out: list[str] = []
    position, search_from = 0, 0
    unclosed: set[str] = set()  # names without a further end tag: do not search for it again
    while match := _TAG.search(text, search_from):
        start, search_from = match.span()
        name = (match[2] or "").lower()
        if name and name not in _KNOWN:
            continue  # it is text, such as a < b > c
        replacement = "\n" if name in _BREAKING else GAP if name in _DROPPED else ""
        if not name:
            search_from = _end_of_comment(text, start)
        elif name in _DROPPED or name in _LITERAL:
            is_opening = not match[1] and not match[3].rstrip().endswith("/")
            if is_opening and name not in unclosed:
                if end := _end_of_element(text, name, start=search_from):
                    if name in _LITERAL:
                        literals.append(_literal(name, text[search_from : end[0]]))
                        line_end = "\n" * ("\n" in literals[-1])
                        replacement = f"{line_end}\x01{len(literals) - 1}\x02{line_end}"
                    search_from = end[1]
                else:
                    unclosed.add(name)
        out += [text[position:start], replacement]
        position = search_from
    return "".join([*out, text[position:]]) if out else text


def _end_of_comment(text: str, start: int) -> int:
    """Return the end of a comment. One that is alone in its line takes the line with it."""
    end = text.find("-->", start + 4)
    if end < 0:
        return len(text)
    is_alone = text[start - 1 : start] in ("", "\n") and text[end + 3 : end + 4] == "\n"
    return end + 3 + is_alone


_END_TAGS = {
    name: re.compile(rf"<(/?){name}(?![a-z0-9-])[^<>]*+>", re.IGNORECASE)
    for name in _DROPPED | _LITERAL
}


def _end_of_element(text: str, name: str, *, start: int) -> tuple[int, int] | None:
    """Return where the content and the element end; None if it does not end."""
    depth = 1
    for tag in _END_TAGS[name].finditer(text, start):
        if tag[1]:
            depth -= 1
            if not depth:
                return tag.span()
        elif name == "table":  # only tables enclose each other
            depth += 1
    return None


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
    if "{{" not in text and "}}" not in text:
        return text
    text = _INNERMOST.sub(_innermost, text)  # twice as fast as the scan below
    out: list[str] = []
    opened: list[tuple[int, int]] = []  # number of braces, index of their mark in `out`
    position = 0
    for start, end in spans(text, *_BRACES):
        out.append(text[position:start])
        position = end
        count = end - start
        if text[start] == "{":
            opened.append((count, len(out)))
            out.append(UNCLOSED)
            continue
        while count >= 2 and opened:
            braces, first = opened.pop()
            used = min(count, braces, 3)
            is_shown = used == 2 and _shows_text(out[first + 1 :])
            content = "".join(out[first + 1 :]) if is_shown else ""
            del out[first:]
            count, braces = count - used, braces - used
            if braces >= 2:
                opened.append((braces, first))
                out.append(UNCLOSED)
            else:
                out.append("{" * braces)
            out.append(_template_text(content) if content else GAP)
        out.append("}" * (count == 1))
    out.append(text[position:])
    return "".join(out)


_LONGEST_TEXT = 2000  # characters of a template whose text may stay; it bounds what nesting copies


def _innermost(match: re.Match[str]) -> str:
    return _template_text(match[1]) if _shows_text([match[1]]) else GAP


def _shows_text(pieces: list[str]) -> bool:
    """Whether a template shows text that may stay; long ones do not."""
    name = pieces[0][:40].partition("|")[0].strip().lower()
    if name not in _SHOWN and not name.startswith(("lang-", "formatnum:")):
        return False
    return sum(map(len, pieces)) <= _LONGEST_TEXT


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


# ---- Tables ----


def without_tables(text: str) -> str:
    """Remove tables, {| to |}; of one that has no end, only the lines to the next blank line."""
    if "{|" not in text:
        return text
    out: list[str] = []
    opened: list[int] = []  # index in `out` of the first piece of each open table
    position = 0
    text = f"\n{text}"  # the first line can begin a table, too
    for match in _TABLE.finditer(text):
        line = match.start() + 1
        out.append(text[position:line])
        position = match.end()
        if match[0][-1] == "|":
            opened.append(len(out))
        elif opened:
            del out[opened.pop() :]
    out.append(text[position:])
    for first in opened:
        out[first] = "".join(out[first].partition("\n\n")[1:])
    return "".join(out)[1:]
