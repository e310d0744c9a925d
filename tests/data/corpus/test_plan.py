"""The plan covers every byte once, keeps to sizes, and does not move when files come later."""

import gzip
import json
import os
from pathlib import Path

import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokamake.config.data import PlanSettings
from tokamake.data.corpus.corpora import Corpus
from tokamake.data.corpus.plan import make_plan, plan
from tokamake.data.corpus.plan_file import (
    JobBatch,
    Plan,
    batch_merged,
    batch_shards,
    read_plan,
    shard_prefixes,
    write_plan,
)
from tokamake.errors import UserError

SETTINGS = PlanSettings(shard_bytes=100, merged_bytes=100, token_bytes_per_text_byte=0.5)


def corpus(files: str = "raw/*.jsonl", name: str = "a", **fields: str) -> Corpus:
    return Corpus(corpus=name, files=files, weight=1, **fields)  # type: ignore[arg-type]


def planned(
    sizes: dict[str, int], previous: Plan | None = None, settings: PlanSettings = SETTINGS
) -> Plan:
    return make_plan([corpus()], settings, sizes, previous=previous)


def files(count: int, size: int = 60, first: int = 0) -> dict[str, int]:
    return {f"raw/{number}.jsonl": size for number in range(first, first + count)}


def test_small_files_share_a_shard_and_large_ones_are_cut() -> None:
    sizes = {"raw/1.jsonl": 40, "raw/2.jsonl": 60, "raw/10.jsonl": 250}
    made = planned(sizes)
    assert [(s.name, s.files, s.byte_range) for s in made.shards] == [
        ("a/00000", ("raw/1.jsonl", "raw/2.jsonl"), ""),
        ("a/00001", ("raw/10.jsonl",), "0:83"),
        ("a/00002", ("raw/10.jsonl",), "83:166"),
        ("a/00003", ("raw/10.jsonl",), "166:"),
    ]
    assert [(m.name, m.shards) for m in made.merged] == [
        ("a-0000_text_document", ("a/00000", "a/00001")),
        ("a-0001_text_document", ("a/00002", "a/00003")),
    ]
    # Below the most jobs there is one for each.
    assert [b.members for b in made.tokenize_batches] == [(s.name,) for s in made.shards]
    assert [b.name for b in made.tokenize_batches] == ["a-00000", "a-00001", "a-00002", "a-00003"]
    assert [b.members for b in made.merge_batches] == [(m.name,) for m in made.merged]


def test_a_merged_pair_is_filled_to_its_size() -> None:
    made = planned(files(7), settings=SETTINGS.model_copy(update={"merged_bytes": 90}))
    assert {shard.bytes for shard in made.shards} == {30}
    assert [len(pair.shards) for pair in made.merged] == [3, 3, 1]


def test_merging_has_a_quarter_of_the_jobs() -> None:
    made = planned(files(40), settings=SETTINGS.model_copy(update={"max_jobs": 8}))
    assert [len(batch.members) for batch in made.merge_batches] == [7, 7]


def test_a_declared_file_is_cut_by_its_name_unless_its_format_says_otherwise() -> None:
    for format, parts in (("", 3), ("jsonl", 3), ("text", 1)):
        made = make_plan([corpus(format=format)], SETTINGS, files(1, size=250))
        assert len(made.shards) == parts


NAMES = st.text("abcdefgh0123456789", min_size=1, max_size=4)
SIZES = st.dictionaries(NAMES, st.integers(0, 400))


@given(SIZES.filter(bool), SIZES, st.integers(1, 9))
def test_files_added_later_leave_the_rest_alone(
    first: dict[str, int], later: dict[str, int], max_jobs: int
) -> None:
    settings = SETTINGS.model_copy(update={"max_jobs": max_jobs})
    before = {f"raw/{name}.jsonl": size for name, size in first.items()}
    after = {**{f"raw/{name}.jsonl": size for name, size in later.items()}, **before}
    old = planned(before, settings=settings)
    new = planned(after, old, settings)
    for name in ("shards", "merged", "tokenize_batches", "merge_batches"):
        kept = getattr(new, name)[: len(getattr(old, name))]
        assert kept == getattr(old, name)
    assert (new.tokenizer, new.tokenizer_stamp) == (old.tokenizer, old.tokenizer_stamp)
    assert {path for shard in new.shards for path in shard.files} == set(after)
    for parts, whole in (
        ([n for pair in new.merged for n in pair.shards], new.shards),
        ([n for batch in new.tokenize_batches for n in batch.members], new.shards),
        ([n for batch in new.merge_batches for n in batch.members], new.merged),
    ):
        names = [item.name for item in whole]
        assert sorted(parts) == sorted(names)
        assert len(set(names)) == len(names)
    assert len({batch.name for batch in new.tokenize_batches}) == len(new.tokenize_batches)


