"""Search with biencoders as jobs: planned, checked before any job, and done."""

import gzip
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.megatron_datasets import write_dataset
from tests.support.retrievers import make_retriever_workspace, recalls, write_questions
from tests.support.workflow_configs import make_tokenizer, read_config, train, wildcards, write_runs
from tests.support.workflows import (
    ARCHITECTURE,
    CONFIG,
    MINE,
    jobs,
    make_workspace,
    snakemake,
    snakemake_alone,
)
from tokamake.errors import UserError
from tokamake.report.report import report
from tokamake.workflow.retrieval import RULES, RetrievalRules

SECTIONS: dict[str, Any] = {
    "sample_corpus": {"docs": {"num_files": 2, "file_bytes": 60_000}},
    "tokenizer": {"kind": "wordpiece", "vocab_size": 500},
    "tokenize": {"split_sentences": True, "append_eod": False, "empty_documents": "keep"},
    "train": train(
        objective="ict",
        ict={"titles": "src", "topk": [1]},
        train_steps=4,
        evaluation_interval=2,
        split="80,20,0",
        micro_batch_size=8,
    ),
    "retrieval": {"passages": "passages/*.jsonl", "questions": "nq.jsonl", "top_k": 5},
}
TABLE = "corpus\tfiles\ttext_key\tweight\ndocs\tresults/raw/docs/*\ttext,src\t1\n"
FILES = {"a": range(20), "b": range(20, 45)}


@pytest.fixture
def folder(workspace_here: Path) -> Path:
    """A workspace with a biencoder, passages and questions."""
    prepare(workspace_here)
    return workspace_here


def prepare(folder: Path) -> None:
    shape = {**ARCHITECTURE, "family": "biencoder", "num_key_value_heads": 4, "projection_dim": 16}
    (folder / "architecture.yaml").write_text(yaml.safe_dump(shape))
    (folder / "corpora.tsv").write_text(TABLE)
    (folder / "passages").mkdir()
    for name, numbers in FILES.items():
        rows = [{"id": n, "text": f"The town {n} is old.", "title": f"Town {n}"} for n in numbers]
        write(folder / f"passages/{name}.jsonl", rows)
    ask(folder, 7)


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def ask(folder: Path, number: int) -> None:
    rows = [{"question": f"Where is {n}?", "answers": [f"{n}"]} for n in range(number)]
    write(folder / "nq.jsonl", rows)


def config(folder: Path, **retrieval: Any) -> None:
    sections = {**CONFIG, **SECTIONS, "retrieval": {**SECTIONS["retrieval"], **retrieval}}
    (folder / "my.yaml").write_text(yaml.safe_dump(sections))


def read(**changes: Any) -> RetrievalRules:
    changes = {**SECTIONS, **changes}
    return RetrievalRules(read_config(table=TABLE, **changes), is_main_process=True)


def section(**changes: Any) -> dict[str, Any]:
    return {"retrieval": {**SECTIONS["retrieval"], **changes}}


@pytest.mark.usefixtures("folder")
def test_each_file_of_passages_is_a_shard() -> None:
    rules = read(**section(index="IVF4,Flat"))
    assert rules.products[0] == "results/smoke/retrieval/recall/nq.json"
    job = wildcards(run="smoke", shard="b", questions="nq")
    assert rules.shards(job) == [f"results/smoke/retrieval/embeddings/{n}.json" for n in "ab"]
    assert rules.shard_options(job) == ["--shards=a", "--shards=b"]
    assert rules.passage_file(job) == "passages/b.jsonl"
    assert rules.question_file(job) == "nq.jsonl"
    assert (rules.model(job), rules.dimension("smoke")) == ("results/smoke/training", 16)
    assert rules.card_options(lambda _: ["--license=mit"])(job) == [
        "--license=mit",
        "--recall=results/smoke/retrieval/recall/nq.json",
        "--bm25=results/data/bm25/recall/nq.json",
    ]
    outputs = rules.outputs_for_all_runs("evaluate_retrieval", ["{searched}/{questions}.json"])
    assert outputs == ["results/data/bm25/nq.json", "results/smoke/retrieval/nq.json"]
    Path("more").mkdir()
    shutil.copy("passages/b.jsonl", "more/b.jsonl")
    names = [*read(**section(passages=["passages", "more"])).passages]
    assert names[0] == "a"
    assert names[1] != names[2]
    assert all(name.startswith("b-") for name in names[1:])


