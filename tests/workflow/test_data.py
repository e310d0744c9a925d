"""Inputs and options of the rules that make data."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.decontamination import ITEM, write_items
from tests.support.workflow_configs import read_config, wildcards, write_runs
from tokamake.workflow import data as data_module
from tokamake.workflow.data import DataRules

pytestmark = pytest.mark.usefixtures("workspace_here")

TWO_NAMES = "corpus\tfiles\tweight\nweb\traw/web.jsonl\t1\nweb.x\traw/x.jsonl\t1\n"
"""A corpus whose name begins like another one's, with raw files of the user."""
SMOKE = wildcards(run="smoke")


def make_rules(force_job: Any = None, **config: Any) -> DataRules:
    return DataRules(read_config(**config), force_job)


def write_raw(*names: str, text: str = '{"text": "a document"}\n' * 100) -> None:
    Path("raw").mkdir(exist_ok=True)
    for name in names:
        Path("raw", name).write_text(text)


# Inputs


def test_the_plan_is_an_input_once_a_start_has_written_it() -> None:
    plan, rules = Path("results/data/plan.json"), make_rules()
    assert rules.plan_file(SMOKE) == []
    touch(str(plan))
    assert rules.plan_file(SMOKE) == [str(plan)]
    assert rules.weights_plan(SMOKE) == []  # no run has a weighting file


def test_only_raw_files_that_a_job_makes_are_inputs() -> None:
    rules = make_rules()
    code = ["results/raw/code/code-00.jsonl", "results/raw/code/code-01.jsonl.gz"]
    assert rules.raw_outputs(["other.jsonl", *reversed(code)]) == code
    assert rules.raw_files(wildcards(batch="code-00001")) == code[:1]
    assert rules.raw_files(wildcards(batch="code-00002")) == code[1:]
    write_raw("web.jsonl", "x.jsonl")
    assert make_rules(table=TWO_NAMES).raw_files(wildcards(batch="web-00000")) == []


def test_the_tokenizer_is_trained_on_files_of_all_corpora() -> None:
    assert make_rules().tokenizer_corpus() == [
        f"results/raw/{corpus}/{corpus}-{file}"
        for corpus in ("code", "docs")
        for file in ("00.jsonl", "01.jsonl.gz")
    ]


def test_a_merge_batch_needs_the_tokenize_batches_of_its_shards() -> None:
    rules = make_rules()
    tokenized = [f"results/data/batches/tokenize/docs-0000{number}.json" for number in range(3)]
    assert rules.merge_inputs(wildcards(batch="docs-00000")) == tokenized[:2]
    assert rules.merge_inputs(wildcards(batch="docs-00001")) == tokenized[2:]


def test_a_batch_of_several_shards_is_an_input_once() -> None:
    plan = {"shard_bytes": 50_000, "merged_bytes": 45_000, "max_jobs": 1}
    rules = make_rules(plan=plan)
    assert rules.merge_inputs(wildcards(batch="code-00000")) == [
        "results/data/batches/tokenize/code-00000.json"
    ]


def test_all_merge_batches_in_the_order_of_the_plan() -> None:
    assert make_rules().merge_files() == [
        f"results/data/batches/merge/{batch}.json"
        for batch in ("code-00000", "code-00001", "docs-00000", "docs-00001")
    ]


def test_hashes_of_a_corpus_leave_out_a_corpus_with_a_longer_name() -> None:
    write_raw("web.jsonl", "x.jsonl")
    rules = make_rules(table=TWO_NAMES)
    assert rules.corpus_hashes(wildcards(scope="web")) == ["results/data/hashes/web-00000.rows"]
    assert rules.corpus_hashes(wildcards(scope="web.x")) == ["results/data/hashes/web.x-00000.rows"]


def test_duplicates_are_inputs_only_with_deduplication() -> None:
    job = wildcards(batch="docs-00001")
    assert make_rules().corpus_duplicates(job) == []
    rules = make_rules(tokenize={"deduplicate": True})
    assert rules.corpus_duplicates(job) == ["results/data/duplicates/docs.rows"]
    rules = make_rules(tokenize={"deduplicate": "data"})
    assert rules.corpus_duplicates(job) == ["results/data/duplicates/all.rows"]