def test_many_shards_are_few_jobs_of_neighbours() -> None:
    sizes = {f"raw/{name}{n}.jsonl": 60 for name in "ab" for n in range(450)}
    rows = [corpus(f"raw/{name}*", name) for name in "ab"]
    settings = SETTINGS.model_copy(update={"max_jobs": 100})
    made = make_plan(rows, settings, sizes)
    assert len(made.shards) == 900
    assert len(made.merged) == 300
    assert len(made.tokenize_batches) == 100
    assert made.tokenize_batches[1] == JobBatch(
        "a-00001", tuple(f"a/{n:05d}" for n in range(9, 18))
    )
    assert {len(batch.members) for batch in made.merge_batches} == {11, 12}
    assert len(made.merge_batches) == 26


def test_more_jobs_are_for_later_shards_only() -> None:
    few, many = (SETTINGS.model_copy(update={"max_jobs": jobs}) for jobs in (2, 100))
    old = planned(files(10), settings=few)
    new = planned(files(13), old, many)
    assert new.tokenize_batches[:2] == old.tokenize_batches
    assert [len(batch.members) for batch in new.tokenize_batches] == [5, 5, 1, 1, 1]


def test_files_that_are_gone_leave_only_their_shard_changed() -> None:
    sizes = files(4)
    old = planned(sizes)
    del sizes["raw/1.jsonl"]
    new = planned(sizes, old)
    assert [s.name for s in new.shards] == ["a/00000", "a/00002", "a/00003"]
    assert [b.members for b in new.tokenize_batches] == [("a/00000",), ("a/00002",), ("a/00003",)]
    assert new.merged[0].shards == ("a/00000", "a/00002")
    assert new.tokenizer_stamp == old.tokenizer_stamp
    assert new.tokenizer[0].files == tuple(sizes)


def test_a_tokenizer_is_trained_anew_for_other_files_or_another_key() -> None:
    old = planned(files(4))
    for other in (corpus(text_key="body"), corpus(template="{text}"), corpus(format="jsonl")):
        made = make_plan([other], SETTINGS, files(4), previous=old)
        assert made.tokenizer_stamp != old.tokenizer_stamp
    assert planned(files(4, first=4), old).tokenizer_stamp != old.tokenizer_stamp
    added = [corpus(), corpus("more/*", "b")]
    made = make_plan(added, SETTINGS, {**files(4), "more/1.jsonl": 1}, previous=old)
    assert made.tokenizer_stamp == old.tokenizer_stamp
    assert [source.corpus for source in made.tokenizer] == ["a"]


def test_other_settings_plan_from_scratch() -> None:
    old = planned(files(2))
    new = planned(files(2), old, PlanSettings(shard_bytes=200))
    assert [s.files for s in new.shards] == [("raw/0.jsonl", "raw/1.jsonl")]


def test_each_key_has_its_own_merged_pairs(tmp_path: Path) -> None:
    made = make_plan([corpus(text_key="title,body")], SETTINGS, files(4))
    assert [(m.name, m.key) for m in made.merged] == [
        ("a-0000_title_document", "title"),
        ("a-0000_body_document", "body"),
        ("a-0001_title_document", "title"),
        ("a-0001_body_document", "body"),
    ]
    assert shard_prefixes(made.merged[1], tmp_path) == [
        tmp_path / f"a/{number}_body" for number in ("00000", "00001", "00002")
    ]
    single = make_plan([corpus(text_key="title")], SETTINGS, files(1), split_sentences=True)
    assert [(m.name, m.key) for m in single.merged] == [("a-0000_title_sentence", "")]
    assert shard_prefixes(single.merged[0], tmp_path) == [tmp_path / "a/00000"]
    # Other names are other files: all of the corpus is planned anew.
    again = make_plan([corpus(text_key="title")], SETTINGS, files(4), previous=made)
    assert [m.name for m in again.merged] == ["a-0000_title_document", "a-0001_title_document"]


@pytest.fixture
def raw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder raw/ below the current one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "raw").mkdir()
    return tmp_path / "raw"


def test_large_files_are_cut_by_content_not_by_name(raw: Path) -> None:
    line = b'{"text": "' + b"x" * 300 + b'"}\n'
    (raw / "1.data").write_bytes(line)
    (raw / "2.jsonl.gz").write_bytes(b"\x1f\x8b" + b"x" * 300)
    (raw / "3.txt").write_bytes(b"plain text\n" * 30)
    parquet.write_table(arrow.table({"text": ["x"] * 300}), raw / "4.jsonl")
    made = make_plan([corpus("raw/*")], SETTINGS, {})
    parts: dict[str, list[str]] = {}
    for shard in made.shards:
        parts.setdefault(shard.files[0], []).append(shard.byte_range)
    assert parts["raw/1.data"] == ["0:78", "78:156", "156:234", "234:"]
    assert parts["raw/2.jsonl.gz"] == [""]
    assert parts["raw/3.txt"] == [""]
    assert len(parts["raw/4.jsonl"]) > 1
    # Compressed text is more than its bytes.
    assert {s.files[0]: s.bytes for s in made.shards}["raw/2.jsonl.gz"] == int(302 * 3.5 * 0.5)