@pytest.mark.usefixtures("folder")
def test_a_large_file_of_passages_is_several_shards(capsys: pytest.CaptureFixture[str]) -> None:
    window = 4 * 1024**2
    line = json.dumps({"id": 1, "text": "a" * 2**20}) + "\n"
    Path("passages/b.jsonl").write_text(line * 10)
    with gzip.open("passages/c.jsonl.gz", "wt") as file:
        file.write(line * 10)
    rules = read(**section(passages="passages", shard_bytes=window + 1))
    ranges = {"b@00000": f"0:{window}", "b@00001": f"{window}:{2 * window}"}
    assert {name: shard.byte_range for name, shard in rules.passages.items()} == {
        **{"a": "", **ranges, "b@00002": f"{2 * window}:", "c.jsonl": ""}
    }
    job = wildcards(run="smoke", shard="b@00001", questions="nq")
    assert rules.passage_file(job) == "passages/b.jsonl"
    assert rules.byte_range_options(job) == [f"--byte-range={window}:{2 * window}"]
    assert rules.byte_range_options(wildcards(run="smoke", shard="a")) == []
    assert rules.passage_files(job) == [
        f"passages/{n}" for n in ("a.jsonl", "b.jsonl", "c.jsonl.gz")
    ]
    assert [*read(**section(passages="passages", shard_bytes=3 * window)).passages] == [
        "a",
        "b",
        "c.jsonl",
    ]
    os.truncate("passages/b.jsonl", 1001 * window)
    with pytest.raises(SystemExit, match="2"):
        read(**section(passages="passages", shard_bytes=1)).shards(job)
    message = "retrieval: shard_bytes: 1: cuts passages into 1,003 shards, each a job; raise it"
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("folder")
def test_without_passages_each_dataset_is_a_shard() -> None:
    rules = read(retrieval={})
    shards = rules.blocks("smoke")
    first, second = shards
    assert shards == {
        f"docs-{number}_text_sentence": f"docs-{number}_src_sentence" for number in ("0000", "0001")
    }
    assert [Path(path).stem for path in rules.products] == [*shards]
    job = wildcards(run="smoke", shard=second)
    assert rules.prefix(job) == f"results/data/merged/{second}"
    assert (rules.number(wildcards(run="smoke", shard=first)), rules.number(job)) == (0, 1)
    batches = rules.merged_files(job)
    assert {*batches} < {*rules.merged_files(wildcards(run="smoke", shard=first)), *batches}
    assert all(path.startswith("results/data/batches/merge/docs") for path in batches)
    assert read(retrieval={"index": "Flat"}).products == ["results/smoke/retrieval/index.json"]


@pytest.mark.usefixtures("folder")
def test_each_existing_dataset_of_texts_is_a_shard_and_no_dataset_of_titles() -> None:
    Path("old").mkdir()
    for part in "ab":
        for name in ("text_sentence", "src_document"):
            write_dataset(Path(f"old/{part}_{name}"), [3, 4])
    table = "corpus\tfiles\tformat\ttext_key\tweight\nold\told\tindexed\ttext,src\t1\n"
    changes = {**SECTIONS, "retrieval": {}, "sample_corpus": {}}
    config = read_config(table=table, **changes | {"tokenizer": {"path": make_tokenizer("words")}})
    shards = RetrievalRules(config, is_main_process=True).blocks("smoke")
    assert shards == {
        f"old-{number}_text_document": f"old-{number}_src_document" for number in ("0000", "0001")
    }


