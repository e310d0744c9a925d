"""Broken data of a finished workspace are rebuilt; added files change no finished data."""

import os
from itertools import product
from pathlib import Path

import pytest

from tests.support.grids import params
from tests.support.workflows import CORPORA, MINE, jobs, snakemake, snakemake_alone

AFTER_MERGE = [
    "describe", "weigh", "index", "resolve", "train", "model_card", "export_hf", "evaluate",
    "generate", "report",
]  # fmt: skip


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[min(50, len(content) // 2)] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.grid
@pytest.mark.fault("damaged data")
@pytest.mark.slow
def test_a_broken_shard_and_its_dependents_are_rebuilt(finished: Path) -> None:
    shard = finished / "results/data/shards/docs/00001.bin"
    content = shard.read_bytes()
    flip(shard)
    result = snakemake(finished, "-n", *MINE, "report")
    assert "docs/00001.bin" in result.stderr
    assert jobs(result) == {"tokenize": 1, "merge": 1, **dict.fromkeys(AFTER_MERGE, 1)}
    assert snakemake_alone(finished, *MINE, "report").returncode == 0
    assert shard.read_bytes() == content
    assert "Nothing to be done" in snakemake(finished, *MINE, "report").stderr


def restore(path: Path, content: bytes, status: os.stat_result) -> None:
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


BROKEN = {
    "shards/docs/00001.bin": {"tokenize": 1, "merge": 1},
    "shards/docs/00001.idx": {"tokenize": 1, "merge": 1},
    "shards/docs/00001.sources": {"tokenize": 1, "merge": 1},
    "shards/docs/00001.json": {"tokenize": 1, "merge": 1},
    "batches/tokenize/docs-00001.json": {"tokenize": 1, "merge": 1},
    "merged/docs-0000_text_document.bin": {"merge": 1},
}
DAMAGES = [*product(BROKEN, ("deleted", "damaged"))]
OTHERS = ("shards/docs/00001.idx", "shards/docs/00001.json")
"""Files of a shard beside those that `make test` damages."""


@pytest.mark.fault("damaged data")
@pytest.mark.slow
@pytest.mark.parametrize(
    "case", params(DAMAGES, [(name, "damaged") for name in BROKEN if name not in OTHERS]), ids=str
)
def test_any_broken_file_of_an_indexed_dataset_is_rebuilt(
    finished: Path, case: tuple[str, str]
) -> None:
    name, damage = case
    path = finished / "results/data" / name
    content, status = path.read_bytes(), path.stat()
    path.unlink() if damage == "deleted" else flip(path)
    planned = jobs(snakemake(finished, "-n", *MINE, "report"))
    restore(path, content, status)
    assert planned == {**BROKEN[name], **dict.fromkeys(AFTER_MERGE, 1)}


@pytest.mark.grid
@pytest.mark.slow
def test_added_files_do_not_change_finished_datasets(finished: Path) -> None:
    def datasets() -> dict[str, tuple[bytes, int]]:
        paths = (finished / "results/data").glob("[ms]*/**/*.bin")
        return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}

    def add_file(number: int) -> None:
        (finished / f"extra{number}.jsonl").write_text('{"text": "one more document"}\n' * 50)
        (finished / "corpora.tsv").write_text(CORPORA.replace("docs/*", "docs/* extra*.jsonl"))
        planned = jobs(snakemake(finished, "-n", *MINE, "data"))
        assert planned == {"tokenize": 1, "merge": 1, "describe": 1, "weigh": 1, "data": 1}
        assert snakemake(finished, *MINE, "data").returncode == 0
        assert "Nothing to be done" in snakemake(finished, *MINE, "data").stderr

    before = datasets()
    for number in range(2):
        add_file(number)
    after = datasets()
    assert {path: after[path] for path in before} == before
    assert len(after) == len(before) + 4