def test_a_changed_or_touched_file_is_seen_in_its_shard_alone(raw: Path) -> None:
    for number in range(3):
        (raw / f"{number}.jsonl").write_text("{}\n" * 20)
    old = planned({})
    os.utime(raw / "1.jsonl", ns=(1, 1))
    (raw / "2.jsonl").write_text("{}\n" * 21)
    new = planned({}, old)
    changed = [b.name for a, b in zip(old.shards, new.shards, strict=True) if a.stamp != b.stamp]
    assert changed == ["a/00001", "a/00002"]
    assert planned({}, new) == new


def test_a_cut_file_that_has_become_another_is_cut_anew(raw: Path) -> None:
    line = b'{"text": "' + b"x" * 39 + b'"}\n'
    for number in range(3):
        (raw / f"{number}.jsonl").write_bytes(line * 5)
    old = planned({})
    assert [s.byte_range for s in old.shards] == ["0:86", "86:173", "173:"] * 3
    (raw / "0.jsonl").write_bytes(line * 9)  # grown: the last part is open
    (raw / "1.jsonl").write_bytes(line * 3)
    (raw / "2.jsonl").write_bytes(gzip.compress(line * 9, 0))
    new = planned({}, old)
    assert [(s.name, s.files[0], s.byte_range) for s in new.shards] == [
        ("a/00000", "raw/0.jsonl", "0:86"),
        ("a/00001", "raw/0.jsonl", "86:173"),
        ("a/00002", "raw/0.jsonl", "173:"),
        ("a/00003", "raw/1.jsonl", "0:78"),
        ("a/00004", "raw/1.jsonl", "78:"),
        ("a/00005", "raw/2.jsonl", ""),
    ]
    assert sorted(n for pair in new.merged for n in pair.shards) == [s.name for s in new.shards]


def test_a_file_cut_back_to_the_begin_of_its_last_part_keeps_its_parts(raw: Path) -> None:
    content = b'{"text": "' + b"x" * 247 + b'"}\n'
    (raw / "0.jsonl").write_bytes(content)
    old = planned({})
    for size, parts in ((173, ["0:86", "86:173", "173:"]), (172, ["0:86", "86:"])):
        (raw / "0.jsonl").write_bytes(content[:size])
        assert [shard.byte_range for shard in planned({}, old).shards] == parts


def test_a_plan_in_a_file_is_the_plan(tmp_path: Path) -> None:
    made = planned({**files(4), "raw/\udcff.jsonl": 1})  # a name that is not UTF-8
    path = tmp_path / "plan.json"
    write_plan(path, made)
    assert read_plan(path) == made
    written = path.stat().st_ino
    write_plan(path, made)
    assert path.stat().st_ino == written
    assert [s.name for s in batch_shards(path, "a-00001")] == ["a/00001"]
    assert [m.name for m in batch_merged(path, "a-00000")] == ["a-0000_text_document"]
    with pytest.raises(UserError, match=r"--batch b-7: .*no such batch; it has a-00000 to a-00003"):
        batch_shards(path, "b-7")
    for text in ("[]", "{}", '{"settings"', json.dumps({**json.loads(path.read_text()), "x": 1})):
        path.write_text(text)
        with pytest.raises(UserError, match=r"plan\.json: not .*; remove it to plan from scratch"):
            read_plan(path)
    path.unlink()
    with pytest.raises(UserError, match="no such file; make it with `tokamake plan`"):
        read_plan(path)


def test_stage_writes_what_the_workflow_computes(tmp_path: Path) -> None:
    table = tmp_path / "corpora.tsv"
    table.write_text("corpus\tfiles\ttext_key\tweight\na\traw/*.jsonl\tbody\t1\n")
    output = tmp_path / "plan.json"
    settings = json.dumps({"shard_bytes": 10})
    plan(corpora=table, settings=settings, declared=("raw/1.jsonl=25",), output=output)
    expected = make_plan(
        [corpus(text_key="body")], PlanSettings(shard_bytes=10), {"raw/1.jsonl": 25}
    )
    assert read_plan(output) == expected
    plan(corpora=table, settings=settings, declared=("raw/2.jsonl=5",), output=output)
    assert [s.name for s in read_plan(output).shards] == ["a/00000"]
    with pytest.raises(UserError, match="--declared raw/1: give PATH=BYTES"):
        plan(corpora=table, declared=("raw/1",), output=output)