def test_duplicates_in_all_corpora_are_found_in_the_order_of_the_table() -> None:
    write_raw("web.jsonl", "x.jsonl")
    rules = make_rules(table=TWO_NAMES, tokenize={"deduplicate": "data"})
    assert rules.corpus_hashes(wildcards(scope="all")) == [
        f"results/data/hashes/{batch}-00000.rows" for batch in ("web", "web.x")
    ]


@pytest.mark.parametrize(("scope", "name"), [("data", "all"), ("corpus", "web")])
def test_near_duplicates_are_found_in_all_corpora_or_in_each(scope: str, name: str) -> None:
    write_raw("web.jsonl", "x.jsonl")
    rules = make_rules(table=TWO_NAMES, tokenize={"near_duplicates": {"scope": scope}})
    folder = "results/data/near_duplicates"
    assert rules.corpus_duplicates(wildcards(batch="web-00000")) == [f"{folder}/{name}.rows"]
    files = [f"{folder}/signed/{batch}-00000.rows" for batch in ("web", "web.x")]
    expected = files if scope == "data" else files[:1]
    assert rules.signed_documents(wildcards(scope=name)) == expected


@pytest.mark.parametrize(("scope", "name"), [("data", "all"), ("corpus", "web")])
def test_repeats_are_found_in_all_corpora_or_in_each(scope: str, name: str) -> None:
    write_raw("web.jsonl", "x.jsonl")
    job = wildcards(batch="web-00000")
    assert make_rules(table=TWO_NAMES).corpus_repeats(job) == []
    rules = make_rules(table=TWO_NAMES, tokenize={"repeats": {"scope": scope}})
    folder = "results/data/repeats"
    assert rules.corpus_repeats(job) == [f"{folder}/{name}.rows"]
    files = [f"{folder}/hashed/{batch}-00000.rows" for batch in ("web", "web.x")]
    expected = files if scope == "data" else files[:1]
    assert rules.hashed_passages(wildcards(scope=name)) == expected


def test_a_corpus_that_keeps_copies_has_no_job_of_them() -> None:
    write_raw("web.jsonl", "x.jsonl")
    table = "corpus\tfiles\tweight\tkeep_copies\nweb\traw/web.jsonl\t1\t\nx\traw/x.jsonl\t1\ttrue\n"
    asked = {"deduplicate": "data", "near_duplicates": "fineweb", "repeats": "lines"}
    rules = make_rules(table=table, tokenize=asked)
    kept, compared = wildcards(batch="x-00000"), wildcards(batch="web-00000")
    assert rules.corpus_duplicates(kept) == rules.corpus_repeats(kept) == []
    assert len(rules.corpus_duplicates(compared) + rules.corpus_repeats(compared)) == 3
    everything = wildcards(scope="all")
    for files in (rules.corpus_hashes, rules.signed_documents, rules.hashed_passages):
        assert [Path(path).stem for path in files(everything)] == ["web-00000"]


# Damaged datasets


def note_forced(monkeypatch: pytest.MonkeyPatch, fault: str | None) -> tuple[DataRules, list[str]]:
    """Rules of a main process in which all job batches have a fault, and a list of forced jobs."""
    calls: list[tuple[str, str]] = []

    def find(batch: Path, folder: str, **_: object) -> str | None:
        calls.append((str(batch), folder))
        return fault

    monkeypatch.setattr(data_module, "find_batch_fault", find)
    forced: list[str] = []
    return make_rules(forced.append), forced


def touch(path: str) -> str:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).touch()
    return path


def test_a_damaged_batch_is_rebuilt_and_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rules, forced = note_forced(monkeypatch, "code/00001.bin is truncated")
    tokenized = touch("results/data/batches/tokenize/code-00001.json")
    inputs = rules.tokenize_inputs(wildcards(batch="code-00001"))
    assert inputs == ["results/raw/code/code-00.jsonl"]
    assert forced == [tokenized]
    assert capsys.readouterr().err == "tokamake: code/00001.bin is truncated: rebuilding it\n"


