"""Compare the training of byte-level BPE with the trainer of `tokenizers`.

    python benchmarks/tokenizer_training.py --vocab-size 32000 corpus/*.jsonl

Each contestant reads the texts of the same jsonl files in a process of its own, in turns. Their
tokenizers must be equal.
"""

import argparse
import hashlib
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from tokamake.data.tokenizers.trained import EOD_TOKEN, bpe, byte_level_tokenizer

CONTESTANTS = ("tokenizers", "tokamake")


def main() -> None:
    """Measure in turns and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", help="jsonl files with the key text")
    parser.add_argument("--vocab-size", type=int, default=32_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--contestant", choices=CONTESTANTS, help="internal: train once")
    options = parser.parse_args()
    if options.contestant:
        print(json.dumps(train(options)))
        return
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in CONTESTANTS}
    for _ in range(options.rounds):
        for name, measured in results.items():
            command = [sys.executable, *sys.argv, "--contestant", name]
            measured.append(json.loads(subprocess.check_output(command)))
    assert len({each["digest"] for rows in results.values() for each in rows}) == 1
    size = sum(Path(file).stat().st_size for file in options.files)
    print(f"{size / 1e6:,.0f} MB, {options.vocab_size:,} tokens; medians of {options.rounds}")
    print("| | seconds | CPU seconds | peak MB |\n| --- | ---: | ---: | ---: |")
    for name, rows in results.items():
        cells = (median(row[key] for row in rows) for key in ("seconds", "cpu", "megabytes"))
        print(f"| {name} | " + " | ".join(f"{cell:,.1f}" for cell in cells) + " |")


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Train once; return the costs and a digest of the tokenizer."""

    def texts() -> Iterator[str]:
        for file in options.files:
            with open(file, encoding="utf-8") as lines:
                yield from (json.loads(line)["text"] for line in lines)

    begin = time.monotonic()
    if options.contestant == "tokamake":
        tokenizer = bpe.train(texts, options.vocab_size, special_tokens=())
    else:
        from tokenizers import models, pre_tokenizers, trainers

        tokenizer = byte_level_tokenizer(models.BPE())
        trainer = trainers.BpeTrainer(
            vocab_size=options.vocab_size,
            special_tokens=[EOD_TOKEN],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts(), trainer)
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "seconds": time.monotonic() - begin,
        "cpu": used.ru_utime + used.ru_stime,
        "megabytes": used.ru_maxrss / 1e3,
        "digest": hashlib.sha256(tokenizer.to_str().encode()).hexdigest(),
    }


if __name__ == "__main__":
    main()
