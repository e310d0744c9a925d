"""Time MinHash keys against gaoya, and the clusters of many documents with drawn keys.

    python benchmarks/near_duplicates.py --corpus corpus.jsonl --gaoya gaoya/bin/python
    python benchmarks/near_duplicates.py --documents 14870000 --work /scratch

Keys: both read the same texts in turns, round by round, on one thread; figures are medians. gaoya
(its own environment) also inserts the keys into its index. Clusters: 30 % of the documents share
some of their keys with another one; then 1 % more documents are compared with the kept keys.
"""

import argparse
import json
import resource
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import numpy as np
import numpy.typing as npt

from tokamake.config.near_duplicates import MinHashSettings
from tokamake.data.corpus.document_rows import RowsWriter
from tokamake.data.corpus.find_near_duplicates import find_near_duplicates
from tokamake.data.corpus.minhash import make_minhash
from tokamake.data.corpus.plan_file import Plan, PlannedShard, write_plan

_GAOYA = """
import json, sys, time
from gaoya.minhash import MinHashStringIndex
texts = json.load(open(sys.argv[1]))
index = MinHashStringIndex(hash_size=32, jaccard_threshold=0.5, num_bands=14, band_size=8,
                           num_hashes=112, analyzer="word", lowercase=True, ngram_range=(5, 5))
start = time.perf_counter()
for number, text in enumerate(texts):
    index.insert_document(number, text)
print(time.perf_counter() - start)
"""
_PART = 1 << 20


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", type=Path, help="jsonl file")
    parser.add_argument("--gaoya", help="Python of an environment with gaoya")
    parser.add_argument("--texts", type=int, default=4000)
    parser.add_argument("--bytes", type=int, default=12_000, help="size of each text")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--documents", type=int, default=0)
    parser.add_argument("--work", type=Path, default=Path("benchmark-work"), help="scratch folder")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    if options.corpus:
        measure_keys(options)
    if options.documents:
        measure_clusters(options.documents, options.work)


def measure_keys(options: argparse.Namespace) -> None:
    """Texts per second of tokamake, and of gaoya if it is given."""
    texts = [*_texts(options.corpus, options.texts, size=options.bytes)]
    path = options.work / "texts.json"
    path.write_text(json.dumps(texts))
    minhash = make_minhash(MinHashSettings())
    rates: dict[str, list[float]] = {}
    for _ in range(options.rounds):
        start = time.perf_counter()
        minhash.sign(texts)
        rates.setdefault("tokamake", []).append(len(texts) / (time.perf_counter() - start))
        if options.gaoya:
            command = [options.gaoya, "-c", _GAOYA, str(path)]
            printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            rates.setdefault("gaoya", []).append(len(texts) / float(printed))
    for name, values in rates.items():
        print(f"{name}: {median(values):,.0f} texts of {options.bytes:,} characters a second")


def _texts(corpus: Path, count: int, *, size: int) -> Iterator[str]:
    """Texts of one size, cut from the joined texts of a corpus."""
    joined = ""
    with corpus.open(encoding="utf-8") as stream:
        for line in stream:
            joined += json.loads(line)["text"] + "\n"
            while len(joined) >= size:
                yield joined[:size]
                joined, count = joined[size:], count - 1
                if not count:
                    return


def measure_clusters(documents: int, work: Path) -> None:
    """Time of all documents, and of 1 % more; peak memory of this process."""
    signed = [(work / "all.rows", documents), (work / "more.rows", documents // 100)]
    shards = tuple(
        PlannedShard(f"web/{path.stem}", ("web.jsonl",), "", 1, "") for path, _ in signed
    )
    write_plan(work / "plan.json", Plan({}, "", (), (), (), (), shards))
    for seed, (path, count) in enumerate(signed):
        with RowsWriter(path) as writer:
            for rows in _rows(count, seed=seed):
                writer.add(f"web/{path.stem}", rows)
    seconds = []
    for path, _ in signed:
        start = time.perf_counter()
        find_near_duplicates(
            [path],
            plan=work / "plan.json",
            output=work / f"{path.stem}.duplicates",
            table=work / f"{path.stem}.parquet",
            keys=work / f"{path.stem}.keys",
            against=(work / "all.keys",) if seconds else (),
            workers=2,
        )
        seconds.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"{documents:,} documents: {seconds[0]:.1f} s; 1 % more: {seconds[1]:.2f} s")
    print(f"peak of this process: {peak:.2f} GB")


def _rows(count: int, *, seed: int) -> Iterator[npt.NDArray[np.uint64]]:
    """Rows of `sign-documents`; 30 % share each key with another document at odds of one half."""
    random = np.random.default_rng(seed)
    for start in range(0, count, _PART):
        size = min(_PART, count - start)
        rows = random.integers(1, 1 << 63, (size, 15)).astype(np.uint64)
        copies = np.flatnonzero(random.random(size) < 0.3)
        sources = random.integers(0, size, len(copies))
        for band in range(14):
            is_shared = random.random(len(copies)) < 0.5
            rows[copies[is_shared], band] = rows[sources[is_shared], band]
        rows[:, -1] = np.arange(start, start + size)
        yield rows


if __name__ == "__main__":
    main()
