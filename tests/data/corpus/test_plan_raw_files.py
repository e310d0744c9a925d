"""A plan of raw files: they are cut and checked by their content."""

import gzip
import os
from pathlib import Path

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from tests.data.corpus.test_plan import SETTINGS, corpus, plan_files
from tokamake.config.data import TokenizeSettings
from tokamake.data.corpus.corpora import read_corpora
from tokamake.data.corpus.plan import make_plan
from tokamake.data.corpus.plan_file import Plan
from tokamake.data.readers import _extractor
from tokamake.errors import UserError


@pytest.fixture
def raw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder raw/ in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "raw").mkdir()
    return tmp_path / "raw"


def test_large_files_are_cut_by_content_not_by_name(raw: Path) -> None:
    line = b'{"text": "' + b"x" * 300 + b'"}\n'
    (raw / "1.data").write_bytes(line)
    (raw / "2.jsonl.gz").write_bytes(gzip.compress(line, 0))
    (raw / "3.txt").write_bytes(b"plain text\n" * 30)
    for name in ("4.jsonl", "5.parquet"):
        parquet.write_table(arrow.table({"text": ["x"] * 300}), raw / name)
    new_plan = make_plan([corpus("raw/*")], SETTINGS, declared={})
    ranges: dict[str, list[str]] = {}
    for shard in new_plan.shards:
        ranges.setdefault(shard.files[0], []).append(shard.byte_range)
    assert ranges["raw/1.data"] == ["0:78", "78:156", "156:234", "234:"]
    assert ranges["raw/2.jsonl.gz"] == [""]
    assert ranges["raw/3.txt"] == [""]
    assert len(ranges["raw/4.jsonl"]) > 1
    # The plan multiplies the size of compressed files.
    packed = int((raw / "2.jsonl.gz").stat().st_size * 3.5 * 0.5)
    assert {s.files[0]: s.bytes for s in new_plan.shards}["raw/2.jsonl.gz"] == packed
    parts = [shard.bytes for shard in new_plan.shards if shard.files == ("raw/5.parquet",)]
    whole = (raw / "5.parquet").stat().st_size * 3 * 0.5
    assert whole - len(parts) < sum(parts) <= whole


def test_a_changed_or_touched_file_changes_only_the_stamp_of_its_shard(raw: Path) -> None:
    for number in range(3):
        (raw / f"{number}.jsonl").write_text("{}\n" * 20)
    old = plan_files({})
    os.utime(raw / "1.jsonl", ns=(1, 1))
    (raw / "2.jsonl").write_text("{}\n" * 21)
    new = plan_files({}, old)
    changed = [b.name for a, b in zip(old.shards, new.shards, strict=True) if a.stamp != b.stamp]
    assert changed == ["a/00001", "a/00002"]
    assert plan_files({}, new) == new


def test_a_cut_file_that_no_longer_fits_is_cut_again(raw: Path) -> None:
    line = b'{"text": "' + b"x" * 39 + b'"}\n'
    for number in range(3):
        (raw / f"{number}.jsonl").write_bytes(line * 5)
    old = plan_files({})
    assert [s.byte_range for s in old.shards] == ["0:86", "86:173", "173:"] * 3
    (raw / "0.jsonl").write_bytes(line * 9)  # longer: the last range is open
    (raw / "1.jsonl").write_bytes(line * 3)
    (raw / "2.jsonl").write_bytes(gzip.compress(line * 9, 0))
    new = plan_files({}, old)
    assert [(s.name, s.files[0], s.byte_range) for s in new.shards] == [
        ("a/00000", "raw/0.jsonl", "0:86"),
        ("a/00001", "raw/0.jsonl", "86:173"),
        ("a/00002", "raw/0.jsonl", "173:"),
        ("a/00003", "raw/1.jsonl", "0:78"),
        ("a/00004", "raw/1.jsonl", "78:"),
        ("a/00005", "raw/2.jsonl", ""),
    ]
    assert sorted(n for pair in new.merged for n in pair.shards) == [s.name for s in new.shards]


