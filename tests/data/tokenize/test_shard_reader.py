"""Each bad document goes to the quarantine with its place, or stops the stage; none is lost."""

import base64
import inspect
import json
import random
from pathlib import Path

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from tests.support.tokenized import QUARANTINE, tokenized
from tokamake.config.data import TokenizeSettings
from tokamake.data.corpus.documents import Fields
from tokamake.data.indexed.manifest import find_fault, read_manifest
from tokamake.data.indexed.paths import quarantine_path
from tokamake.data.readers import _input
from tokamake.data.tokenize.shard_options import ShardOptions
from tokamake.data.tokenize.tokenize import tokenize
from tokamake.data.tokenize.tokenize_batch import tokenize_batch
from tokamake.errors import UserError

BAD_LINES = [
    b'{"text": \n',
    b'{"body": "no text"}\n',
    b'{"text": 5}\n',
    b'{"text": "\xff\xfe"}\n',
    b'{"text": "\\ud800"}\n',
    b'{"text": "a\0b"}\n',
    b"[" * 5000 + b"\n",
]


def test_every_document_is_written_or_empty_or_quarantined(workspace: Path) -> None:
    random_numbers = random.Random(1)
    lines = []
    expected = {"documents": 0, "empty_documents": 0, "quarantined_documents": 0}
    for number in range(400):
        kind = random_numbers.choice(["documents"] * 3 + list(expected) + ["blank"])
        if kind == "blank":
            lines.append(random_numbers.choice([b"\n", b" \r\n"]))
            continue
        expected[kind] += 1
        if kind == "quarantined_documents":
            lines.append(random_numbers.choice(BAD_LINES))
        else:
            text = "" if kind == "empty_documents" else f"document {number}\u2028\x85"
            lines.append(json.dumps({"text": text}).encode() + b"\r\n")
    raw = workspace / "some.jsonl"
    raw.write_bytes(b"".join(lines)[:-1])
    tokenized(workspace, raw, **QUARANTINE)
    manifest = read_manifest(workspace / "pair")
    assert {key: manifest[key] for key in expected} == expected
    assert manifest["documents_in"] == sum(expected.values())
    entries = [
        json.loads(line) for line in (workspace / "pair.quarantine.jsonl").read_text().splitlines()
    ]
    assert len(entries) == expected["quarantined_documents"]
    for entry in entries:
        raw_line = base64.b64decode(entry.get("raw_base64", "")) or entry["raw"].encode()
        assert raw_line == lines[entry["line"] - 1].rstrip(b"\n")
        assert entry["reason"]
    assert any("raw_base64" in entry for entry in entries)
    # Without bad documents, the old quarantine file is removed.
    raw.write_text('{"text": "good"}\n')
    tokenized(workspace, raw)
    assert not (workspace / "pair.quarantine.jsonl").exists()


def test_far_into_a_file_lines_count_from_the_start_of_the_range(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = workspace / "some.jsonl"
    raw.write_text('{"text": "a"}\n' * 3 + "bad\n")
    for counted, unit, number in ((1 << 34, "line", 4), (2, "line_in_range", 2)):
        monkeypatch.setattr(_input, "_COUNTED_BYTES", counted)
        tokenized(workspace, raw, **QUARANTINE, byte_range="15:")
        entry = json.loads((workspace / "pair.quarantine.jsonl").read_text())
        assert (entry[unit], entry["byte"]) == (number, 42)


def test_too_many_bad_documents_stop_the_stage(workspace: Path) -> None:
    raw = workspace / "some.jsonl"
    raw.write_text('{"text": "a"}\n' * 8 + "bad\n" * 2)
    with pytest.raises(
        UserError, match=r"2 of 10 documents of the file are bad, more than max_bad_fraction"
    ):
        tokenized(
            workspace, raw, name="out/pair", on_bad_document="quarantine", max_bad_fraction=0.19
        )
    assert not list((workspace / "out").iterdir())


def test_a_bad_document_leaves_no_file(workspace: Path) -> None:
    raw = workspace / "some.jsonl"
    raw.write_text('{"text": "a"}\n{"text": 1}\n')
    with pytest.raises(UserError, match=r"some\.jsonl:2"):
        tokenized(workspace, raw, name="out/pair")
    assert not list((workspace / "out").iterdir())


def test_a_file_name_may_be_invalid_utf8(workspace: Path) -> None:
    raw = workspace / "n\udcff.jsonl"
    raw.write_text('{"text": "one"}\nbad\n')
    tokenized(workspace, raw, **QUARANTINE)
    assert read_manifest(workspace / "pair")["inputs"][0]["path"] == str(raw)
    assert find_fault(workspace / "pair") is None
    quarantine_path(workspace / "pair").unlink()
    assert "quarantine.jsonl is missing" in (find_fault(workspace / "pair") or "")


def test_bad_values_of_tables_are_quarantined(workspace: Path) -> None:
    table = arrow.table({"text": arrow.array([b"good", b"\xff\xfe"], arrow.binary())})
    parquet.write_table(table, workspace / "some.parquet")
    tokenized(workspace, "some.parquet", **QUARANTINE)
    (line,) = quarantine_path(workspace / "pair").read_text().splitlines()
    entry = json.loads(line)
    assert (entry["row"], base64.b64decode(entry["raw_base64"])) == (1, b"\xff\xfe")


@pytest.mark.parametrize("bad", ["<p>502</p>\n", '{"error": "not found"}\n', '{"a"\n' * 5])
def test_a_file_without_good_documents_is_damaged(workspace: Path, bad: str) -> None:
    names = [str(workspace / name) for name in ("good.jsonl", "bad.jsonl")]
    for name, content in zip(names, ('{"text": "a"}\n' * 1000, bad), strict=True):
        Path(name).write_text(content)
    with pytest.raises(UserError, match=r"bad\.jsonl.*no document of the file is good"):
        tokenized(workspace, *tuple(names), **QUARANTINE, format="jsonl")


def test_the_fraction_counts_for_each_file(workspace: Path) -> None:
    (workspace / "bad.jsonl").write_text('{"text": "a"}\n{\n')
    (workspace / "good.jsonl").write_text('{"text": "a"}\n' * 1000)
    (workspace / "latin.txt").write_bytes(b"\xe9")  # each text file is one document

    def run(name: str, **options: float) -> None:
        tokenized(workspace, "good.jsonl", name, on_bad_document="quarantine", **options)

    with pytest.raises(
        UserError, match=r"bad\.jsonl:2.*; 1 of 2 documents of the file are bad, more than"
    ):
        run("bad.jsonl")
    run("bad.jsonl", max_bad_fraction=0.5)
    assert [file["quarantined"] for file in read_manifest(workspace / "pair")["inputs"]] == [0, 1]
    run("latin.txt")


def test_all_defaults_of_the_fraction_are_equal() -> None:
    default = TokenizeSettings().max_bad_fraction
    for function in (tokenize, tokenize_batch):
        assert inspect.signature(function).parameters["max_bad_fraction"].default == default
    assert ShardOptions(fields=Fields()).max_bad_fraction == default
