"""The plan of a config: new raw files, corpora without any, and shards that have changed."""

import os
from pathlib import Path

import pytest

from tests.support.megatron_datasets import write_megatron_dataset
from tests.support.workflow_configs import RAW_TABLE, add_raw, read_config
from tokamake import files
from tokamake.config.data_set import DataSet
from tokamake.data.corpus.corpora import Corpus
from tokamake.data.corpus.plan_file import Plan, PlannedMerge, write_plan
from tokamake.data.indexed.manifest import write_manifest
from tokamake.errors import UserError
from tokamake.workflow.planned_data import check_indexes, check_repeated, read_previous

pytestmark = pytest.mark.usefixtures("workspace_here")


def test_the_main_process_adds_new_raw_files_and_a_job_does_not() -> None:
    add_raw("0.jsonl")
    first = read_config(table=RAW_TABLE, is_main_process=True).plan
    assert not Path("results").exists()
    write_plan(Path("results/data/plan.json"), first)
    add_raw("1.jsonl")
    assert read_config(table=RAW_TABLE).plan == first
    extended = read_config(table=RAW_TABLE, is_main_process=True).plan
    assert extended.shards[:1] == first.shards
    assert len(extended.shards) == 2


def test_a_job_makes_a_plan_if_there_is_none() -> None:
    add_raw("0.jsonl")
    assert len(read_config(table=RAW_TABLE).plan.shards) == 1


def test_sentences_are_planned_as_such() -> None:
    merged = read_config(tokenize={"split_sentences": True}).plan.merged
    assert all(merge.name.endswith("_text_sentence") for merge in merged)


def test_each_data_set_has_its_plan() -> None:
    add_raw("0.jsonl")
    first = read_config(table=RAW_TABLE, is_main_process=True).plan
    write_plan(Path("results/data/plan.json"), first)
    add_raw("1.jsonl")
    other = read_config(table=RAW_TABLE, is_main_process=True, data_set="other")
    # Planned from scratch: both files are in one shard.
    assert [shard.files for shard in other.plan.shards] == [("raw/0.jsonl", "raw/1.jsonl")]
    write_plan(Path("results/data/other/plan.json"), other.plan)
    assert read_previous(DataSet()) == first
    assert read_previous(DataSet("other")) == other.plan


@pytest.mark.parametrize("content", ["same", "other"])
def test_a_new_time_of_the_same_bytes_is_no_change(
    content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("0.jsonl", "1.jsonl"):
        add_raw(name, documents=3000)  # each is cut into byte ranges
    first = read_config(table=RAW_TABLE, is_main_process=True).plan
    write_plan(Path("results/data/plan.json"), first)
    raw = Path("raw/0.jsonl")
    entry = {"path": str(raw), "unit": "line", "byte_range": None}
    entry |= {"bytes": raw.stat().st_size, "sha256": files.sha256(raw)}
    for merge in first.merged:
        path = Path("results/data/merged", f"{merge.name}.json")
        path.parent.mkdir(exist_ok=True)
        write_manifest(path, {"sha256": {}, "sources": [{"inputs": [entry]}]})
    if content == "other":
        raw.write_text(raw.read_text().replace("document", "dOcument", 1))
    os.utime(raw, ns=(1, 1))
    capsys.readouterr()
    config = read_config(table=RAW_TABLE, is_main_process=True)
    of_raw = {shard.name for shard in first.shards if shard.files == (str(raw),)}
    assert of_raw
    assert config.changed_shards == (of_raw if content == "other" else set())
    message = "tokamake: 1 raw file (first raw/0.jsonl): new time, same bytes"
    assert (message in capsys.readouterr().err) == (content == "same")
    # Jobs see the new time, and the next start reads no file again.
    assert all(s.stamps[0].partition(":")[2] == "1" for s in config.plan.shards if s.name in of_raw)
    write_plan(Path("results/data/plan.json"), config.plan)
    assert not read_config(table=RAW_TABLE, is_main_process=True).changed_shards
    assert message not in capsys.readouterr().err


def test_a_changed_raw_file_changes_its_shard() -> None:
    for name in ("0.jsonl", "1.jsonl"):
        add_raw(name, documents=3000)
    first = read_config(table=RAW_TABLE, is_main_process=True)
    write_plan(Path("results/data/plan.json"), first.plan)
    assert len(first.plan.shards) > 1
    assert not read_config(table=RAW_TABLE, is_main_process=True).changed_shards
    os.utime("raw/1.jsonl", (1, 1))
    changed = read_config(table=RAW_TABLE, is_main_process=True).changed_shards
    assert changed == {s.name for s in first.plan.shards if s.files == ("raw/1.jsonl",)}


def test_a_corpus_without_bytes_is_refused() -> None:
    add_raw("0.jsonl", documents=0)
    with pytest.raises(
        UserError, match=r'corpora.tsv:2: corpus "web" is empty: raw/\*.jsonl holds'
    ):
        read_config(table=RAW_TABLE, is_main_process=True)


def test_a_text_key_that_no_document_has_is_an_error_also_with_quarantine() -> None:
    add_raw("0.jsonl")
    table = "corpus\tfiles\ttext_key\tweight\nweb\traw/*.jsonl\tbody\t1\n"
    for action in ("stop", "quarantine"):
        with pytest.raises(UserError, match=r'corpora.tsv:2: raw/0.jsonl:1: no key "body" \(it ha'):
            read_config(table=table, is_main_process=True, tokenize={"on_bad_document": action})


def test_a_torn_index_is_an_error_until_it_changes(tmp_path: Path) -> None:
    prefix = write_megatron_dataset(tmp_path / "a", [[1, 2], [3]])
    merge = PlannedMerge("one-0000_text_document", "one", "", (), str(prefix), "first")
    plan = Plan({}, "", (), (), (), (merge,), ())
    corpora = {"one": Corpus(corpus="one", files=str(prefix), format="indexed", weight=1)}
    check_indexes(corpora, plan, previous=None)
    os.truncate(tmp_path / "a.idx", 50)
    check_indexes(corpora, plan, previous=plan)  # its stamp is that of the earlier plan
    changed = plan._replace(merged=(merge._replace(stamp="second"),))
    for previous in (None, plan):
        with pytest.raises(UserError, match=r'corpus "one": .*a\.idx: 50 bytes, its header says'):
            check_indexes(corpora, changed, previous=previous)


def test_a_dataset_in_two_corpora_that_a_run_trains_on_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.bin").touch()
    (tmp_path / "link.bin").symlink_to("a.bin")
    merged = tuple(
        PlannedMerge(f"{corpus}-0000_text_document", corpus, "", (), str(tmp_path / name))
        for corpus, name in (("one", "a"), ("two", "link"), ("three", "other"))
    )
    plan = Plan({}, "", (), (), (), merged, ())

    def corpora(*names: str, **settings: str) -> list[Corpus]:
        return [
            Corpus(corpus=name, files=name, format="indexed", weight=1, **settings)
            for name in names
        ]

    # Two runs may give it two names, and two sets may share it.
    check_repeated([corpora("one", "three"), corpora("two", "three")], plan)
    check_repeated([[*corpora("one"), *corpora("two", sets="valid")]], plan)
    with pytest.raises(UserError, match=r'corpus "two": .*/link is in corpus "one" .* leave it o'):
        check_repeated([corpora("one", "three", "two")], plan)