def test_a_file_truncated_to_the_start_of_its_last_range_keeps_its_ranges(raw: Path) -> None:
    content = b'{"text": "' + b"x" * 247 + b'"}\n'
    (raw / "0.jsonl").write_bytes(content)
    old = plan_files({})
    for size, ranges in ((173, ["0:86", "86:173", "173:"]), (172, ["0:86", "86:"])):
        (raw / "0.jsonl").write_bytes(content[:size])
        assert [shard.byte_range for shard in plan_files({}, old).shards] == ranges


def test_a_file_that_no_reader_reads_is_refused(raw: Path) -> None:
    for number in range(3):
        (raw / f"{number}.jsonl").write_text("{}\n")
        (raw / f"{number}.weird").write_text("x y\n")
    with pytest.raises(UserError, match=r"raw/0\.weird: has no known format"):
        make_plan([corpus("raw/*")], SETTINGS, declared={})
    assert make_plan([corpus("raw/*.weird", format="text")], SETTINGS, declared={}).shards


def test_the_first_documents_of_a_file_of_each_kind_are_checked(raw: Path) -> None:
    quarantine = TokenizeSettings(on_bad_document="quarantine")

    def planned(tokenize: TokenizeSettings | None = None, **fields: str) -> Plan:
        table = raw.with_name("corpora.tsv")
        row = {"corpus": "a", "files": "raw/*", "weight": "1", **fields}
        table.write_text("\t".join(row) + "\n" + "\t".join(row.values()) + "\n")
        tokenize = tokenize or TokenizeSettings()
        return make_plan(read_corpora(table), SETTINGS, declared={}, tokenize=tokenize)

    (raw / "0.jsonl").write_text('{"text": "a"}\n')
    (raw / "1.jsonl").write_text('{"body": "a"}\n')  # not the first
    (raw / "0.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n{"text": 1}\n'))  # not all
    parquet.write_table(arrow.table({"text": ["a"]}), raw / "0.parquet")
    assert planned(quarantine).shards
    one_bad = (
        r'raw/0\.jsonl\.gz:2: "text" holds a number, .*, or set on_bad_document to quarantine$'
    )
    with pytest.raises(UserError, match=one_bad):
        planned()
    (raw / "0.jsonl.gz").write_bytes(gzip.compress(b'{"text": "b"}\n'))
    assert planned().shards
    assert planned(template="{text}").shards
    with pytest.raises(
        UserError, match=r'corpora\.tsv:2: .*raw/0\.jsonl:1: no key "body" \(it has'
    ):
        planned(text_key="body")
    with pytest.raises(UserError, match=r'raw/0\.jsonl:1: no key "body" \(it has'):
        planned(quarantine, text_key="body")
    (raw / "0.jsonl").write_text("not JSON\n")
    assert planned(quarantine).shards
    (raw / "0.jsonl").write_text('{"text": "a"}\n')
    (raw / "2.csv").write_text("id\n1\n")
    with pytest.raises(UserError, match=r'corpora\.tsv:2: .*raw/2\.csv: no column "text"'):
        planned()
    (raw / "2.csv").unlink()
    (raw / "a.zip").write_bytes(b"PK\5\6" + bytes(18))
    with pytest.raises(UserError, match=r"corpora\.tsv:2: .*a\.zip: an archive without files"):
        planned()


def test_a_missing_package_of_a_reader_is_one_line(
    raw: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (raw / "page.html").write_text("<!DOCTYPE html><html><p>Some text.</p></html>")
    monkeypatch.setattr(_extractor, "find_spec", lambda _: None)
    _extractor.open_extractor.cache_clear()
    message = (
        r"^corpus \"a\": extractor resiliparse: needs the package resiliparse; "
        r"pip install 'tokamake\[corpora\]'$"
    )
    with pytest.raises(UserError, match=message):
        make_plan([corpus("raw/*")], SETTINGS, declared={}, tokenize=TokenizeSettings())