@pytest.mark.usefixtures("folder")
def test_mistakes_of_the_section_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    causal: dict[str, Any] = {"train": train(), "tokenize": {}, "tokenizer": {"vocab_size": 500}}
    Path("llama.yaml").write_text(yaml.safe_dump(ARCHITECTURE))
    rules = read(**causal, model={"architecture": "llama.yaml"})
    message = r"^my.yaml: retrieval: no run trains .* \(smoke: objective causal\); set train.obj"
    with pytest.raises(UserError, match=message):
        rules.check()
    for changes, message in (
        ({"passages": "gone/*"}, "my.yaml: retrieval: passages: gone/*: matches no files"),
        ({"questions": "gone.tsv"}, "my.yaml: retrieval: questions.gone: gone.tsv: cannot be read"),
        ({"top_k": 46}, "my.yaml: retrieval: top_k: 46: there are only 45 passages"),
        ({"passages": "nq.jsonl"}, "retrieval: passages: nq.jsonl:1: has the key question: "),
    ):
        with pytest.raises(SystemExit, match="2"):
            read(**section(**changes)).shards(wildcards(run="smoke"))
        assert message in capsys.readouterr().err


@pytest.mark.usefixtures("folder")
def test_the_section_is_the_same_for_all_runs() -> None:
    runs = write_runs("run seed retrieval", "a 1 null")
    with pytest.raises(UserError, match="retrieval: must be the same for all runs"):
        read(runs=runs)


@pytest.mark.usefixtures("folder")
def test_an_absent_rule_is_explained() -> None:
    assert read(retrieval=None).absent("search") == (
        "this config searches nothing; give it the section retrieval"
    )
    assert read().absent("index_blocks").startswith("retrieval.index is empty")
    assert read().names == ["smoke"]
    none = read(retrieval=None)
    assert (none.names, none.card_inputs(wildcards(run="smoke"))) == ([], [])


def test_the_dry_run_shows_each_job(folder: Path) -> None:
    config(folder, bm25=False)
    planned = jobs(snakemake_alone(folder, "-n", *MINE, "retrieval", "report"))
    assert {name: planned.get(name) for name in (*RULES, "train", "report")} == {
        "embed_passages": 2, "embed_blocks": None, "embed_questions": 1, "index_blocks": None,
        "search": 1, "search_bm25": None, "evaluate_retrieval": 1,
        "retrieval": 1, "train": 1, "report": 1,
    }  # fmt: skip
    ask(folder, 0)
    # A target that needs no questions does not read them.
    assert "train" in jobs(snakemake_alone(folder, "-n", *MINE, "train"))
    refused = snakemake_alone(folder, "-n", *MINE, "retrieval")
    assert refused.returncode == 2
    assert "tokamake: my.yaml: retrieval: questions.nq: nq.jsonl: no question" in refused.stderr


@pytest.mark.extra("retrieval", "faiss", "bm25s")
def test_one_command_trains_and_measures_runs_that_start_from_each_other(folder: Path) -> None:
    cells = {
        "model.checkpoint": "{run: ict}",
        "finetune.task": "retrieval",
        "finetune.train_files": "dpr.json",
        "finetune.validation_files": "dpr.json",
        "train.global_batch_size": "8",
    }
    rows = [["run", *cells], ["ict", *[""] * len(cells)], ["tuned", *cells.values()]]
    Path("runs.tsv").write_text("".join("\t".join(row) + "\n" for row in rows))
    answered = {"answers": ["1"], "positive_ctxs": [{"title": "Town 1", "text": "It is old."}]}
    write(Path("dpr.json"), [{"question": f"Where is {n}?", **answered} for n in range(8)])
    config(folder, index="Flat")
    sections = yaml.safe_load((folder / "my.yaml").read_text())
    del sections["run"]
    (folder / "my.yaml").write_text(yaml.safe_dump({**sections, "runs": "runs.tsv"}))
    planned = jobs(snakemake_alone(folder, "-n", *MINE, "evaluate_retrieval"))
    assert {name: planned.get(name) for name in (*RULES, "train", "finetune")} == {
        "train": 1, "finetune": 1,
        "embed_passages": 4, "embed_blocks": None, "embed_questions": 2, "index_blocks": 2,
        "search": 2, "search_bm25": 1, "evaluate_retrieval": 3, "retrieval": None,
    }  # fmt: skip


