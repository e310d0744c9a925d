"""Measure how much the inverse cloze task lifts the recall of a small biencoder, beside BM25.

    python benchmarks/retrieving.py --steps 300

Snakemake trains on Python's documentation from random weights, embeds, searches and measures.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.retrievers import make_retriever_workspace, recalls, write_questions


def main() -> None:
    """Measure and print a row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--bytes", type=int, default=1_000_000, help="of each of two files")
    parser.add_argument("--length", type=int, default=64, help="most tokens of a text")
    parser.add_argument("--batch", type=int, default=64, help="blocks that a query chooses from")
    parser.add_argument("--work", type=Path, default=Path("benchmark-work"), help="scratch folder")
    options = parser.parse_args()
    options.work.mkdir(parents=True)
    train = {
        "sequence_length": options.length,
        "micro_batch_size": options.batch // 2,
        "global_batch_size": options.batch,
        "train_steps": options.steps,
        "optimizer": {"learning_rate": 1e-3},
    }
    make_retriever_workspace(options.work, file_bytes=options.bytes, train=train)
    start = time.monotonic()
    run(options.work, "data")
    write_questions(options.work)
    run(options.work, "retrieval")
    minutes = (time.monotonic() - start) / 60
    found = recalls(options.work)
    print(
        "| steps | random weights | trained | times | BM25 | minutes |\n|---|---|---|---|---|---|"
    )
    print(
        f"| {options.steps} | {found.random:.1%} | {found.trained:.1%} | "
        f"{found.trained / found.random:.1f} | {found.bm25:.1%} | {minutes:.1f} |"
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
