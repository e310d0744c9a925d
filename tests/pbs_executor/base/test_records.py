"""Records on disk: interrupted writes and claims."""

from pathlib import Path

import pytest

from snakemake_executor_plugin_pbs.base.records import Record, Records


def test_a_record_survives_an_interrupted_write(tmp_path: Path) -> None:
    records = Records(tmp_path)
    record = Record("t", "n.t", "k", ("/out",), "f")
    records.write(record)
    (tmp_path / "k" / "record.json.1234").write_text('{"token": "t2')
    assert list(records.load()) == [record]


def test_only_one_can_claim_a_submission(tmp_path: Path) -> None:
    records = Records(tmp_path)
    record = Record("t", "n.t", "k", (), "")
    records.write(record)
    records.path(record, "claim").symlink_to("7.pbs01")
    assert not records.give_up(record)
    assert records.claimed_by(record) == "7.pbs01"
    other = Record("u", "n.u", "k", (), "")
    assert records.give_up(other)
    assert records.give_up(other)
    with pytest.raises(FileExistsError):
        records.path(other, "claim").symlink_to("8.pbs01")
