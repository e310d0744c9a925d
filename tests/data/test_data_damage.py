"""Random damage to the files of a data folder: none is read as if it were whole.

The plan, batch files, shards and merged datasets are read as the next stage or plan reads them.
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.damage import OUTCOMES, sweep, table
from tests.support.faults import Inject
from tokamake.data.corpus.plan import plan
from tokamake.data.corpus.plan_file import read_plan
from tokamake.data.indexed.check_dataset import check_dataset
from tokamake.data.indexed.job_batch import find_batch_fault, write_batch
from tokamake.data.indexed.merge import merge
from tokamake.errors import UserError

SEVERAL = [1, pytest.param(70, marks=pytest.mark.grid)]
"""Faults of a file."""
FILES = ("bin", "idx", "sources", "json")


def read_shards(shards: list[Path], output: Path) -> Any:
    """What `merge` makes of shards."""
    merge(shards, output=output, corpus="code")
    found = {name: output.with_suffix(f".{name}").read_bytes() for name in FILES[:3]}
    for name in FILES:
        output.with_suffix(f".{name}").unlink()
    return found


def read_merged(prefix: Path) -> Any:
    """The first fault that `describe` finds."""
    if faults := check_dataset(prefix, read_tokens=True).faults:
        raise UserError(faults[0])


def read_batch(path: Path, folder: Path) -> Any:
    """The fault for which the workflow makes a batch again."""
    if fault := find_batch_fault(path, str(folder)):
        raise UserError(fault)


@pytest.mark.fault("damaged file")
@pytest.mark.parametrize("faults_a_file", SEVERAL)
def test_no_damage_is_silent(
    workspace: Path, ours: list[Path], faults_a_file: int, inject: Inject
) -> None:
    *shards, merged = ours
    (workspace / "corpora.tsv").write_text(
        f"corpus\tfiles\tweight\ncode\t{workspace}/raw/code/*.jsonl\t1\n"
    )
    plan(corpora=workspace / "corpora.tsv", output=workspace / "plan.json")
    write_batch(workspace / "shards.json", "code-0", folder=workspace, prefixes=shards)
    write_batch(workspace / "merged.json", "code-0", folder=workspace, prefixes=[merged])
    readers: dict[Path, Any] = {workspace / "plan.json": lambda: read_plan(workspace / "plan.json")}
    for name in ("shards", "merged"):
        path = workspace / f"{name}.json"
        readers[path] = lambda path=path: read_batch(path, workspace)
    for name in FILES:
        for prefix in shards:
            readers[prefix.with_suffix(f".{name}")] = lambda: read_shards(
                shards, workspace / "again"
            )
        readers[merged.with_suffix(f".{name}")] = lambda: read_merged(merged)
    expected = {path: reader() for path, reader in readers.items()}

    def outcome(path: Path) -> str:
        try:
            found = readers[path]()
        except UserError as error:
            is_named = str(path) in str(error) or str(path.with_suffix("")) in str(error)
            return "refused" if is_named else f"unnamed: {error}"
        return "harmless" if found == expected[path] else "silent"

    counts = sweep(
        readers,
        outcome,
        everything=[*readers],
        group=lambda path: str(path.relative_to(workspace)),
        faults_a_file=faults_a_file,
        inject=inject,
    )
    print(table(counts))
    datasets = [counts[str(path.relative_to(workspace))] for path in readers][3:]
    assert {*sum(datasets, Counter())} == {OUTCOMES[0]}
