"""The plan covers every byte once, keeps to sizes, and does not move when files come later."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokamake.config import Corpus, PlanSettings
from tokamake.data.plan import Plan, make_plan, plan, raw_files, read_plan
from tokamake.errors import UserError

SETTINGS = PlanSettings(shard_bytes=100, merged_bytes=100, token_bytes_per_text_byte=0.5)


def corpus(files: str = "raw/*.jsonl", name: str = "a", text_key: str = "text") -> Corpus:
    return Corpus(corpus=name, files=files, text_key=text_key, weight=1)


def planned(sizes: dict[str, int], previous: Plan | None = None) -> Plan:
    return make_plan([corpus()], SETTINGS, sizes, previous=previous)


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


NAMES = st.text("abcdefgh0123456789", min_size=1, max_size=4)


@given(
    st.dictionaries(NAMES, st.integers(0, 400), min_size=1),
    st.dictionaries(NAMES, st.integers(0, 400)),
)
def test_files_added_later_leave_the_rest_alone(
    first: dict[str, int], later: dict[str, int]
) -> None:
    before = {f"raw/{name}.jsonl": size for name, size in first.items()}
    after = {**{f"raw/{name}.jsonl": size for name, size in later.items()}, **before}
    old, new = planned(before), planned(after, planned(before))
    assert new.shards[: len(old.shards)] == old.shards
    assert new.merged[: len(old.merged)] == old.merged
    assert new.tokenizer_files == old.tokenizer_files
    assert {path for shard in new.shards for path in shard.files} == set(after)
    merged = [name for pair in new.merged for name in pair.shards]
    assert sorted(merged) == sorted(shard.name for shard in new.shards)
    assert len({shard.name for shard in new.shards}) == len(new.shards)


def test_files_that_are_gone_leave_only_their_shard_changed() -> None:
    sizes = {f"raw/{n}.jsonl": 60 for n in range(4)}
    old = planned(sizes)
    del sizes["raw/1.jsonl"]
    new = planned(sizes, old)
    assert [s.name for s in new.shards] == ["a/00000", "a/00002", "a/00003"]


def test_other_settings_plan_from_scratch() -> None:
    old = planned({"raw/1.jsonl": 60, "raw/2.jsonl": 60})
    wider = PlanSettings(shard_bytes=200)
    new = make_plan([corpus()], wider, {"raw/1.jsonl": 60, "raw/2.jsonl": 60}, previous=old)
    assert [s.files for s in new.shards] == [("raw/1.jsonl", "raw/2.jsonl")]


def test_patterns_match_disk_and_declared_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "raw/deep").mkdir(parents=True)
    for name in ("b2.jsonl", "b10.jsonl", "deep/c.jsonl"):
        (tmp_path / "raw" / name).write_text("")
    assert raw_files(corpus("raw/*.jsonl made/*"), {"made/b1.jsonl": 1, "made/x/y.jsonl": 1}) == [
        "made/b1.jsonl",
        "raw/b2.jsonl",
        "raw/b10.jsonl",
    ]
    assert raw_files(corpus("raw/**/*.jsonl"), {})[-1] == "raw/deep/c.jsonl"
    # Named twice, a file counts once; beside declared files nothing else counts.
    assert raw_files(corpus(f"raw/b2.jsonl ./raw/b2.jsonl {tmp_path}/raw/b2.jsonl"), {}) == [
        "raw/b2.jsonl"
    ]
    assert raw_files(corpus("raw/*"), {"raw/b1.jsonl": 1}) == ["raw/b1.jsonl"]
    with pytest.raises(UserError, match="no closing quotation; fix the files column"):
        raw_files(corpus('"raw/b2.jsonl'), {})
    (tmp_path / "raw/d e.jsonl").write_text("")
    assert raw_files(corpus('"raw/d e.*" raw/b2.jsonl'), {}) == ["raw/b2.jsonl", "raw/d e.jsonl"]
    with pytest.raises(UserError, match=r'corpus "a": no file matches raw/none\*; fix the files'):
        raw_files(corpus("raw/*.jsonl raw/none*"), {})


def test_stage_writes_what_the_workflow_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    table = tmp_path / "corpora.tsv"
    table.write_text("corpus\tfiles\ttext_key\tweight\na\traw/*.jsonl\tbody\t1\n")
    output = tmp_path / "plan.json"
    plan(
        corpora=table,
        settings=json.dumps({"shard_bytes": 10}),
        declared=("raw/1.jsonl=25",),
        output=output,
    )
    expected = make_plan(
        [corpus(text_key="body")], PlanSettings(shard_bytes=10), {"raw/1.jsonl": 25}
    )
    assert read_plan(output) == expected
    assert expected.merged[0].name == "a-0000_body_document"
    output.write_text("[]")
    with pytest.raises(UserError, match="not a plan"):
        read_plan(output)
