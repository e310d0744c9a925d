"""Compare filters of text quality with datatrove's: verdicts and speed, in one process on one core.

    python benchmarks/filtering.py --corpus corpus.jsonl --documents 10000 --timed 300

Both filter the same documents in turns, round by round; printed speeds are medians of CPU time.
Each filter sees each document, also one that another filter drops. Needs the extras oracles
and corpora.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import orjson

sys.path.insert(0, str(Path(__file__).parents[1]))

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
    print("| filters | datatrove, MB/s | tokamake, MB/s | times |\n| --- | ---: | ---: | ---: |")
    for name in ORDER:
        _print_speeds([filter_of(name)], {name: [ours(name)]}, texts=texts, rounds=rounds)
    four = [ours(name) for name in ORDER]
    language = ours("language", languages=["en"])
    beginning = ours("language", languages=["en"], max_characters=500)
    chains = {
        "all four": four,
        "all four; tokamake also language": [language, *four],
        "all four; tokamake also language, first 500 characters": [beginning, *four],
    }
    _print_speeds([filter_of(name) for name in ORDER], chains, texts=texts, rounds=rounds)
    for name, kind in (("fix_text", "FTFYFormatter"), ("pii", "PIIFormatter")):
        formatter = getattr(import_module("datatrove.pipeline.formatters"), kind)()
        _print_speeds([formatter.format], {name: [ours(name)]}, texts=texts, rounds=rounds)


def _print_speeds(
    theirs: list[Callable[[str], Any]],
    chains: dict[str, list[Decide]],
    *,
    texts: list[str],
    rounds: int,
) -> None:
    """Print MB/s of datatrove's chain and of each of ours, and the median of their ratios.

    Each chain reads all documents in each round; every second round has the other order.
    """
    contestants: list[list[Any]] = [theirs, *chains.values()]
    seconds: list[list[float]] = [[] for _ in contestants]
    for number in range(rounds):
        for chain, times in [*zip(contestants, seconds, strict=True)][:: -1 if number % 2 else 1]:
            start = time.process_time()
            for text in texts:
                for decide in chain:
                    decide(text)
            times.append(time.process_time() - start)
    size = _megabytes(texts)
    slow = size / median(seconds[0])
    for name, times in zip(chains, seconds[1:], strict=True):
        ratio = median(a / b for a, b in zip(seconds[0], times, strict=True))
        print(f"| {name} | {slow:.2f} | {size / median(times):.1f} | {ratio:.0f} |", flush=True)


def _sample(texts: list[str], number: int) -> list[str]:
    """Documents at equal distances."""
    return texts[:: max(1, len(texts) // number)][:number]


def _megabytes(texts: list[str]) -> float:
    return sum(len(text.encode()) for text in texts) / 1e6


if __name__ == "__main__":
    main()