@pytest.mark.parametrize(
    ("method", "batch", "product", "forced"),
    [
        ("tokenize_inputs", "code-00001", "results/data/batches/merge/code-00000.json",
         "results/data/batches/tokenize/code-00001.json"),
        ("merge_inputs", "docs-00001", "results/data/metadata.json",
         "results/data/batches/merge/docs-00001.json"),
    ],
)  # fmt: skip
def test_a_missing_batch_whose_product_exists_is_rebuilt_without_a_word(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    method: str,
    batch: str,
    product: str,
    forced: str,
) -> None:
    rules, forced_jobs = note_forced(monkeypatch, "missing")
    function = getattr(rules, method)
    function(wildcards(batch=batch))
    assert forced_jobs == []
    touch(product)
    function(wildcards(batch=batch))
    assert forced_jobs == [forced]
    assert not capsys.readouterr().err


def test_an_intact_batch_is_not_rebuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    rules, forced = note_forced(monkeypatch, None)
    touch("results/data/batches/tokenize/code-00001.json")
    rules.tokenize_inputs(wildcards(batch="code-00001"))
    assert forced == []


def test_a_job_rebuilds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_module, "find_batch_fault", lambda *_, **__: pytest.fail("looked"))
    touch("results/data/batches/tokenize/code-00001.json")
    make_rules(None).tokenize_inputs(wildcards(batch="code-00001"))


def test_shards_are_looked_for_in_their_folder_and_merged_datasets_in_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folders: list[str] = []
    monkeypatch.setattr(
        data_module, "find_batch_fault", lambda _, folder, **__: folders.append(folder)
    )
    rules = make_rules(lambda _: None)
    touch("results/data/metadata.json")
    touch("results/data/batches/merge/code-00000.json")
    rules.tokenize_inputs(wildcards(batch="code-00000"))
    rules.merge_inputs(wildcards(batch="code-00000"))
    assert folders == ["results/data/shards", "results/data/merged"]


# Options


def test_the_options_of_a_corpus_name_its_keys_template_and_format() -> None:
    write_raw("web.jsonl", text='{"title": "A title", "text": "a document"}\n')
    table = (
        "corpus\tfiles\ttext_key\ttemplate\tformat\tweight\n"
        "web\traw/web.jsonl\ttitle,text\t{title}: {text}\tjsonl\t1\n"
    )
    rules = make_rules(table=table)
    assert rules.corpus_options(wildcards(batch="web-00000")) == [
        *("--text-key=title", "--text-key=text"), "--template={title}: {text}", "--format=jsonl"
    ]  # fmt: skip
    assert make_rules().corpus_options(wildcards(batch="docs-00001")) == [
        *("--text-key=text", "--template=", "--format=")
    ]


def test_the_digest_of_shards_changes_with_their_raw_files_only() -> None:
    write_raw("web.jsonl", "x.jsonl")
    first, other = wildcards(batch="web-00000"), wildcards(batch="web.x-00000")
    before = make_rules(table=TWO_NAMES)
    assert before.shards_digest(first) != before.shards_digest(other)
    write_raw("web.jsonl", text='{"text": "another document"}\n' * 120)
    after = make_rules(table=TWO_NAMES)
    assert after.shards_digest(first) != before.shards_digest(first)
    assert after.shards_digest(other) == before.shards_digest(other)
    assert after.merges_digest(first) == before.merges_digest(first)
    assert after.datasets_digest() == before.datasets_digest()


def test_a_changed_evaluation_set_changes_the_digest_of_filtered_shards() -> None:
    write_raw("web.jsonl", "x.jsonl")
    job = wildcards(batch="web-00000")

    def digest(item: str, **sections: Any) -> str:
        write_items(Path("set.jsonl"), [{"text": item}])
        rules = make_rules(table=TWO_NAMES, **sections)
        assert rules.shards_digest(job) == make_rules(table=TWO_NAMES).shards_digest(job)
        return rules.filtered_shards_digest(job)

    named = {"tokenize": {"filters": [{"decontaminate": {"files": {"set": "set.jsonl"}}}]}}
    assert digest(ITEM, **named) == digest(ITEM, **named)
    assert digest(ITEM, **named) != digest(ITEM.upper(), **named)
    assert digest(ITEM) == digest(ITEM.upper())  # no filter reads it
    tasks = {"set": {"name": "text", "data": ["set.jsonl"]}}
    of_tasks = {"tokenize": {"filters": ["decontaminate"]}, "evaluate": {"tasks": tasks}}
    assert digest(ITEM, **of_tasks) != digest(ITEM.upper(), **of_tasks)
    rules = make_rules(table=TWO_NAMES, **of_tasks)
    filters = {"set": {"path": ["set.jsonl"], "fields": ["text"]}}
    assert f'--filters=[{{"decontaminate": {{"files": {json.dumps(filters)}}}}}]' in (
        rules.tokenize_options(job)
    )


