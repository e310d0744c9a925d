"""Questions with their answers: tsv files as DPR has them, or jsonl files."""

import ast
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from tokamake.config.retrieval import Match
from tokamake.errors import UserError
from tokamake.retrieval.rows import FileLine, is_jsonl, read_objects, read_rows
from tokamake.retrieval.words import words

_FORM = 'question<TAB>["answer", "other answer"]'
_SWAPPED = "a passage, not a question with its answers; give the file as passages"
FLAGS = re.IGNORECASE | re.MULTILINE


class Question(NamedTuple):
    """A question and its answers."""

    text: str
    answers: list[str]
    """Texts, or regular expressions if answers match so."""


def read_questions(path: Path, *, match: Match | None = None) -> list[Question]:
    """Read a file of questions; `match` checks that the answers can match so.

    A tsv file has a question and a list of answers in each row: JSON, or a literal of Python; no
    other expression is evaluated. A jsonl file has objects with `question` and `answers`.

    Raises:
        UserError: a row is broken, or has an answer that can match nothing or everything.
    """
    read = _objects if is_jsonl(path) else _rows
    questions = [_checked(where, *row, match=match) for where, *row in read(path)]
    if not questions:
        raise UserError(f"{path}: no question; write rows {_FORM}")
    return questions


def _rows(path: Path) -> Iterator[tuple[FileLine, Any, Any]]:
    for where, row in read_rows(path):
        if {"id", "text"} <= set(row):
            raise UserError(f"{where}: the header {' '.join(row)}: {_SWAPPED}")
        if len(row) != 2:
            raise UserError(f"{where}: {len(row)} fields instead of 2; write {_FORM}")
        yield where, row[0], _parsed(row[1])


def _parsed(text: str) -> Any:
    """Value of a JSON document or of a literal of Python; None: it is neither."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        pass
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of "\d" in a regular expression
            return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def _objects(path: Path) -> Iterator[tuple[FileLine, Any, Any]]:
    for where, value in read_objects(path):
        if "text" in value and "question" not in value:
            raise UserError(f"{where}: has the key text: {_SWAPPED}")
        yield where, value.get("question"), value.get("answers")


def _checked(where: FileLine, text: Any, answers: Any, *, match: Match | None) -> Question:
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"{where}: no question; add its text, or remove the row")
    is_list = isinstance(answers, list) and all(isinstance(each, str) for each in answers)
    if not is_list or not answers:
        shown = str(answers)[:40] if answers is not None else "not a list"
        raise UserError(f'{where}: answers are {shown}; write a list of texts such as ["a", "b"]')
    for answer in answers:
        if match == "string" and not words(answer):
            raise UserError(
                f"{where}: the answer {answer!r} has no letter, digit or symbol; remove it"
            )
        if match == "regex":
            _check_pattern(where, answer)
    return Question(text, answers)


def _check_pattern(where: FileLine, pattern: str) -> None:
    try:
        is_empty = re.compile(pattern, FLAGS).search("") is not None
    except (re.error, OverflowError, RecursionError) as error:
        raise UserError(
            f"{where}: the answer {pattern!r} is not a regular expression ({error}); fix it"
        ) from None
    if is_empty:
        raise UserError(f"{where}: the answer {pattern!r} matches every passage; fix it")
