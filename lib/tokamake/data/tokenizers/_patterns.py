"""Automata of the expressions by which tokenizers split texts into words.

`compile_pattern` turns an expression into a table for lib/csrc/pretokens.hpp. The installed package
`tokenizers` itself says which code points a character class matches, so its Unicode version does
not matter. Matches equal those of the package's engine, Oniguruma: leftmost, and the first
alternative wins. Constructs that cannot be compiled raise `Unsupported`.
"""

import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokamake.data.tokenizers._exactness import Unsupported
from tokamake.data.tokenizers._unicode_tables import kept

# Planes with characters. All other code points are unassigned or for private use.
_POINTS = np.r_[0:0xD800, 0xE000:0x40000, 0xE0000:0xE1000]
_UNASSIGNED, _PRIVATE = 0x50000, 0xF8000  # stand for the other planes
_PRIVATE_PLANES = (slice(0xF0000, 0xFFFFE), slice(0x100000, 0x10FFFE))
_CODES = np.r_[_POINTS, _UNASSIGNED, _PRIVATE]
_TEXT = _CODES.astype("<u4").tobytes().decode("utf-32-le")
CHARACTERS = [*_TEXT]
"""Each character of the known planes, and one of all others that are unassigned or private."""
_SIZES = 1 + (_CODES >= 0x80) + (_CODES >= 0x800) + (_CODES >= 0x10000)  # in UTF-8
_BEGINS = np.r_[0, np.cumsum(_SIZES)]
_MAX_CLASSES = 64
_TRIED = 64  # characters that are tried at once: each try reads the text before it
_MAX_ENTRIES = 1 << 15  # of an automaton: their index has 15 bits
_QUANTIFIER = re.compile(r"([?*+]|\{(\d+)(?:(,)(\d*))?\})([+?]?)")
_COUNTS = {"?": (0, 1), "*": (0, None), "+": (1, None)}
_FOLDED_PAIRS = {"ss", "st", "ff", "fi", "fl"}  # one character can match both if case is ignored

Node = tuple[Any, ...]


class Automaton(NamedTuple):
    """An expression as a table, as in lib/csrc/pretokens.hpp."""

    classes: NDArray[np.uint8]
    """(0x110000,) class of each code point."""
    transitions: NDArray[np.uint16]
    """(states, classes + 1) twice the index of the next state's first entry, and whether a match
    ends."""


@cache
def compile_pattern(expression: str) -> Automaton:
    """Compile an expression; Unsupported if an unknown construct occurs."""
    return compile_sets(expression, {})


def compile_sets(expression: str, named: Mapping[str, NDArray[np.bool_]]) -> Automaton:
    """`compile_pattern` with further character classes, whose names begin with NUL."""
    if any(ord(character) >= _POINTS[-1] for character in expression):
        raise Unsupported("its expression names characters of unknown planes")
    parser = _Parser(expression)
    tree = parser.parse()
    if _is_nullable(tree):
        raise Unsupported("its expression matches an empty text")
    sets = [named[text] if text in named else matching(text) for text in parser.sets]
    members = np.array(sets or [np.zeros(len(_TEXT), bool)])
    codes = sum(row.astype(np.uint64) << np.uint64(bit) for bit, row in enumerate(members))
    _, first, inverse = np.unique(codes, return_index=True, return_inverse=True)
    transitions = _transitions(_program(tree), members[:, first])
    return Automaton(of_all_points(inverse.astype(np.uint8)), transitions)


def of_all_points(values: NDArray[Any]) -> NDArray[Any]:
    """(0x110000,) value of each code point, from one value for each of CHARACTERS."""
    everywhere = np.full(0x110000, values[-2], values.dtype)
    everywhere[_POINTS] = values[:-2]
    for plane in _PRIVATE_PLANES:
        everywhere[plane] = values[-1]
    return everywhere


@cache
def matching(expression: str) -> NDArray[np.bool_]:
    """Whether the installed package matches each character of _TEXT with an expression.

    The expression matches single characters; names that begin with NUL are pre-tokenizers.
    """
    if len(expression) == 1:
        return np.equal(_CODES, ord(expression))
    return kept(f"matches of {expression}", partial(_matching, expression))


