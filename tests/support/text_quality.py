"""Plain Python for the words, sentences and counts of lib/csrc/text_statistics.hpp."""

import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from tokamake.data.filters._characters import LETTER, MARK, PUNCTUATION, SENTENCE_END, SIGN, SYMBOL


def _class(ranges: str) -> str:
    """Characters of hexadecimal ranges, for the brackets of a regular expression."""
    spans = [[f"\\U{int(end, 16):08X}" for end in span.split("-")] for span in ranges.split()]
    return "".join("-".join(span) for span in spans)


_LETTERS = _class(LETTER)
_MARK = f"[{_class(MARK)}{_class(SYMBOL)}]"
_FRONT = re.compile(rf"\.\.+|{_MARK}|[{_class(SIGN)}]")
_LETTER_DOT = rf"(?<![.\n][{_LETTERS}])(?<!\.)\.(?!\.)"  # a line feed stands before the text
_BACK = re.compile(rf"(?:(?<!\.)\.\.+|{_MARK}|(?<=[0-9])[{_class(SIGN)}]|{_LETTER_DOT})*\Z")
_MARKS = re.compile(rf"\.+|{_MARK}|[{_class(SIGN)}]")
_CONTRACTION = re.compile(
    r"(?<=.)(?:[nN]['’][tT]|['’](?:[sSdDmM]|[rR][eE]|[vV][eE]|[lL][lL]))\Z", re.DOTALL
)
_DIVIDER = re.compile(
    rf"[{_class(SYMBOL)}]|\.\.+|(?<=[a-z])\.(?=[A-Z])"
    rf"|(?<=[{_LETTERS}]),(?=[{_LETTERS}])"
    rf"|(?<=[{_LETTERS}0-9])(?:-{{1,3}}|[~–—:<>=/])(?=[{_LETTERS}])"
    r"|(?<=[0-9])(?:[+*^](?=[0-9-])|-(?=[0-9]))"
)
_PUNCTUATION = re.compile(rf"[{_class(PUNCTUATION)}{_class(SENTENCE_END)}]*\Z")
_SENTENCE_END = re.compile(rf"[{_class(SENTENCE_END)}]\Z")
_LETTER = re.compile(f"[{_LETTERS}]")


def words(text: str) -> list[str]:
    return [word for chunk in text.split() for word in _chunk_words(chunk) if word]


def _chunk_words(chunk: str) -> Iterator[str]:
    while front := _FRONT.match(chunk):
        yield front[0]
        chunk = chunk[front.end() :]
    back = _BACK.search("\n" + chunk)
    assert back is not None
    core = chunk[: back.start() - 1]
    contraction = _CONTRACTION.search(core)
    inside = core[: contraction.start()] if contraction else core
    if re.match(r"www\.|[A-Za-z0-9]+://", inside):
        yield inside
    else:
        ends = [end for divider in _DIVIDER.finditer(inside) for end in divider.span()]
        yield from (inside[start:end] for start, end in pairwise([0, *ends, len(inside)]))
    if contraction:
        yield contraction[0]
    yield from _MARKS.findall(back[0])


def sentences(line: str) -> int:
    number, ended = 1, False
    for word in words(line):
        if _SENTENCE_END.match(word):
            ended = True
        elif ended and not _PUNCTUATION.match(word):
            number, ended = number + 1, False
    return number


def word_counts(text: str, stop_words: list[str]) -> dict[str, int]:
    found = words(text)
    plain = [word for word in found if not _PUNCTUATION.match(word)]
    lines = text.splitlines()
    return {
        "words": len(found),
        "plain_words": len(plain),
        "plain_characters": sum(map(len, plain)),
        "alphabetic_words": sum(bool(_LETTER.search(word)) for word in found),
        "stop_words": len({*found} & {*stop_words}),
        "hashes": text.count("#"),
        "ellipses": text.count("...") + text.count("…"),
        "lines": len(lines),
        "bullet_lines": sum(line.lstrip().startswith(("•", "-")) for line in lines),
        "ellipsis_lines": sum(line.rstrip().endswith(("...", "…")) for line in lines),
    }


