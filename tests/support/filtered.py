"""Documents that filters keep, change or drop, and their datasets."""

import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tokamake.data.indexed.manifest import read_manifest
from tokamake.data.tokenize.tokenize import tokenize

FILTERS = (
    "length: {min_characters: 50}, regex: {drop: lorem}, regex: {field: meta.url, drop: bad},"
    "regex: {replace: é}"
)
"""All verdicts, and a field of the raw record."""


def documents(number: int, *, seed: int = 3, longest: int = 60) -> Iterator[dict[str, Any]]:
    """Documents: each filter drops or changes some of them."""
    numbers = random.Random(seed)
    for _ in range(number):
        words = [numbers.choice(["lorem", "ab", "cd", "中", "é"]) for _ in range(3)]
        text = " ".join(words) + " word" * numbers.choice([0, 20, longest])
        yield {"text": text, "meta": {"url": numbers.choice(["bad", "good"])}}


def kept(document: dict[str, Any]) -> str | None:
    """The text that is left of a document, without using tokamake."""
    text: str = document["text"]
    if len(text) < 50 or "lorem" in text or document["meta"]["url"] == "bad":
        return None
    return text.replace("é", "")


def write(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("\n".join(lines) + "\n")
    return path


def run(workspace: Path, files: list[Path], name: str, **options: Any) -> dict[str, Any]:
    tokenize(
        tuple(map(str, files)),
        output=workspace / name,
        tokenizer=workspace / "tokenizer",
        **options,
    )
    return read_manifest(workspace / name)