def _matching(expression: str) -> NDArray[np.bool_]:
    from tokenizers import PreTokenizedString, Regex, pre_tokenizers

    named = {
        "\0Digits": lambda: pre_tokenizers.Digits(individual_digits=False),
        "\0Punctuation": lambda: pre_tokenizers.Punctuation("contiguous"),
        "\0Visible": pre_tokenizers.WhitespaceSplit,
    }
    try:
        regex = Regex("" if expression in named else f"(?:{expression})+")
    except Exception:  # the package raises nothing more specific
        raise Unsupported(f"its expression has {expression!r}") from None
    splits: Any = named.get(
        expression, lambda: pre_tokenizers.Split(regex, "removed", invert=True)
    )()
    pieces = PreTokenizedString(_TEXT)
    splits.pre_tokenize(pieces)
    # Digits and Punctuation keep the other characters, too; the first one, NUL, is such.
    spans = [span for _, span, _ in pieces.get_splits("original", "byte")]
    keeps_all = expression in ("\0Digits", "\0Punctuation")
    edges = np.array(spans[1::2] if keeps_all else spans).reshape(-1, 2)
    changes = np.zeros(len(_BEGINS), np.int8)
    for change, places in zip((1, -1), np.searchsorted(_BEGINS, edges).T, strict=True):
        changes[places] += np.int8(change)
    return np.cumsum(changes[:-1], dtype=np.int8).astype(bool)