def planned_rules(folder: Path) -> set[str]:
    return {*jobs(snakemake_alone(folder, "-n", *MINE, "retrieval"))} & {*RULES} - {"retrieval"}


@pytest.mark.slow
@pytest.mark.extra("retrieval", "faiss", "bm25s")
def test_changed_inputs_redo_what_depends_on_them(tmp_path: Path) -> None:
    folder = make_workspace(tmp_path)
    prepare(folder)
    config(folder, index={"factory": "IVF2,Flat", "nprobe": 2})
    done = snakemake_alone(folder, *MINE, "retrieval")
    assert done.returncode == 0, done.stdout + done.stderr
    report(folder / "results")
    page = (folder / "results/report.html").read_text()
    assert "7 questions in nq. The passages were searched with an index: IVF2,Flat" in page
    recall = json.loads((folder / "results/data/bm25/recall/nq.json").read_text())["recall"]
    assert recall["1"] > 0.8
    assert planned_rules(folder) == set()
    evaluated = {"evaluate_retrieval"}
    ask(folder, 8)
    assert planned_rules(folder) == {"embed_questions", "search", "search_bm25", *evaluated}
    ask(folder, 7)
    config(folder, index={"factory": "IVF2,Flat", "nprobe": 1})
    assert "index_blocks" not in planned_rules(folder)
    done = snakemake_alone(folder, *MINE, "retrieval")
    assert done.returncode == 0, done.stdout + done.stderr
    # A file of passages less: its embeddings stay, and nothing finds them.
    (folder / "passages/b.jsonl").unlink()
    assert "embed_passages" not in planned_rules(folder)
    done = snakemake_alone(folder, *MINE, "retrieval")
    assert done.returncode == 0, done.stdout + done.stderr
    index = json.loads((folder / "results/smoke/retrieval/index.json").read_text())
    assert index["num_vectors"] == len(FILES["a"])
    sections = yaml.safe_load((folder / "my.yaml").read_text())
    sections["seed"] = 5  # other weights
    sections["train"]["on_change"] = "restart"
    (folder / "my.yaml").write_text(yaml.safe_dump(sections))
    redone = planned_rules(folder)
    assert {"embed_passages", "embed_questions", "index_blocks", "search", *evaluated} == redone


@pytest.mark.grid
@pytest.mark.slow
def test_blocks_of_datasets_are_embedded(tmp_path: Path) -> None:
    folder = make_workspace(tmp_path)
    prepare(folder)
    sections = {**CONFIG, **SECTIONS, "retrieval": {}}
    (folder / "my.yaml").write_text(yaml.safe_dump(sections))
    done = snakemake_alone(folder, *MINE, "retrieval")
    assert done.returncode == 0, done.stdout + done.stderr
    shards = [*(folder / "results/smoke/retrieval/embeddings").glob("*.json")]
    facts = [json.loads(path.read_text()) for path in shards]
    assert len(facts) > 1
    assert {fact["made_from"]["titles"] for fact in facts} == {"src"}
    assert all(fact["num_vectors"] for fact in facts)


@pytest.mark.grid
@pytest.mark.slow
@pytest.mark.extra("retrieval", "bm25s")
def test_ict_lifts_recall_over_random_weights(tmp_path: Path) -> None:
    folder = make_retriever_workspace(tmp_path, steps=200)
    for target, prepare_next in (("data", write_questions), ("retrieval", None)):
        done = snakemake(folder, *MINE, target)
        assert done.returncode == 0, done.stdout + done.stderr
        if prepare_next:
            prepare_next(folder)
    found = recalls(folder)
    # Chance finds 20 of 2,220 passages.
    assert found.random < 0.1
    assert found.trained > 5 * found.random
    assert found.trained > 0.3
    assert found.bm25 > found.trained
