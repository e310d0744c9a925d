"""Random damage to records of what outputs were made from: it ends no run of Snakemake."""

from pathlib import Path
from typing import Any

import pytest
from snakemake.persistence import RECORD_FORMAT_VERSION, MetadataRecord

from tests.support.damage import sweep, table
from tests.support.faults import Inject
from tokamake.workflow.snakemake_internals import _Records

OUTPUT = "results/mine/train.json"
RECORD = {
    "record_format_version": RECORD_FORMAT_VERSION,
    "rule": "train",
    "code": "tokamake train --config {input.config:q}",
    "input": ["results/mine/run.yaml", "results/mine/index"],
    "params": ["'{\"train_steps\": 64}'", "'mine'"],
    "starttime": 1764333000.5,
    "endtime": 1764333100.5,
    "incomplete": False,
}


@pytest.mark.fault("damaged file")
@pytest.mark.parametrize("faults_a_file", [70])
def test_a_damaged_record_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faults_a_file: int, inject: Inject
) -> None:
    monkeypatch.chdir(tmp_path)
    records = object.__new__(_Records)
    vars(records).update(_metadata_path=str(tmp_path / "metadata"), _max_len=255)
    for output in (OUTPUT, "results/mine/other.json"):
        records._write_record(output, MetadataRecord.model_validate({**RECORD, "rule": output}))
    (path,) = Path("results/mine/.made_from").glob("train*")

    def read() -> Any:
        records._clear_cache()
        record = records._read_record(OUTPUT)
        return record and record.model_dump()

    expected = read()
    assert expected["params"] == RECORD["params"]

    def outcome(_: Path) -> str:
        found = read()
        if not found:  # as if an earlier version had made it
            return "starts again"
        decisive = ("params", "input", "code", "incomplete", "record_format_version")
        is_same = all(found[key] == expected[key] for key in decisive)
        return "harmless" if is_same else "says so"  # its job runs again

    counts = sweep(
        [path],
        outcome,
        everything=[*path.parent.iterdir()],
        group=str,
        faults_a_file=faults_a_file,
        inject=inject,
    )
    print(table(counts))
    assert counts[str(path)]["says so"] > counts[str(path)]["harmless"]