@cache
def letters() -> NDArray[np.uint8]:
    """(0x110000,) whether an added token with single_word is not found beside a character."""
    from tokenizers import AddedToken, Tokenizer, models

    probe = Tokenizer(models.WordLevel({"?": 0}, "?"))
    probe.add_tokens([AddedToken("<>", single_word=True, normalized=False)])
    found = np.zeros(len(CHARACTERS), np.uint8)
    parts = range(0, len(CHARACTERS), _TRIED)
    texts = ["".join(f"{c}<>\n" for c in CHARACTERS[part : part + _TRIED]) for part in parts]
    for part, encoding in zip(parts, probe.encode_batch(texts), strict=True):
        for token, (begin, _) in zip(encoding.ids, encoding.offsets, strict=True):
            found[part + begin // 4] |= token == 1
    return of_all_points(1 - found)


class _Parser:
    """Parser of an expression. `sets` are the expressions of its character classes."""

    def __init__(self, expression: str) -> None:
        self._left = expression
        self._ignores_case = False
        self.sets: dict[str, int] = {}

    def parse(self) -> Node:
        tree = self._alternatives()
        if self._left:
            raise Unsupported(f"its expression has {self._left[:3]!r}")
        return tree

    def _take(self, text: str) -> bool:
        found = self._left.startswith(text)
        self._left = self._left[len(text) :] if found else self._left
        return found

    def _alternatives(self) -> Node:
        parts = [self._items()]
        while self._take("|"):
            parts.append(self._items())
        return ("any", *parts) if len(parts) > 1 else parts[0]

    def _items(self) -> Node:
        items: list[Node] = []
        while self._left and self._left[0] not in "|)":
            items.append(self._quantified(self._item()))
        return ("all", *items)

    def _item(self) -> Node:
        for opening, ignores_case in (("(?i:", True), ("(?:", self._ignores_case)):
            if self._take(opening):
                before, self._ignores_case = self._ignores_case, ignores_case
                tree = self._alternatives()
                self._ignores_case = before
                return self._closed(tree)
        for opening, is_match in (("(?!", False), ("(?=", True)):
            if self._take(opening):
                return self._closed(("next", self._class(), is_match, not is_match))
        if self._take("$"):  # the end of a line
            return ("next", self._number("\n"), True, True)
        if self._left[0] == "(" and not self._left.startswith("(?"):
            self._take("(")
            return self._closed(self._alternatives())
        return ("one", self._class())

    def _closed(self, tree: Node) -> Node:
        if not self._take(")"):
            raise Unsupported(f"its expression has {self._left[:3]!r} in a group")
        return tree

    def _quantified(self, item: Node) -> Node:
        while found := _QUANTIFIER.match(self._left):
            mark, low, comma, high, suffix = found.groups()
            counts = _COUNTS.get(mark)
            if counts is None:
                counts = (int(low), (int(high) if high else None) if comma else int(low))
            lazy = suffix == "?"
            # Oniguruma reads {1,3}+ as a repetition of a repetition.
            repeated = suffix if mark[0] == "{" else ""
            if lazy or item[0] == "next" or (counts[1] is None and _is_nullable(item)):
                raise Unsupported(f"its expression has {found[0]!r}")
            self._left = repeated + self._left[found.end() :]
            item = (
                self._possessive(item, counts)
                if suffix and not repeated
                else ("times", item, *counts)
            )
        return item

    def _possessive(self, item: Node, counts: tuple[int, int | None]) -> Node:
        """A repetition that never gives a character back: no further one may follow it."""
        if item[0] != "one":
            raise Unsupported("its expression has a possessive quantifier")
        ends = ("next", item[1], False, True)
        return ("any", item, ends) if counts[1] == 1 else ("all", ("times", item, *counts), ends)

    def _class(self) -> int:
        """Number of the character class that comes next."""
        text = _class_text(self._left)
        self._left = self._left[len(text) :]
        if len(text) == 2 and not text[1].isalnum():
            text = text[1]  # an escaped sign
        if self._ignores_case and re.fullmatch(r"\[[a-zA-Z]+\]", text):
            text = f"(?i:{text})"  # the package says which characters match
        elif self._ignores_case and len(text) > 1:
            raise Unsupported("its expression ignores the case of a character class")
        elif self._ignores_case and text.isalpha():
            if not text.isascii() or (text + self._left[:1]).lower() in _FOLDED_PAIRS:
                raise Unsupported("its expression ignores the case of a ligature")
            text = f"(?i:{text})"
        return self._number(text)

    def _number(self, text: str) -> int:
        number = self.sets.setdefault(text, len(self.sets))
        if number >= _MAX_CLASSES:
            raise Unsupported("its expression has many character classes")
        return number


def _class_text(text: str) -> str:
    """The character class with which a text begins."""
    if found := re.match(
        r"\0\w+|\\[pP]\{\^?\w+\}|\\[sSdDwWrnt]|\\[^\w\s]|[^\\\[\]^$.|?*+(){}]", text
    ):
        return found[0]
    if not text.startswith("["):
        raise Unsupported(f"its expression has {text[:3]!r}")
    depth = 0
    for part in re.finditer(r"\\.|\[\^?|\]|.", text, re.DOTALL):
        depth += (part[0][0] == "[") - (part[0] == "]")
        if depth == 0:
            return text[: part.end()]
    raise Unsupported("its expression has a class without end")


def _is_nullable(node: Node) -> bool:
    match node:
        case ("one", *_):
            return False
        case ("any", *parts):
            return any(map(_is_nullable, parts))
        case ("all", *parts):
            return all(map(_is_nullable, parts))
        case ("times", part, low, _):
            return low == 0 or _is_nullable(part)
    return True


def _program(tree: Node) -> list[Node]:
    """Instructions of an expression, in the order of preference; the last one is the start.

    ("one", set, next) reads a character, ("next", set, is_match, at_end, next) tests the next one
    without reading it, ("fork", *next) tries several, ("match",) ends.
    """
    program: list[Node] = [("match",)]

    def add(instruction: Node) -> int:
        program.append(instruction)
        return len(program) - 1

    def build(node: Node, after: int) -> int:
        match node:
            case ("any", *parts):
                return add(("fork", *(build(part, after) for part in parts)))
            case ("all", *parts):
                for part in reversed(parts):
                    after = build(part, after)
                return after
            case ("times", part, low, high):
                entry = after
                if high is None:
                    entry = add(())
                    program[entry] = ("fork", build(part, entry), after)
                for _ in range((high or low) - low):
                    entry = add(("fork", build(part, entry), after))
                for _ in range(low):
                    entry = build(part, entry)
                return entry
        return add((*node, after))

    add(("fork", build(tree, 0)))
    return program


def _transitions(program: list[Node], members: NDArray[np.bool_]) -> NDArray[np.uint16]:
    """(states, classes + 1) table of an automaton.

    A state is the instructions that may come next, in the order of preference.

    Args:
        members: (sets, classes) whether a set has the characters of a class.
    """
    width = members.shape[1] + 1
    states = {(): 0, (len(program) - 1,): 1}
    rows: list[list[int]] = []
    for state in (queue := [*states]):
        row = []
        for kind in range(width):
            contains = (lambda _: False) if kind == width - 1 else members[:, kind].__getitem__
            following, is_match = _step(program, state, contains=contains, at_end=kind == width - 1)
            if following not in states:
                states[following] = len(states)
                queue.append(following)
            row.append(2 * width * states[following] + is_match)
        rows.append(row)
        if len(states) * width > _MAX_ENTRIES:
            raise Unsupported("its expression is large")
    return np.array(rows, np.uint16)


def _step(
    program: list[Node],
    state: tuple[int, ...],
    *,
    contains: Callable[[int], bool],
    at_end: bool,
) -> tuple[tuple[int, ...], bool]:
    """The state after a character of the sets that `contains` names, and whether a match ends."""
    following: dict[int, None] = {}
    stack, seen = [*reversed(state)], set()
    while stack:
        if (place := stack.pop()) in seen:
            continue
        seen.add(place)
        match program[place]:
            case ("match",):
                return tuple(following), True  # what is less preferred does not count
            case ("one", number, after):
                if contains(number):
                    following[after] = None
            case ("next", number, is_match, holds_at_end, after):
                if holds_at_end if at_end else bool(contains(number)) == is_match:
                    stack.append(after)
            case ("fork", *others):
                stack += reversed(others)
    return tuple(following), False
