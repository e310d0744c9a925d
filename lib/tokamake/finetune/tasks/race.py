"""RACE (arXiv 1704.04683): which of four options answers a question about an article?

Files as published: each line of a *.txt is an article with its questions.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokamake.errors import UserError
from tokamake.finetune.tasks._table import json_lines
from tokamake.train.objectives.classification.data import Example

HEAD = "choice"
LABELS = ("A", "B", "C", "D")
METRICS = ("accuracy",)
SETTINGS = {
    "max_question_tokens": {
        "default": 128,
        "ge": 1,
        "description": "Most tokens of a question with an option; the end of longer ones is cut.",
    }
}


def read(path: Path, settings: Mapping[str, Any]) -> Iterator[Example]:
    """Read the questions of a file. An option takes the place of `_`, or follows the question."""
    for where, value in json_lines(path):
        try:
            article, questions = value["article"], value["questions"]
            options, answers = value["options"], value.get("answers")
            answers = [None] * len(questions) if answers is None else answers
            rows = [*zip(questions, options, answers, strict=True)]
        except (KeyError, TypeError, ValueError):
            raise UserError(
                f"{where}: has no article, questions, options and answers, as many of each; name "
                "a file of RACE"
            ) from None
        for question, texts, answer in rows:
            if len(texts) != len(LABELS):
                raise UserError(f"{where}: {question[:40]!r}: has {len(texts)} options, not 4")
            yield Example(tuple(_asked(question, text) for text in texts), article, answer, where)


def _asked(question: str, option: str) -> str:
    return question.replace("_", option) if "_" in question else f"{question} {option}"
