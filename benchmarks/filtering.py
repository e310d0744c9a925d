"""Compare filters of text quality with datatrove's: verdicts and speed, in one process on one core.

    python benchmarks/filtering.py --corpus corpus.jsonl --documents 10000 --timed 300

Both filter the same documents in turns, round by round; printed speeds are medians of CPU time.
Each filter sees each document, also one that another filter drops. Needs the extras oracles
and corpora.
"""

import argparse
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import orjson

from tests.support.datatrove_filters import filter_of, our_words
from tokamake.config.filters import filter_class
from tokamake.data.filters import Document

Decide = Callable[[str], tuple[str | None, str]]

ORDER = ("gopher_repetition", "gopher_quality", "c4", "fineweb")
"""The order of FineWeb. datatrove's filters share the words of a document."""


def main() -> None:
    """Print a table of verdicts and one of speeds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True, nargs="+", help="jsonl files")
    parser.add_argument("--documents", type=int, default=10_000, help="whose verdicts are compared")
    parser.add_argument("--max-characters", type=int, default=20_000, help="skip longer documents")
    parser.add_argument("--timed", type=int, default=300, help="documents for the speeds")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    texts = [
        text
        for path in options.corpus
        for line in path.read_bytes().splitlines()
        if len(text := orjson.loads(line)["text"]) <= options.max_characters
    ]
    if options.documents:
        print_verdicts(_sample(texts, options.documents))
    print_speeds(_sample(texts, options.timed), rounds=options.rounds)


def ours(name: str, **options: Any) -> Decide:
    """Return a filter of tokamake as a function of a text."""
    loaded = filter_class(name)(**options)
    loaded.setup()

    def decide(text: str) -> tuple[str | None, str]:
        document = Document(text, {})
        drop = loaded.apply(document)
        return (drop.reason, text) if drop else (None, document.text)

    return decide


def print_verdicts(texts: list[str]) -> None:
    """Print how many verdicts differ, and how many with our words in datatrove's filters."""
    print(f"{len(texts):,} documents, {_megabytes(texts):.1f} MB\n")
    print(
        "| filter | both keep | both drop | other reason | only tokamake drops |"
        " only datatrove drops | kept text differs | differs with equal words |\n"
        "| --- |" + " ---: |" * 7
    )
    for name in ORDER:
        left, right = ours(name), filter_of(name)
        verdicts = [left(text) for text in texts]
        kinds = Counter(_kind(*pair) for pair in zip(verdicts, map(right, texts), strict=True))
        with our_words():
            unexplained = sum(
                given != right(text) for given, text in zip(verdicts, texts, strict=True)
            )
        columns = ("keep", "drop", "reason", "ours", "theirs", "text")
        cells = " | ".join(f"{kinds[column]:,}" for column in columns)
        print(f"| {name} | {cells} | {unexplained} |", flush=True)
    print()


def _kind(ours: tuple[str | None, str], theirs: tuple[str | None, str]) -> str:
    if ours == theirs:
        return "drop" if ours[0] else "keep"
    if ours[0] and theirs[0]:
        return "reason"
    return "ours" if ours[0] else "theirs" if theirs[0] else "text"


def print_speeds(texts: list[str], *, rounds: int) -> None:
    """Print MB/s of each filter and of all of them."""
    print(f"{len(texts):,} documents, {_megabytes(texts):.1f} MB\n")
    chains: dict[str, tuple[list[Decide], list[Decide]]] = {
        name: ([filter_of(name)], [ours(name)]) for name in ORDER
    }
    chains["all four"] = [filter_of(name) for name in ORDER], [ours(name) for name in ORDER]
    print("| filters | datatrove, MB/s | tokamake, MB/s | times |\n| --- | ---: | ---: | ---: |")
    for name, pair in chains.items():
        slow, fast = _speeds(pair, texts, rounds=rounds)
        print(f"| {name} | {slow:.2f} | {fast:.1f} | {fast / slow:.0f} |", flush=True)
    for title, options in (
        ("language", {}),
        ("language, first 500 characters", {"max_characters": 500}),
    ):
        chain = [ours("language", languages=["en"], **options), *chains["all four"][1]]
        slow, fast = _speeds((chains["all four"][0], chain), texts, rounds=rounds)
        print(f"| all four; tokamake also {title} | {slow:.2f} | {fast:.1f} | {fast / slow:.0f} |")


def _speeds(pair: tuple[list[Any], list[Any]], texts: list[str], *, rounds: int) -> list[float]:
    """MB/s of two chains of filters: medians of rounds in turns."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds):
        for place in (0, 1) if number % 2 else (1, 0):
            start = time.process_time()
            for text in texts:
                for decide in pair[place]:
                    decide(text)
            seconds[place].append(time.process_time() - start)
    return [_megabytes(texts) / median(times) for times in seconds]


def _sample(texts: list[str], number: int) -> list[str]:
    """Documents at equal distances."""
    return texts[:: max(1, len(texts) // number)][:number]


def _megabytes(texts: list[str]) -> float:
    return sum(len(text.encode()) for text in texts) / 1e6


if __name__ == "__main__":
    main()
