"""Compare encoders alone, in one process and on one thread: tokamake, gigatoken and tokenizers.

    pip install gigatoken    # a peer, which tokamake does not need
    python benchmarks/encoders.py --corpus corpus.jsonl --tokenizer llama3 --tokenizer qwen3

Contestants take turns. Figures are MB of UTF-8 per CPU second: in the first round, whose caches are
cold, and the median of later rounds. The tokenizer's own package gets one document of `--part`. The
documents whose tokens differ from its are counted; gigatoken's are not compared.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import orjson

from tokamake.data.tokenizers import Tokenizer, open_tokenizer
from tokamake.data.tokenizers._fast_encoder import FastEncoder, refusal


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True, help="jsonl file, key text")
    parser.add_argument("--tokenizer", type=Path, action="append", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--part", type=int, default=40, help="1: the package gets all documents")
    options = parser.parse_args()
    texts = [orjson.loads(line)["text"] for line in options.corpus.read_bytes().splitlines()]
    columns = "start, s", "tokamake: first, later", "gigatoken: first, later", "own package"
    print(f"| | {' | '.join(columns)} | ratio | differing |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for path in options.tokenizer:
        print(_row(path, texts, options), flush=True)


def _row(path: Path, texts: list[str], options: argparse.Namespace) -> str:
    started = time.process_time()
    tokenizer = open_tokenizer(path)
    if reason := refusal(tokenizer):
        return f"| {path.name} | not fast: {reason} |"
    encoder = FastEncoder(tokenizer)
    encoder.encode(["a"])
    start = time.process_time() - started
    data = np.frombuffer("".join(texts).encode(), np.uint8).copy()
    ends = np.cumsum([len(text.encode()) for text in texts]).astype(np.int64)
    contestants: list[Callable[[], object]] = [lambda: encoder.encode_utf8(data, ends)]
    if other := _gigatoken(tokenizer):
        contestants.append(lambda: other(texts))
    speeds = [
        [_speed(contestant, data.size) for contestant in contestants] for _ in range(options.rounds)
    ]
    part = texts[:: options.part]
    size = sum(len(text.encode()) for text in part)
    expected: list[list[int]] = []
    slow = _speed(lambda: expected.extend(tokenizer.encode_batch(part)), size)
    ids, lengths = encoder.encode(part)
    rows = [row.tolist() for row in np.split(ids, np.cumsum(lengths))[:-1]]
    differing = sum(row != wanted for row, wanted in zip(rows, expected, strict=True))
    cells = [f"{first:.0f}, {median(later):.0f}" for first, *later in zip(*speeds, strict=True)]
    cells = [*cells, "not measured"][:2]
    own = median(row[0] for row in speeds[1:])
    cells += [f"{slow:.1f}", f"{own / slow:.0f}", f"{differing:,} of {len(part):,}"]
    return f"| {path.name} | {start:.1f} | {' | '.join(cells)} |"


def _speed(encode: Callable[[], object], size: int) -> float:
    started = time.process_time()
    encode()
    return size / 1e6 / (time.process_time() - started)


def _gigatoken(tokenizer: Tokenizer) -> Callable[[list[str]], object] | None:
    try:
        import gigatoken
    except ImportError:
        return None
    try:
        if tokenizer.package == "sentencepiece":
            raise ValueError("its loader wants a file")
        loaded = gigatoken.Tokenizer.from_json(tokenizer.definition())
    except BaseException as error:  # a panic in Rust is no Exception
        print(f"gigatoken: {str(error)[:100]}")
        return None
    return lambda texts: loaded.encode_batch(texts, parallel=False)


if __name__ == "__main__":
    main()
