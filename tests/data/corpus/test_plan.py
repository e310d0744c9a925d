"""A plan covers every byte once, keeps to sizes, and stays stable when files are added."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokamake.config.data import PlanSettings, TokenizeSettings
from tokamake.data.corpus.corpora import Corpus
from tokamake.data.corpus.plan import make_plan, plan
from tokamake.data.corpus.plan_file import (
    JobBatch,
    Plan,
    PlannedShard,
    batch_merged,
    batch_shards,
    read_plan,
    shard_prefixes,
    write_plan,
)
from tokamake.data.indexed.paths import corpus_of
from tokamake.errors import UserError

SETTINGS = PlanSettings(shard_bytes=100, merged_bytes=100, token_bytes_per_text_byte=0.5)


def corpus(files: str = "raw/*.jsonl", name: str = "a", **fields: str) -> Corpus:
    return Corpus(corpus=name, files=files, weight=1, **fields)  # type: ignore[arg-type]


def plan_files(
    sizes: dict[str, int], previous: Plan | None = None, settings: PlanSettings = SETTINGS
) -> Plan:
    return make_plan([corpus()], settings, declared=sizes, previous=previous)


def files(count: int, size: int = 60, first: int = 0) -> dict[str, int]:
    return {f"raw/{number}.jsonl": size for number in range(first, first + count)}


def test_small_files_share_a_shard_and_large_files_are_cut() -> None:
    sizes = {"raw/1.jsonl": 40, "raw/2.jsonl": 60, "raw/10.jsonl": 250}
    new_plan = plan_files(sizes)
    assert [(s.name, s.files, s.byte_range) for s in new_plan.shards] == [
        ("a/00000", ("raw/1.jsonl", "raw/2.jsonl"), ""),
        ("a/00001", ("raw/10.jsonl",), "0:83"),
        ("a/00002", ("raw/10.jsonl",), "83:166"),
        ("a/00003", ("raw/10.jsonl",), "166:"),
    ]
    assert [(m.name, m.shards) for m in new_plan.merged] == [
        ("a-0000_text_document", ("a/00000", "a/00001")),
        ("a-0001_text_document", ("a/00002", "a/00003")),
    ]
    # Up to `max_jobs` members, each member has a job of its own.
    assert [b.members for b in new_plan.tokenize_batches] == [(s.name,) for s in new_plan.shards]
    assert [b.name for b in new_plan.tokenize_batches] == [
        "a-00000",
        "a-00001",
        "a-00002",
        "a-00003",
    ]
    assert [b.members for b in new_plan.merge_batches] == [(m.name,) for m in new_plan.merged]


def test_a_merged_dataset_is_filled_to_its_size() -> None:
    new_plan = plan_files(files(7), settings=SETTINGS.model_copy(update={"merged_bytes": 90}))
    assert {shard.bytes for shard in new_plan.shards} == {30}
    assert [len(pair.shards) for pair in new_plan.merged] == [3, 3, 1]


def test_merging_uses_a_quarter_of_the_jobs() -> None:
    new_plan = plan_files(files(40), settings=SETTINGS.model_copy(update={"max_jobs": 8}))
    assert [len(batch.members) for batch in new_plan.merge_batches] == [7, 7]


def test_the_name_of_a_declared_file_decides_whether_it_is_cut_unless_the_format_is_set() -> None:
    for format, parts in (("", 3), ("jsonl", 3), ("text", 1)):
        new_plan = make_plan([corpus(format=format)], SETTINGS, declared=files(1, size=250))
        assert len(new_plan.shards) == parts


NAMES = st.text("abcdefgh0123456789", min_size=1, max_size=4)
SIZES = st.dictionaries(NAMES, st.integers(0, 400))


@given(SIZES.filter(bool), SIZES, st.integers(1, 9))
def test_later_files_do_not_change_earlier_shards(
    first: dict[str, int], later: dict[str, int], max_jobs: int
) -> None:
    settings = SETTINGS.model_copy(update={"max_jobs": max_jobs})
    before = {f"raw/{name}.jsonl": size for name, size in first.items()}
    after = {**{f"raw/{name}.jsonl": size for name, size in later.items()}, **before}
    old = plan_files(before, settings=settings)
    new = plan_files(after, old, settings)
    for name in ("shards", "merged", "tokenize_batches", "merge_batches"):
        kept = getattr(new, name)[: len(getattr(old, name))]
        assert kept == getattr(old, name)
    assert (new.tokenizer, new.tokenizer_stamp) == (old.tokenizer, old.tokenizer_stamp)
    assert {path for shard in new.shards for path in shard.files} == set(after)
    for names_in_groups, items in (
        ([n for pair in new.merged for n in pair.shards], new.shards),
        ([n for batch in new.tokenize_batches for n in batch.members], new.shards),
        ([n for batch in new.merge_batches for n in batch.members], new.merged),
    ):
        names = [item.name for item in items]
        assert sorted(names_in_groups) == sorted(names)
        assert len(set(names)) == len(names)
    assert len({batch.name for batch in new.tokenize_batches}) == len(new.tokenize_batches)


def test_many_shards_give_few_jobs_of_neighbours() -> None:
    sizes = {f"raw/{name}{n}.jsonl": 60 for name in "ab" for n in range(450)}
    rows = [corpus(f"raw/{name}*", name) for name in "ab"]
    settings = SETTINGS.model_copy(update={"max_jobs": 100})
    new_plan = make_plan(rows, settings, declared=sizes)
    assert len(new_plan.shards) == 900
    assert len(new_plan.merged) == 300
    assert len(new_plan.tokenize_batches) == 100
    assert new_plan.tokenize_batches[1] == JobBatch(
        "a-00001", tuple(f"a/{n:05d}" for n in range(9, 18))
    )
    assert {len(batch.members) for batch in new_plan.merge_batches} == {11, 12}
    assert len(new_plan.merge_batches) == 26


def test_a_higher_max_jobs_applies_to_later_shards_only() -> None:
    few, many = (SETTINGS.model_copy(update={"max_jobs": jobs}) for jobs in (2, 100))
    old = plan_files(files(10), settings=few)
    new = plan_files(files(13), old, many)
    assert new.tokenize_batches[:2] == old.tokenize_batches
    assert [len(batch.members) for batch in new.tokenize_batches] == [5, 5, 1, 1, 1]


def test_new_jobs_of_a_corpus_continue_its_own_numbers() -> None:
    corpora = [corpus("a/*.jsonl", "a"), corpus("b/*.jsonl", "b")]
    sizes = {"a/0.jsonl": 60, **{f"b/{number}.jsonl": 60 for number in range(3)}}
    first = make_plan(corpora, SETTINGS, declared=sizes)
    second = make_plan(corpora, SETTINGS, declared={**sizes, "a/1.jsonl": 60}, previous=first)
    assert [batch.name for batch in second.tokenize_batches] == [
        "a-00000", "b-00000", "b-00001", "b-00002", "a-00001",
    ]  # fmt: skip


MANY = [corpus(f"raw/{n}.jsonl", f"c{n}", text_key="text" if n % 2 else "body") for n in range(40)]


def plan_many(
    rows: list[Corpus] = MANY, previous: Plan | None = None, **options: TokenizeSettings
) -> Plan:
    settings = SETTINGS.model_copy(update={"max_jobs": 8})
    return make_plan(rows, settings, declared=files(40), previous=previous, **options)


def test_more_corpora_than_jobs_share_jobs_if_they_are_read_in_the_same_way() -> None:
    new = plan_many()
    assert [len(batch.members) for batch in new.tokenize_batches] == [5] * 8
    assert [len(batch.members) for batch in new.merge_batches] == [20, 20]
    keys = {row.corpus: row.text_key for row in MANY}
    for batch in new.tokenize_batches:
        assert {keys[name.partition("/")[0]] for name in batch.members} == {keys[batch.corpus]}
        assert batch.corpus == batch.members[0].partition("/")[0]
    assert plan_many(previous=new) == new


@pytest.mark.parametrize("number", [0, 2], ids=["the first of its batch", "another one"])
def test_a_corpus_with_another_key_leaves_the_job_that_it_shares(number: int) -> None:
    old = plan_many()
    title = {"text_key": "title"}
    rows = [row.model_copy(update=title if row is MANY[number] else {}) for row in MANY]
    new = plan_many(rows, old)
    keys = {row.corpus: row.text_key for row in rows}
    for batch in new.tokenize_batches:
        assert {keys[name.partition("/")[0]] for name in batch.members} == {keys[batch.corpus]}
    members = [name for batch in new.tokenize_batches for name in batch.members]
    assert sorted(members) == sorted(shard.name for shard in new.shards)


def test_corpora_whose_duplicates_are_found_share_no_job() -> None:
    for old in (None, plan_many()):
        new = plan_many(
            previous=old, tokenize=TokenizeSettings(deduplicate=True, on_bad_document="quarantine")
        )
        assert sorted(b.members for b in new.tokenize_batches) == sorted(
            (f"c{n}/00000",) for n in range(40)
        )
        assert all(batch.corpus == corpus_of(batch.name) for batch in new.tokenize_batches)


def test_the_work_of_a_plan_is_linear_in_the_number_of_corpora(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """20,000 corpora once took minutes, since each of them looked at all shards."""
    calls, find = [0], PlannedShard.corpus.fget  # type: ignore[attr-defined]

    def counted(shard: PlannedShard) -> str:
        calls[0] += 1
        return str(find(shard))

    monkeypatch.setattr(PlannedShard, "corpus", property(counted))
    counts = []
    for size in (20, 40):
        calls[0] = 0
        plan_many(MANY[:size])
        counts.append(calls[0])
    assert counts[1] <= 2 * counts[0]


def test_names_with_hyphens_and_numbers_are_kept_apart() -> None:
    names = ["c4", "c4-2023", "c4-2023-06"]
    corpora = [corpus(f"{name}/*.jsonl", name) for name in names]
    sizes = {f"{name}/{number}.jsonl": 60 for name in names for number in range(3)}
    first = make_plan(corpora, SETTINGS, declared=sizes)
    assert {corpus_of(item.name) for item in (*first.merged, *first.tokenize_batches)} == {*names}
    assert all(corpus_of(merge.name) == merge.corpus for merge in first.merged)
    more = {**sizes, "c4-2023/9.jsonl": 60}
    second = make_plan(corpora, SETTINGS, declared=more, previous=first)
    assert {merge.name for merge in second.merged} - {merge.name for merge in first.merged} == {
        "c4-2023-0001_text_document"
    }
    assert second.tokenize_batches[-1].name == "c4-2023-00003"


def test_two_corpora_may_share_files() -> None:
    corpora = [corpus(name="a"), corpus(name="b")]
    first = make_plan(corpora, SETTINGS, declared=files(2))
    assert make_plan(corpora, SETTINGS, declared=files(2), previous=first) == first


def test_a_removed_file_changes_only_its_shard() -> None:
    sizes = files(4)
    old = plan_files(sizes)
    del sizes["raw/1.jsonl"]
    new = plan_files(sizes, old)
    assert [s.name for s in new.shards] == ["a/00000", "a/00002", "a/00003"]
    assert [b.members for b in new.tokenize_batches] == [("a/00000",), ("a/00002",), ("a/00003",)]
    assert new.merged[0].shards == ("a/00000", "a/00002")
    assert new.tokenizer_stamp == old.tokenizer_stamp
    assert new.tokenizer[0].files == tuple(sizes)


def test_the_tokenizer_stamp_changes_with_other_files_or_keys() -> None:
    old = plan_files(files(4))
    for row in (corpus(text_key="body"), corpus(template="{text}"), corpus(format="jsonl")):
        new_plan = make_plan([row], SETTINGS, declared=files(4), previous=old)
        assert new_plan.tokenizer_stamp != old.tokenizer_stamp
    assert plan_files(files(4, first=4), old).tokenizer_stamp != old.tokenizer_stamp
    rows = [corpus(), corpus("more/*", "b")]
    new_plan = make_plan(rows, SETTINGS, declared={**files(4), "more/1.jsonl": 1}, previous=old)
    assert new_plan.tokenizer_stamp == old.tokenizer_stamp
    assert [source.corpus for source in new_plan.tokenizer] == ["a"]


def test_other_sizes_plan_from_scratch() -> None:
    old = plan_files(files(2))
    new = plan_files(files(2), old, PlanSettings(shard_bytes=200))
    assert [s.files for s in new.shards] == [("raw/0.jsonl", "raw/1.jsonl")]


def test_each_key_has_its_own_merged_datasets(tmp_path: Path) -> None:
    new_plan = make_plan([corpus(text_key="title,body")], SETTINGS, declared=files(4))
    assert [(m.name, m.key) for m in new_plan.merged] == [
        ("a-0000_title_document", "title"),
        ("a-0000_body_document", "body"),
        ("a-0001_title_document", "title"),
        ("a-0001_body_document", "body"),
    ]
    assert shard_prefixes(new_plan.merged[1], tmp_path) == [
        tmp_path / f"a/{number}_body" for number in ("00000", "00001", "00002")
    ]
    single = make_plan(
        [corpus(text_key="title")],
        SETTINGS,
        declared=files(1),
        tokenize=TokenizeSettings(split_sentences=True, on_bad_document="quarantine"),
    )
    assert [(m.name, m.key) for m in single.merged] == [("a-0000_title_sentence", "")]
    assert shard_prefixes(single.merged[0], tmp_path) == [tmp_path / "a/00000"]
    # Other keys give other names, so the whole corpus is planned from scratch.
    again = make_plan([corpus(text_key="title")], SETTINGS, declared=files(4), previous=new_plan)
    assert [m.name for m in again.merged] == ["a-0000_title_document", "a-0001_title_document"]


def test_a_plan_file_keeps_the_plan(tmp_path: Path) -> None:
    new_plan = plan_files({**files(4), "raw/\udcff.jsonl": 1})  # a name that is not UTF-8
    path = tmp_path / "plan.json"
    write_plan(path, new_plan)
    assert read_plan(path) == new_plan
    inode = path.stat().st_ino
    write_plan(path, new_plan)
    assert path.stat().st_ino == inode  # an equal plan is not written again
    assert [s.name for s in batch_shards(path, "a-00001")] == ["a/00001"]
    assert [m.name for m in batch_merged(path, "a-00000")] == ["a-0000_text_document"]
    with pytest.raises(UserError, match=r"--batch b-7: .*no such batch; it has a-00000 to a-00003"):
        batch_shards(path, "b-7")
    for text in ("[]", "{}", '{"settings"', json.dumps({**json.loads(path.read_text()), "x": 1})):
        path.write_text(text)
        with pytest.raises(
            UserError, match=r"plan\.json: not .*; restore it, or remove it to plan from scratch"
        ):
            read_plan(path)
    path.unlink()
    with pytest.raises(UserError, match="no such file; make it with `tokamake plan`"):
        read_plan(path)


def test_a_plan_with_another_digit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_plan(path, make_plan([], PlanSettings(), declared={}))
    plan, text = read_plan(path), path.read_text()
    for old in re.finditer(r"\d", text):
        other = str(9 - int(old[0]))
        path.write_text(text[: old.start()] + other + text[old.end() :])
        with pytest.raises(UserError, match=r"plan\.json: (damaged|not )"):
            read_plan(path)
    path.write_text(text[: text.rindex(",")] + "}")  # an earlier version wrote no hash
    assert read_plan(path) == plan


def test_the_command_writes_the_plan_of_the_workflow(tmp_path: Path) -> None:
    table = tmp_path / "corpora.tsv"
    table.write_text("corpus\tfiles\ttext_key\tweight\na\traw/*.jsonl\tbody\t1\n")
    output = tmp_path / "plan.json"
    settings = json.dumps({"shard_bytes": 10})
    plan(corpora=table, settings=settings, declared=("raw/1.jsonl=25",), output=output)
    expected = make_plan(
        [corpus(text_key="body")], PlanSettings(shard_bytes=10), declared={"raw/1.jsonl": 25}
    )
    assert read_plan(output) == expected
    plan(corpora=table, settings=settings, declared=("raw/2.jsonl=5",), output=output)
    assert [s.name for s in read_plan(output).shards] == ["a/00000"]
    with pytest.raises(UserError, match="--declared raw/1: give PATH=BYTES"):
        plan(corpora=table, declared=("raw/1",), output=output)