def test_documents_are_filtered_before_they_are_hashed_only_where_copies_may_differ() -> None:
    write_raw("web.jsonl", "x.jsonl")
    job = wildcards(batch="web-00000")
    by_text, by_field = "length: {min_words: 2}", "regex: {field: url, drop: x}"
    table = "corpus\tfiles\tweight\tfilters\nweb\traw/web.jsonl\t1\t{}\nweb.x\traw/x.jsonl\t1\t\n"

    def filtered(own: str, *, deduplicate: bool | str = "data", of_all: Any = ()) -> list[str]:
        settings = {"deduplicate": deduplicate, "filters": of_all}
        rules = make_rules(table=table.format(own), tokenize=settings)
        found = [each for each in rules.hash_options(job) if each.startswith("--filter")]
        assert (rules.hash_options(job) == rules.tokenize_options(job)) == bool(
            found or own == "[]"
        )
        return found

    given = ['--filters=[{"length": {"min_words": 2}}]', "--filter-seconds=60"]
    assert filtered(by_text) == given
    assert filtered(by_text, deduplicate=True) == []
    assert filtered(by_text, of_all=[{"length": {"min_words": 2}}]) == []
    assert filtered("[]", of_all=[{"length": {"min_words": 2}}]) == []  # the other corpus has them
    assert filtered(by_field, deduplicate=True)[0].startswith('--filters=[{"regex"')
    Path("own.py").write_text(
        "from tokamake.data.filters import DocumentFilter\nclass Filter(DocumentFilter):\n"
        "    def apply(self, document):\n        document.metadata['url']\n"
    )
    assert filtered("own.py", deduplicate=True) == ['--filters=[{"own.py": {}}]', given[1]]
    rules = make_rules(table=table.format("own.py"), tokenize={"deduplicate": True})
    assert rules.hashed_shards_digest(job) == rules.filtered_shards_digest(job)
    assert rules.hashed_shards_digest(job) != rules.shards_digest(job)


def test_the_digest_of_shards_changes_with_the_names_of_their_files() -> None:
    write_raw("web.jsonl", "x.jsonl")
    job = wildcards(batch="web-00000")
    before = make_rules(table=TWO_NAMES).shards_digest(job)
    Path("raw/web.jsonl").rename("raw/new.jsonl")  # keeps size and time
    table = TWO_NAMES.replace("web.jsonl", "new.jsonl")
    assert make_rules(table=table).shards_digest(job) != before


def test_the_digest_of_shards_changes_with_their_byte_range() -> None:
    rules = make_rules()
    halves = {rules.shards_digest(wildcards(batch=f"code-0000{number}")) for number in (0, 1)}
    assert len(halves) == 2


def test_the_digests_of_merged_datasets_change_with_their_shards_and_names() -> None:
    rules = make_rules()
    larger = make_rules(plan={"shard_bytes": 50_000, "merged_bytes": 10_000_000})
    job = wildcards(batch="code-00000")
    assert rules.merges_digest(job) != rules.merges_digest(wildcards(batch="code-00001"))
    assert rules.merges_digest(job) != larger.merges_digest(job)
    assert rules.datasets_digest() != larger.datasets_digest()


def test_a_run_leaves_out_the_corpora_of_other_tables() -> None:
    header = "corpus\tfiles\tweight\n"
    rows = {name: f"{name}\tresults/raw/{name}/*\t1\n" for name in ("code", "docs")}
    Path("code.tsv").write_text(header + rows["code"])
    Path("both.tsv").write_text(header + rows["docs"] + rows["code"])
    runs = write_runs("run corpora", "one code.tsv", "two both.tsv")
    rules = make_rules(runs=runs)
    assert rules.table_options(wildcards(run="one")) == ["--corpora=code.tsv", "--leave-out=docs"]
    assert rules.table_options(wildcards(run="two")) == ["--corpora=both.tsv"]
