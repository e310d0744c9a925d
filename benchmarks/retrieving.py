"""Measure how much the inverse cloze task lifts the recall of a small biencoder, beside BM25.

    python benchmarks/retrieving.py

Snakemake trains on Python's documentation from random weights, embeds, searches and measures.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.retrievers import (
    BATCH,
    LENGTH,
    STEPS,
    make_retriever_workspace,
    recalls,
    write_questions,
)


def main() -> None:
    """Measure and print a row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--bytes", type=int, default=1_000_000, help="of each of two files")
    parser.add_argument("--length", type=int, default=LENGTH, help="most tokens of a text")
    parser.add_argument("--batch", type=int, default=BATCH, help="blocks that a query chooses from")
    parser.add_argument("--work", type=Path, default=Path("benchmark-work"), help="scratch folder")
    options = parser.parse_args()
    options.work.mkdir(parents=True)
    make_retriever_workspace(
        options.work,
        file_bytes=options.bytes,
        steps=options.steps,
        batch=options.batch,
        length=options.length,
    )
    start = time.monotonic()
    run(options.work, "data")
    write_questions(options.work)
    run(options.work, "retrieval")
    minutes = (time.monotonic() - start) / 60
    used = os.times()
    cpu_minutes = (used.children_user + used.children_system) / 60
    found = recalls(options.work)
    print(
        "| questions | random weights | trained | times | BM25 | minutes | CPU minutes |\n"
        "|---|---|---|---|---|---|---|\n"
        f"| {found.num_questions:,} of {found.num_passages:,} passages | {found.random:.1%} "
        f"| {found.trained:.1%} | {found.trained / found.random:.1f} | {found.bm25:.1%} "
        f"| {minutes:.1f} | {cpu_minutes:.1f} |"
    )


def run(folder: Path, target: str) -> None:
    """Build a target of the workflow."""
    command = [sys.executable, "-m", "snakemake", "--profile", "profiles/local"]
    subprocess.run(
        [*command, "--configfile", "my.yaml", "--", target],
        cwd=folder,
        check=True,
        stderr=subprocess.DEVNULL,
    )


if __name__ == "__main__":
    main()
