"""The dry run names filters that can drop the copy of a text that `deduplicate` has kept."""

from typing import Any

import pytest

from tests.support.workflow_configs import RAW_TABLE, add_raw, read_config

pytestmark = pytest.mark.usefixtures("workspace_here")

BY_FIELD = {"regex": {"field": "meta.url", "drop": "spam"}}


def noted(capsys: pytest.CaptureFixture[str], table: str = RAW_TABLE, **tokenize: Any) -> str:
    """What the dry run says about `deduplicate`."""
    capsys.readouterr()
    add_raw("a.jsonl")
    read_config(table=table, sample_corpus={}, tokenize=tokenize, is_main_process=True)
    lines = capsys.readouterr().err.splitlines()
    return "\n".join(line for line in lines if "tokenize.deduplicate" in line)


def test_a_filter_by_a_field_after_deduplication_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = noted(capsys, deduplicate="data", filters=[{"length": {"min_words": 2}}, BY_FIELD])
    assert line.count("\n") == 0
    assert "filters by another field (web: meta.url) can drop it, and all copies are lost" in line
    table = RAW_TABLE.replace("weight\n", "weight\tfilters\n")
    own = table.replace("\t1\n", "\t1\tregex: {field: url, drop: spam}\n")
    assert "(web: url)" in noted(capsys, table=own, deduplicate=True)
    none = table.replace("\t1\n", "\t1\t[]\n")
    assert not noted(capsys, table=none, deduplicate=True, filters=[BY_FIELD])


def test_filters_by_the_text_and_near_duplicates_have_no_such_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert not noted(capsys, deduplicate=True, filters=[{"regex": {"drop": "spam"}}])
    assert not noted(capsys, near_duplicates="fineweb", filters=[BY_FIELD])
    assert not noted(capsys, filters=[BY_FIELD])
