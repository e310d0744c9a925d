"""From raw pages to filtered, deduplicated datasets: the same bytes for any workers and shards."""

import bz2
import gzip
import json
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from tests.support.warc_files import record, response
from tests.support.wikipedia_dumps import multistream, page
from tests.support.workflows import CONFIG, MINE, make_workspace, snakemake

FRENCH = "Le vieux pont traverse la rivière et rejoint le village que les habitants ont construit. "
FILTERS = [
    "fix_text", {"language": "en"}, "gopher_repetition",
    {"gopher_quality": {"min_alphabetic_words": 0.7}}, {"c4": {"end_marks": False}}, "fineweb",
    "pii",
]  # fmt: skip
COUNTS = ("documents_in", "quarantined_documents", "duplicate_documents", "filtered_documents")


def texts() -> list[str]:
    """Prose of Python's reference with near copies, equal copies, French and lists."""
    numbers = random.Random(3)
    blocks = [block for topic in topics.values() for block in re.split(r"\n\s*\n", topic)]
    prose = [" ".join(block.split()) for block in blocks if len(block) > 300]
    found = []
    for first in range(0, len(prose) - 3, 3):
        found.append("\n\n".join(prose[first : first + 3]) + f" Write to x{first}@example.org.")
        words = found[-1].split(" ")
        words[numbers.randrange(len(words))] = "another"
        found += [" ".join(words), numbers.choice(found)] if first % 2 else []
        found += [FRENCH * 10, "\n".join(f"* {n}" for n in range(first, first + 90))]
    numbers.shuffle(found)
    return found


def write_raw(folder: Path) -> None:
    """Corpora of several formats that have half of the texts each."""
    numbers, found = random.Random(5), texts()

    def half() -> list[str]:
        return numbers.sample(found, len(found) // 2)

    def lines() -> list[bytes]:
        return [json.dumps({"text": text}).encode() for text in half()]

    bad = [b"not JSON", b'{"title": "no text"}', b'{"text": ""}', b'{"text": "\xff"}']
    (folder / "pages").mkdir(parents=True)
    (folder / "lines.jsonl").write_bytes(b"\n".join([*lines(), *bad]) + b"\n")
    frame = "<html><body><main><p>{}</p></main></body></html>"
    for number, text in enumerate(half()):
        (folder / f"pages/{number:03}.html").write_text(frame.format(text))
    pages = map(response, map(frame.format, half()))
    records = [record("warcinfo", b"software: x\r\n"), *pages]
    (folder / "crawl.warc.gz").write_bytes(b"".join(map(gzip.compress, records)))
    dump = [page(number, f"Page {number}", text) for number, text in enumerate(half(), 1)]
    (folder / "dump.xml.bz2").write_bytes(multistream(dump, pages_a_stream=9))
    with bz2.open(folder / "more.jsonl.bz2", "wb") as file:
        file.write(b"\n".join(lines()))


RAW = ("lines.jsonl", "pages", "crawl.warc.gz", "dump.xml.bz2", "more.jsonl.bz2")


@pytest.fixture(scope="module")
def workspaces(tmp_path_factory: pytest.TempPathFactory, sampled: Path) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("filtered")
    write_raw(folder / "raw")
    config = {
        **CONFIG,
        "sample_corpus": {},
        "tokenizer": {"path": str(sampled / "tokenizer")},
        "tokenize": {
            "on_bad_document": "quarantine",
            "max_bad_fraction": 1,
            "filters": FILTERS,
            "deduplicate": "data",
            "near_duplicates": "fineweb",
            "repeats": "paragraphs",
        },
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    yield folder
    shutil.rmtree(folder)


def build(workspaces: Path, *, shard_bytes: int, workers: int, max_jobs: int = 5) -> Path:
    """Build the data; five jobs a stage are one for each corpus."""
    folder = workspaces / f"{shard_bytes}-{workers}"
    folder.mkdir()
    make_workspace(folder)
    (folder / "raw").symlink_to(workspaces / "raw")
    rows = [f"corpus{number}\traw/{name}\t1\n" for number, name in enumerate(RAW)]
    (folder / "corpora.tsv").write_text("corpus\tfiles\tweight\n" + "".join(rows))
    config = yaml.safe_load((workspaces / "config.yaml").read_text())
    plan = {"shard_bytes": shard_bytes, "merged_bytes": 10**9, "max_jobs": max_jobs}
    (folder / "my.yaml").write_text(yaml.safe_dump({**config, "plan": plan}))
    threads = [f"{rule}={workers}" for rule in ("tokenize", "find_near_duplicates")]
    options = ["--cores", f"{max(workers, 2)}", "--set-threads", *threads]
    result = snakemake(folder, *options, *MINE, "data")
    assert result.returncode == 0, result.stdout + result.stderr
    return folder / "results/data"


def datasets(data: Path) -> dict[str, bytes]:
    """Tokens and documents of the merged datasets, which are the same for any shards."""
    paths = [path for kind in ("bin", "idx") for path in data.glob(f"merged/*.{kind}")]
    return {path.name: path.read_bytes() for path in paths}


def stages(data: Path) -> dict[str, bytes]:
    """The files that shards decide, too."""
    kinds = (".rows", ".keys", ".parquet", ".bin", ".idx", ".sources", ".jsonl")
    paths = (path for path in data.rglob("*") if path.suffix in kinds)
    return {str(path.relative_to(data)): path.read_bytes() for path in paths}


def twins(data: Path) -> list[dict[str, Any]]:
    """Near-duplicates by their raw files."""
    columns = ["file", "byte", "line", "kept_file", "kept_byte", "kept_line"]
    table = pq.read_table(data / "near_duplicates/all.parquet", columns=columns)
    rows: list[dict[str, Any]] = table.to_pylist()
    return rows


def counts(data: Path) -> list[dict[str, Any]]:
    entries = json.loads((data / "metadata.json").read_text())
    keys = ("corpus", "total_num_docs", "empty_documents", "filters", *COUNTS)
    return [{key: rounded(entry[key]) for key in keys} for entry in entries]


def rounded(value: Any) -> Any:
    """Sums of scores depend on the order in which shards are added, in their last digits."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return f"{value:.9g}" if isinstance(value, float) else value


@pytest.mark.grid
@pytest.mark.slow
def test_bytes_are_the_same_for_any_workers_and_shards(workspaces: Path) -> None:
    first = build(workspaces, shard_bytes=60_000, workers=1)
    expected = {name: function(first) for name, function in PRODUCTS.items()}
    for entry in counts(first):
        kept = entry["total_num_docs"] + entry["empty_documents"]
        assert entry["documents_in"] == kept + sum(entry[key] for key in COUNTS[1:])
    assert all(sum(entry[key] for entry in counts(first)) > 2 for key in COUNTS)
    assert len(twins(first)) > 50
    all_stages = stages(first)
    for workers in (3, 7):
        assert stages(build(workspaces, shard_bytes=60_000, workers=workers)) == all_stages
    for shard_bytes, max_jobs in ((20_000, 12), (10**9, 5)):
        other = build(workspaces, shard_bytes=shard_bytes, workers=2, max_jobs=max_jobs)
        for name, function in PRODUCTS.items():
            assert function(other) == expected[name], name
        assert stages(other).keys() != all_stages.keys()


PRODUCTS = {"datasets": datasets, "near-duplicates": twins, "counts": counts}