def line_counts(text: str, *, short_characters: int) -> dict[str, int]:
    lines = [line for line in text.split("\n") if line.strip()]
    return {
        "characters": len(text.replace("\n", "")),
        "words": len(words(text)),
        "line_feeds": text.count("\n"),
        "lines": len(lines),
        "ended_lines": sum(bool(_SENTENCE_END.match(line[-1])) for line in lines),
        "short_lines": sum(len(line) <= short_characters for line in lines),
        "duplicate_characters": _duplicates(lines)[1],
    }


def repetition(text: str) -> dict[str, Any]:
    paragraphs, lines = re.split(r"\n{2,}", text.strip()), re.split(r"\n+", text)
    found = words(text)
    return {
        "characters": len(text),
        "paragraphs": len(paragraphs),
        "duplicate_paragraphs": _duplicates(paragraphs)[0],
        "duplicate_paragraph_characters": _duplicates(paragraphs)[1],
        "lines": len(lines),
        "duplicate_lines": _duplicates(lines)[0],
        "duplicate_line_characters": _duplicates(lines)[1],
        "top": [_top(found, n) for n in (2, 3, 4)],
        "repeated": [_repeated(found, n) for n in range(5, 11)],
    }


def _duplicates(parts: list[str]) -> tuple[int, int]:
    again = [part for index, part in enumerate(parts) if part in parts[:index]]
    return len(again), sum(map(len, again))


def _top(found: list[str], n: int) -> int:
    counts = Counter(tuple(found[i : i + n]) for i in range(len(found) - n + 1))
    if not counts:
        return 0
    ngram, count = counts.most_common(1)[0]  # the first one of several
    return len(" ".join(ngram)) * count


def _repeated(found: list[str], n: int) -> int:
    seen, characters, index = set(), 0, 0
    while index + n <= len(found):
        ngram = tuple(found[index : index + n])
        if ngram in seen:
            characters += len("".join(ngram))
            index += n
        else:
            seen.add(ngram)
            index += 1
    return characters


def c4_lines(text: str, **rules: Any) -> dict[str, Any]:
    """Counts and text of the rules; the text is None if the document is refused."""
    counts = dict.fromkeys(("long_words", "no_end_mark", "few_words", "javascript", "policy"), 0)
    kept: list[str] = []
    for line in text.splitlines():
        line = line.strip()
        spaced, longest = line.split(), rules["max_word_characters"]
        if rules["citations"]:
            line = re.sub(r"\[[0-9]*]|\[edit]|\[citation needed]", "", line)
        lower = "".join(
            character.lower() if character < "\x7f" else character for character in line
        )
        ended = line.endswith((".", "?", "!", '"', "'")) and not line.endswith("...")
        if longest >= 0 and any(len(word) > longest for word in spaced):
            counts["long_words"] += 1
        elif rules["end_marks"] and not ended:
            counts["no_end_mark"] += 1
        elif len(spaced) < rules["min_words"]:
            counts["few_words"] += 1
        elif rules["lorem_ipsum"] and "lorem ipsum" in lower:
            return {**counts, "refused": "lorem ipsum"}
        elif rules["javascript"] and "javascript" in lower:
            counts["javascript"] += 1
        elif rules["curly_bracket"] and "{" in line:
            return {**counts, "refused": "{"}
        elif any(phrase in lower for phrase in rules["policy"]):
            counts["policy"] += 1
        else:
            kept.append(line)
    left = "\n".join(kept).strip()
    return {**counts, "refused": "", "text": left, "sentences": sum(map(sentences, kept))}


def as_counts(statistics: Any, names: Any) -> dict[str, Any]:
    """Attributes of an object of lib/csrc."""
    return {name: getattr(statistics, name) for name in names}


def random_texts(seed: int, number: int) -> Iterator[str]:
    """Texts of few words and marks, so that lines and n-grams repeat."""
    rng = np.random.default_rng(seed)
    parts = [
        "the",
        "to",
        "and",
        "é中",
        "x1",
        "a",
        " ",
        " ",
        "  ",
        ". ",
        "\n",
        "\n\n",
        "! ",
        "...",
        "'",
    ]
    for _ in range(number):
        yield "".join(rng.choice(parts, rng.integers(1, 120)))
