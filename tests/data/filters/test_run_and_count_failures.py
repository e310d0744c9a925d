"""A filter that fails or never ends is one line, or its document is quarantined."""

import json
import sys
from pathlib import Path

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from tests.support.filtered import run, write
from tokamake.data.indexed.manifest_counts import verdicts
from tokamake.errors import SignalExit, UserError


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return 1 / 0", r"failed \(ZeroDivisionError: division by zero\); fix the filter"),
        ("return 3", r"failed \(TypeError: apply returned 3; return None to keep .*\); fix the"),
        ("document.text = 5", r"failed \(TypeError: document.text is 5; assign a text\); fix the"),
        ("document.text = '\\ud800'", r"failed \(UnicodeEncodeError: .*\); fix the filter"),
        ("document.metrics['x'] = 'y'", r"failed \(TypeError: .*\); fix the filter"),
        ("document.metrics['x'] = float('nan')", r"failed \(ValueError: nan .*\); fix the filter"),
        ("return Drop('a', float('inf'))", r"failed \(ValueError: inf .*\); fix the filter"),
        ("raise SystemExit(3)", r"failed \(SystemExit: 3\); fix the filter"),
        ("raise KeyError('a', 'b\\nc')", r"failed \(KeyError: \('a', 'b.*c'\)\); fix the filter"),
    ],
)
def test_a_filter_that_fails_is_one_line(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, body: str, message: str
) -> None:
    monkeypatch.chdir(workspace)
    name = f"failing{abs(hash(body))}.py"
    head = "from tokamake.data.filters import *\nfrom tokamake.data.filters import DocumentFilter\n"
    Path(name).write_text(
        f"{head}class Filter(DocumentFilter):\n    def apply(self, document):\n        {body}\n"
    )
    with pytest.raises(UserError, match=rf"raw\.jsonl:1: filter {name} {message}"):
        run(workspace, [write(workspace / "raw.jsonl", [{"text": "a"}])], "out", filters=name)
    assert not list(workspace.glob("out*"))


@pytest.mark.parametrize("end", [KeyboardInterrupt, SignalExit])
def test_the_end_of_a_job_is_no_failure_of_the_filter_that_runs(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, end: type[BaseException]
) -> None:
    def apply(*_: object) -> None:
        raise end

    monkeypatch.setattr("tokamake.data.filters.length.Filter.apply", apply)
    raw = write(workspace / "raw.jsonl", [{"text": "a"}])
    options = {"on_bad_document": "quarantine", "max_bad_fraction": 1}
    with pytest.raises(end):
        run(workspace, [raw], "out", filters="length: {min_words: 2}", **options)


def test_a_filter_that_exits_in_setup_is_one_line(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokamake.data.filters.length.Filter.setup", lambda _: sys.exit(3))
    raw = write(workspace / "raw.jsonl", [{"text": "a"}])
    with pytest.raises(UserError, match=r"filter length: setup failed \(SystemExit: 3\); fix"):
        run(workspace, [raw], "out", filters="length: {min_words: 2}")


FAILING = """
import sys
import time
from tokamake.data.filters import DocumentFilter

class Filter(DocumentFilter):
    def apply(self, document):
        if "exit" in document.text:
            sys.exit(3)
        if "broken" in document.text:
            raise ValueError("no such word")
        if "slow" in document.text:
            try:
                while True:
                    time.sleep(0.01)
            except Exception:
                pass
"""
ENDLESS = "regex: {drop: '^(a+)+$'}"


def test_documents_on_which_a_filter_fails_are_quarantined(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workspace)
    Path("failing.py").write_text(FAILING)
    endless = "a" * 60 + "!"
    texts = ["good", "broken", endless, "slow", "short", "good again", "broken again", "lorem"]
    texts.append("exit")
    raw = write(workspace / "raw.jsonl", [{"text": text} for text in texts])
    filters = f"regex: {{drop: lorem}}, failing.py, {ENDLESS}, length: {{min_words: 2}}"
    options = {"on_bad_document": "quarantine", "max_bad_fraction": 1, "filter_seconds": 0.2}
    manifest = run(workspace, [raw], "out", filters=filters, **options)
    lines = Path("out.quarantine.jsonl").read_text().splitlines()
    failed = {(entry["line"], entry["reason"]) for entry in map(json.loads, lines)}
    error = "filter failing.py failed (ValueError: no such word); fix the filter"
    limit = "ran longer than filter_seconds 0.2; fix the filter or raise filter_seconds"
    assert failed == {
        *((line, error) for line in (2, 7)),
        (3, f"filter regex {limit}"),
        (4, f"filter failing.py {limit}"),
        (9, "filter failing.py failed (SystemExit: 3); fix the filter"),
    }
    assert manifest["filter_seconds"] == 0.2
    counts = manifest["filters"]
    assert [each["documents"] for each in counts] == [9, 8, 4, 3]
    assert counts[1]["quarantined"] == {
        "ValueError": {"documents": 2, "characters": 18},
        "time limit": {"documents": 1, "characters": 4},
        "SystemExit": {"documents": 1, "characters": 4},
    }
    (first, *_) = [row for row in verdicts(counts) if row.filter == "failing.py"]
    assert (first.reason, first.documents) == ("quarantined: ValueError", 2)
    assert counts[2]["quarantined"] == {"time limit": {"documents": 1, "characters": 61}}
    assert (manifest["documents"], manifest["quarantined_documents"]) == (1, 5)
    assert (manifest["documents_in"], manifest["filtered_documents"]) == (9, 3)


def test_an_endless_filter_stops_with_its_document(workspace: Path) -> None:
    raw = write(workspace / "raw.jsonl", [{"text": "good"}, {"text": "a" * 60 + "!"}])
    message = (
        r"raw\.jsonl:2: filter regex ran longer than filter_seconds 0\.1; fix the filter or raise "
        "filter_seconds, or set on_bad_document to quarantine"
    )
    with pytest.raises(UserError, match=message):
        run(workspace, [raw], "out", filters=ENDLESS, filter_seconds=0.1)
    assert not list(workspace.glob("out*"))


def test_a_file_on_which_a_filter_always_fails_is_an_error(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workspace)
    Path("failing.py").write_text(FAILING)
    raw = write(workspace / "raw.jsonl", [{"text": "broken"}] * 3)
    options = {"on_bad_document": "quarantine", "max_bad_fraction": 1}
    with pytest.raises(UserError, match=r"no such word.*or a filter fails on each; fetch it"):
        run(workspace, [raw], "out", filters="failing.py", **options)


def test_an_unknown_column_of_a_table_is_one_line(workspace: Path) -> None:
    table = workspace / "table.parquet"
    parquet.write_table(arrow.table({"text": ["a"]}), table)
    with pytest.raises(UserError, match='no column "url" among text; fix the filters'):
        run(workspace, [table], "out", filters="regex: {field: url, drop: a}")
