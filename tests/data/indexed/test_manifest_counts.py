"""Counts of filters add up, and merged datasets have the sums."""

import json
from itertools import islice
from pathlib import Path

import pytest

from tests.support.filtered import FILTERS, documents, run, write
from tests.support.wikipedia_dumps import page, xml
from tokamake.data.indexed.describe import describe
from tokamake.data.indexed.manifest import read_manifest, write_manifest
from tokamake.data.indexed.manifest_counts import (
    count_faults,
    left_out,
    merge_counts,
    verdicts,
)
from tokamake.data.indexed.merge import merge
from tokamake.errors import UserError


def test_merged_counts_are_sums_and_describe_shows_them(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = write(workspace / "raw.jsonl", documents(600))
    whole = run(workspace, [raw], "whole", filters=FILTERS)
    for number, part in enumerate(("0:9000", "9000:30123", "30123:")):
        run(workspace, [raw], f"part{number}", filters=FILTERS, byte_range=part)
    merge([workspace / f"part{number}" for number in range(3)], output=workspace / "merged")
    merged = read_manifest(workspace / "merged")
    assert merged["filters"] == whole["filters"]
    assert merged["filtered_documents"] == whole["filtered_documents"]
    capsys.readouterr()
    describe([workspace / "merged"])
    dropped = whole["filters"][0]["dropped"]["number of characters below 50"]
    reason = "number of characters below 50"
    line = f"length (min_characters: 50): {reason}: {dropped['documents']} documents, "
    shown = capsys.readouterr().out
    assert line in shown
    documents_read = f"600 documents read: {whole['filtered_documents']} dropped by filters"
    assert f"{workspace / 'merged'}: {documents_read}\n" in shown
    describe([workspace / "merged"], output=workspace / "metadata.json")
    (metadata,) = json.loads((workspace / "metadata.json").read_text())
    assert metadata["filters"] == whole["filters"]
    run(workspace, [raw], "unfiltered")
    merge([workspace / "whole", workspace / "unfiltered"], output=workspace / "mixed")
    mixed = read_manifest(workspace / "mixed")
    assert mixed["documents_in"] == 1200
    assert mixed["documents"] == 1200 - mixed["filtered_documents"] - mixed["empty_documents"]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"documents_in": 599}, "documents_in is 599, but documents and empty, quarantined, dup"),
        ({"filtered_documents": 3}, "filters dropped 490 documents, but filtered_documents is 3"),
        ({"empty_documents": 5}, "documents_in is 600, but documents and empty"),
    ],
)
def test_counts_that_do_not_add_up_are_a_fault(
    workspace: Path, change: dict[str, int], fault: str
) -> None:
    raw = write(workspace / "raw.jsonl", documents(600))
    manifest = run(workspace, [raw], "out", filters=FILTERS)
    assert [*count_faults(manifest)] == []
    write_manifest(workspace / "out.json", manifest | change)
    with pytest.raises(UserError, match=rf"out\.json: counts do not add up: {fault}"):
        describe([workspace / "out"])
    manifest["filters"][1]["documents"] += 1
    assert len([*count_faults(manifest)]) == 2


def test_tables_list_the_most_frequent_verdict_first() -> None:
    dropped = {"few": {"documents": 1, "value": 4}, "many": {"documents": 3, "characters": 9}}
    entry = {"filter": "f", "options": {"a": 1}, "documents": 10, "changed": {}, "metrics": {}}
    listed = verdicts(merge_counts([[entry | {"dropped": dropped}]]))
    assert [(row.reason, row.share, row.mean) for row in listed] == [
        ("many", 0.3, None),
        ("few", 0.1, 4.0),
    ]
    assert [row.reason for row in verdicts([entry | {"dropped": {}}])] == ["none dropped"]
    assert list(islice(verdicts([]), 1)) == []
    metrics = {f"score of {code}": {"documents": 9, "value": 4.5} for code in "abcdefghij"}
    rare = {"score of x": {"documents": 1, "value": 1}, "score of y": {"documents": 3, "value": 1}}
    rows = verdicts([entry | {"dropped": {}, "metrics": rare | metrics}])
    assert [row.reason for row in rows[:10]] == [*metrics]
    assert [(row.reason, row.documents, row.mean) for row in rows[10:]] == [
        ("2 rarer metrics, see the manifest", 4, None)
    ]


def test_records_that_are_no_documents_are_counted_by_kind(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    redirect = page(2, "Two", "#REDIRECT [[One]]")
    pages = [page(1, "One", "text"), redirect, page(3, "Talk:One", "x", ns=1)]
    for name in ("a", "b"):
        (workspace / f"{name}.xml").write_bytes(xml(pages))
        pages.append(redirect)
        run(workspace, [workspace / f"{name}.xml"], name)
    merge([workspace / "a", workspace / "b"], output=workspace / "merged")
    capsys.readouterr()
    describe([workspace / "a", workspace / "merged"])
    assert [line for line in capsys.readouterr().out.splitlines() if "skipped" in line] == [
        f"{workspace}/{name}: records skipped: {numbers}"
        for name, numbers in (
            ("a", "1 redirects, 1 pages of other namespaces"),
            ("merged", "3 redirects, 2 pages of other namespaces"),
        )
    ]


def test_documents_are_counted_by_the_cause_that_left_them_out() -> None:
    none = {"empty_documents": 0, "quarantined_documents": 0, "duplicate_documents": 0}
    assert left_out({}) == left_out({"documents_in": 9, **none}) == left_out(none) == ""
    some = {"documents_in": 2018, "empty_documents": 2, "duplicate_documents": 14}
    assert left_out(some) == "2,018 documents read: 14 equal duplicates, 2 empty"
    some |= {"near_duplicate_documents": 4, "quarantined_documents": 1, "filtered_documents": 3}
    assert left_out(some) == (
        "2,018 documents read: 10 equal duplicates, 4 near-duplicates, 2 empty, 1 quarantined, "
        "3 dropped by filters"
    )
