"""The whole workflow as a user runs it: dry run, run, run again, repair, and clear refusals."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent

ARCHITECTURE = {
    "family": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip

CONFIG = {
    "run": "smoke",
    "corpora": "corpora.tsv",
    "sample_corpus": {
        "code": {"num_files": 2, "file_bytes": 80_000},
        "docs": {"num_files": 2, "file_bytes": 60_000},
    },
    "tokenizer": {"vocab_size": 500},
    "plan": {"shard_bytes": 50_000, "merged_bytes": 45_000},
    "model": {"architecture": "architecture.yaml"},
    "train": {
        "sequence_length": 32, "micro_batch_size": 4, "global_batch_size": 16, "train_steps": 40,
        "split": "80,10,10", "log_interval": 1, "evaluation_interval": 20, "evaluation_steps": 1,
        "optimizer": {"learning_rate": 0.02}, "schedule": {"warmup_steps": 2},
    },
    "evaluate": {"max_tokens": 2000},
    "generate": {"prompts": ["The ", "it's $HOME {x}"], "max_new_tokens": 8},
}  # fmt: skip

CORPORA = """\
corpus\tfiles\ttext_key\tweight
code\tresults/raw/code/*\ttext\t2
docs\tresults/raw/docs/*\ttext\t1
"""

SNAKEMAKE = (sys.executable, "-m", "snakemake", "--profile", "profiles/local")


def make_workspace(folder: Path) -> Path:
    """A user's folder: the workflow and profiles as they are, a config of one's own."""
    for name in ("workflow", "profiles", "config"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "my.yaml").write_text(yaml.safe_dump(CONFIG))
    (folder / "architecture.yaml").write_text(yaml.safe_dump(ARCHITECTURE))
    (folder / "corpora.tsv").write_text(CORPORA)
    return folder


def snakemake(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*SNAKEMAKE, *arguments]
    environment = {key: value for key, value in os.environ.items() if key != "SNAKEMAKE_PROFILE"}
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def jobs(result: subprocess.CompletedProcess[str]) -> dict[str, int]:
    """Jobs by rule, from the table of a dry run."""
    assert result.returncode == 0, result.stdout + result.stderr
    text = result.stdout + result.stderr
    table = re.search(r"^job +count\n-+ +-+\n(.*?)^total", text, re.M | re.S)
    rows = [] if table is None else re.findall(r"^(\w+) +(\d+)$", table[1], re.M)
    return {rule: int(count) for rule, count in rows}


MINE = ("--configfile", "my.yaml", "--")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace in which everything has been built once."""
    folder = make_workspace(tmp_path_factory.mktemp("smoke"))
    before = jobs(snakemake(folder, "-n", *MINE, "all"))
    assert before == {
        "sample_corpus": 1, "train_tokenizer": 1, "tokenize": 6, "merge": 4, "describe": 1,
        "weigh": 1, "index": 1, "init_model": 1, "import_hf": 1, "resolve": 1, "train": 1,
        "export_hf": 1, "evaluate": 1, "generate": 1, "plot": 1, "report": 1, "all": 1,
    }  # fmt: skip
    assert not (folder / "results").exists()
    result = snakemake(folder, *MINE, "all")
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


@pytest.mark.slow
def test_everything_is_there(finished: Path) -> None:
    run = finished / "results/smoke"
    summary = json.loads((run / "train.json").read_text())
    losses = [
        entry["loss"]
        for line in (run / "training/metrics.jsonl").read_text().splitlines()
        if "loss" in (entry := json.loads(line))
    ]
    assert summary["world_size"] == 2
    assert losses[-1] < losses[0] - 0.5
    assert list((run / "training").rglob("events.out.tfevents*"))
    evaluation = json.loads((run / "evaluate.json").read_text())
    assert evaluation["overall"]["perplexity"] < 500
    assert len(json.loads((run / "samples.json").read_text())) == 2
    report = (finished / "results/report.html").read_text()
    assert len(report) > 1_000_000
    top = {path.name for path in finished.iterdir()} - {".snakemake"}
    mine = {"workflow", "profiles", "config", "my.yaml", "architecture.yaml", "corpora.tsv"}
    assert top - mine == {"results", "logs"}


@pytest.mark.slow
def test_transformers_loads_the_export(finished: Path) -> None:
    import torch
    import transformers

    export = finished / "results/smoke/export"
    model = transformers.AutoModelForCausalLM.from_pretrained(export)
    tokenizer = transformers.AutoTokenizer.from_pretrained(export)
    tokens = torch.tensor([tokenizer("def main():\n    return 1")["input_ids"]])
    with torch.no_grad():
        loss = model(tokens, labels=tokens).loss
    assert loss < 6.3  # ln 500 = 6.2 for a model that has learnt nothing


@pytest.mark.slow
def test_nothing_to_be_done(finished: Path) -> None:
    result = snakemake(finished, *MINE, "all")
    assert "Nothing to be done" in result.stdout + result.stderr


AFTER_MERGE = [
    "describe", "weigh", "index", "resolve", "train", "export_hf", "evaluate", "generate", "plot",
    "report",
]  # fmt: skip


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[min(50, len(content) // 2)] ^= 1
    path.write_bytes(bytes(content))


@pytest.mark.slow
@pytest.mark.parametrize("damage", [Path.unlink, flip], ids=["deleted", "damaged"])
def test_a_broken_shard_is_redone_with_what_depends_on_it(finished: Path, damage) -> None:  # type: ignore[no-untyped-def]
    shard = finished / "results/data/shards/docs/00001.bin"
    whole = shard.read_bytes()
    damage(shard)
    result = snakemake(finished, "-n", *MINE, "report")
    assert "docs/00001.bin" in result.stderr
    assert jobs(result) == {"tokenize": 1, "merge": 1, **dict.fromkeys(AFTER_MERGE, 1)}
    assert snakemake(finished, *MINE, "report").returncode == 0
    assert shard.read_bytes() == whole
    assert "Nothing to be done" in snakemake(finished, *MINE, "report").stderr


@pytest.mark.slow
def test_a_changed_setting_redoes_what_depends_on_it(finished: Path) -> None:
    def changed(**sections: object) -> dict[str, int]:
        (finished / "other.yaml").write_text(yaml.safe_dump({**CONFIG, **sections}))
        return jobs(snakemake(finished, "-n", "--configfile", "other.yaml", "--", "evaluate"))

    assert changed(evaluate={"max_tokens": 3000}) == {"evaluate": 1}
    steps = changed(train={**CONFIG["train"], "train_steps": 50})  # type: ignore[dict-item]
    assert set(steps) == {"index", "resolve", "train", "export_hf", "evaluate"}
    retokenized = changed(tokenize={"append_eod": False})
    assert retokenized["tokenize"] == 6
    assert "train_tokenizer" not in retokenized
    assert "train_tokenizer" not in changed(tokenize={"on_bad_document": "quarantine"})
    assert changed(tokenizer={"vocab_size": 501})["train_tokenizer"] == 1
    (finished / "other.yaml").unlink()


def replant(path: Path, content: bytes, before: os.stat_result) -> None:
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.slow
@pytest.mark.parametrize("damage", [Path.unlink, flip], ids=["deleted", "damaged"])
@pytest.mark.parametrize(
    ("name", "redone"),
    [
        ("shards/docs/00001.idx", {"tokenize": 1, "merge": 1}),
        ("shards/docs/00001.sources", {"tokenize": 1, "merge": 1}),
        ("shards/docs/00001.json", {"tokenize": 1, "merge": 1}),
        ("batches/tokenize/docs-00001.json", {"tokenize": 1, "merge": 1}),
        ("merged/docs-0000_text_document.bin", {"merge": 1}),
    ],
)
def test_any_broken_file_of_a_pair_is_seen(finished: Path, name: str, redone, damage) -> None:  # type: ignore[no-untyped-def]
    path = finished / "results/data" / name
    content, before = path.read_bytes(), path.stat()
    damage(path)
    planned = jobs(snakemake(finished, "-n", *MINE, "report"))
    replant(path, content, before)
    assert planned == {**redone, **dict.fromkeys(AFTER_MERGE, 1)}


@pytest.mark.slow
def test_a_failing_run_is_told_with_its_own_words(finished: Path) -> None:
    sections = {**CONFIG["train"], "micro_batch_size": 16}  # type: ignore[dict-item]
    (finished / "other.yaml").write_text(
        yaml.safe_dump({**CONFIG, "run": "bad", "train": sections})
    )
    result = snakemake(finished, "--configfile", "other.yaml", "--", "train")
    text = result.stdout + result.stderr
    assert result.returncode == 1
    assert "tokamake train: train.global_batch_size: 16: not a multiple of" in text
    assert "non-zero exit status 2" in text
    assert "MissingOutputException" not in text
    assert "Traceback" not in text


@pytest.mark.slow
def test_files_added_later_leave_finished_pairs_alone(finished: Path) -> None:
    def prepared() -> dict[str, tuple[bytes, int]]:
        paths = (finished / "results/data").glob("[ms]*/**/*.bin")
        return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in paths}

    def added(number: int) -> None:
        (finished / f"extra{number}.jsonl").write_text('{"text": "one more document"}\n' * 50)
        (finished / "corpora.tsv").write_text(CORPORA.replace("docs/*", "docs/* extra*.jsonl"))
        planned = jobs(snakemake(finished, "-n", *MINE, "data"))
        assert planned == {"tokenize": 1, "merge": 1, "describe": 1, "weigh": 1, "data": 1}
        assert snakemake(finished, *MINE, "data").returncode == 0
        assert "Nothing to be done" in snakemake(finished, *MINE, "data").stderr

    before = prepared()
    for number in range(2):
        added(number)
    after = prepared()
    assert {path: after[path] for path in before} == before
    assert len(after) == len(before) + 4


WEB = "corpus\tfiles\ttext_key\tweight\nweb\traw\ttitle,text\t1\n"
ONE_OF_EACH = {"tokenize": 1, "merge": 1, "describe": 1, "weigh": 1, "data": 1}


def write_raw(path: Path, documents: int) -> None:
    lines = [{"title": f"{path.name} {n}", "text": f"document {n}. " * 9} for n in range(documents)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture(scope="module")
def batched(tmp_path_factory: pytest.TempPathFactory, sampled: Path) -> Path:
    """A workspace with six raw files, each a shard of two pairs, of which a job makes three."""
    folder = make_workspace(tmp_path_factory.mktemp("batched"))
    (folder / "corpora.tsv").write_text(WEB)
    config = {
        **CONFIG,
        "sample_corpus": {},
        "tokenizer": {"path": str(sampled / "tokenizer")},
        "plan": {"shard_bytes": 3500, "merged_bytes": 3500, "max_jobs": 2},
    }
    (folder / "my.yaml").write_text(yaml.safe_dump(config))
    (folder / "raw").mkdir()
    for number in range(6):
        write_raw(folder / f"raw/{number}.jsonl", 20)
    return folder


def state(folder: Path, kind: str) -> dict[str, tuple[int, int]]:
    """Files of pairs with what changes when one is written again."""
    paths = (path for path in (folder / "results/data" / kind).rglob("*") if path.is_file())
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in paths}


def changed(before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]) -> set[str]:
    """Names without endings of files that are new, gone or written again."""
    return {name.partition(".")[0] for name, _ in before.items() ^ after.items()}


@pytest.mark.slow
def test_a_shard_that_fails_is_redone_alone(batched: Path) -> None:
    raw = batched / "raw/4.jsonl"
    good = raw.read_text()
    raw.write_text(good + "{\n")
    planned = jobs(snakemake(batched, "-n", *MINE, "data"))
    assert planned == {**ONE_OF_EACH, "tokenize": 2}
    result = snakemake(batched, *MINE, "data")
    assert result.returncode == 1
    assert "tokamake tokenize: raw/4.jsonl:21: not valid JSON" in result.stdout + result.stderr
    before = state(batched, "shards")
    assert {"00003_text.json", "00003_title.json", "00005_title.json"} <= set(before)
    assert "00004_text.json" not in before
    # Turning to quarantine keeps what is whole, as mending the file does.
    quarantined = yaml.safe_load((batched / "my.yaml").read_text())
    quarantined["tokenize"] = {"on_bad_document": "quarantine", "max_bad_fraction": 0.1}
    (batched / "other.yaml").write_text(yaml.safe_dump(quarantined))
    assert snakemake(batched, "--configfile", "other.yaml", "--", "data").returncode == 0
    after = state(batched, "shards")
    assert {name: after[name] for name in before} == before
    assert "00004_title.quarantine.jsonl" in after
    raw.write_text(good)
    assert snakemake(batched, *MINE, "data").returncode == 0
    after = state(batched, "shards")
    assert {name: after[name] for name in before} == before
    assert {name for name in after if name.endswith("json")} == {
        f"0000{number}_{key}.json" for number in range(6) for key in ("text", "title")
    }
    assert "Nothing to be done" in snakemake(batched, *MINE, "data").stderr
    metadata = json.loads((batched / "results/data/metadata.json").read_text())
    assert {pair["data_prefix"]: pair["total_num_docs"] for pair in metadata} == {
        f"merged/web-000{number}_{key}_document": 40
        for number in range(3)
        for key in ("text", "title")
    }


@pytest.mark.slow
def test_a_touched_or_changed_raw_file_is_tokenized_anew_alone(batched: Path) -> None:
    assert snakemake(batched, *MINE, "data").returncode == 0
    shards, merged = state(batched, "shards"), state(batched, "merged")
    os.utime(batched / "raw/2.jsonl")
    assert jobs(snakemake(batched, "-n", *MINE, "data")) == ONE_OF_EACH
    assert snakemake(batched, *MINE, "data").returncode == 0
    assert changed(shards, state(batched, "shards")) == {"00002_text", "00002_title"}
    assert changed(merged, state(batched, "merged")) == set()  # the bytes are the same

    shards = state(batched, "shards")
    write_raw(batched / "raw/2.jsonl", 21)
    (batched / "raw/5.jsonl").unlink()
    assert jobs(snakemake(batched, "-n", *MINE, "data")) == {**ONE_OF_EACH, "tokenize": 2}
    assert snakemake(batched, *MINE, "data").returncode == 0
    assert changed(shards, state(batched, "shards")) == {"00002_text", "00002_title"}
    assert changed(merged, state(batched, "merged")) == {
        f"web-000{number}_{key}_document" for number in (1, 2) for key in ("text", "title")
    }
    assert "Nothing to be done" in snakemake(batched, *MINE, "data").stderr


@pytest.mark.slow
def test_a_job_goes_by_the_plan_that_its_run_began_with(batched: Path) -> None:
    assert snakemake(batched, *MINE, "data").returncode == 0
    (batched / "raw").rename(batched / "moved")
    job = "--mode subprocess --cores 1 --target-jobs weigh: --allowed-rules weigh --force --nolock"
    alone = snakemake(batched, *job.split(), "--no-hooks", *MINE[:2])
    whole = snakemake(batched, "-n", *MINE, "data")
    (batched / "moved").rename(batched / "raw")
    assert alone.returncode == 0, alone.stderr
    assert "no file matches raw" in whole.stderr


@pytest.mark.slow
def test_documents_that_come_again_are_left_out(tmp_path: Path, sampled: Path) -> None:
    make_workspace(tmp_path)
    (tmp_path / "corpora.tsv").write_text("corpus\tfiles\tweight\nweb\traw\t1\n")
    config = {
        **CONFIG,
        "sample_corpus": {},
        "tokenizer": {"path": str(sampled / "tokenizer")},
        "plan": {"shard_bytes": 3500},
        "tokenize": {"deduplicate": True},
    }
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "raw").mkdir()
    for number, documents in enumerate((15, 20, 18)):
        write_raw(tmp_path / f"raw/{number}.jsonl", documents)
    planned = jobs(snakemake(tmp_path, "-n", *MINE, "data"))
    assert planned == {**ONE_OF_EACH, "hash_documents": 3, "tokenize": 3, "find_duplicates": 1}
    assert snakemake(tmp_path, *MINE, "data").returncode == 0
    (metadata,) = json.loads((tmp_path / "results/data/metadata.json").read_text())
    counts = [metadata[key] for key in ("documents_in", "total_num_docs", "duplicate_documents")]
    assert counts == [53, 20, 33]
    assert "Nothing to be done" in snakemake(tmp_path, *MINE, "data").stderr


PEAK = """
import resource, subprocess, sys
code = subprocess.call(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)  # kilobytes
sys.exit(code)
"""


@pytest.mark.slow
def test_a_hundred_thousand_raw_files_are_hundreds_of_jobs(tmp_path: Path) -> None:
    make_workspace(tmp_path)
    (tmp_path / "corpora.tsv").write_text("corpus\tfiles\tweight\nweb\traw/*.jsonl\t1\n")
    plan = {"shard_bytes": 100_000, "merged_bytes": 300_000}  # 10,000 merged files
    config = {**CONFIG, "sample_corpus": {}, "plan": plan}
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "raw").mkdir()
    for number in range(100_000):
        descriptor = os.open(tmp_path / f"raw/{number}.jsonl", os.O_CREAT | os.O_WRONLY)
        os.truncate(descriptor, 60_000)  # takes no room
        os.close(descriptor)
    command = [sys.executable, "-c", PEAK, *SNAKEMAKE, "-n", *MINE, "data"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    shutil.rmtree(tmp_path / "raw")
    planned = jobs(result)
    assert planned == {"train_tokenizer": 1, **ONE_OF_EACH, "tokenize": 500, "merge": 125}
    assert int(result.stdout.split()[-1]) < 300_000


MISTAKES = {
    "unknown key": (
        {"trian": {}},
        CORPORA,
        "my.yaml: trian: unknown key; this section knows run, seed",
    ),
    "unknown plug-in": (
        {"train": {"optimizer": {"name": "adamww"}}},
        CORPORA,
        "my.yaml: train.optimizer.name: 'adamww': unknown name; choose one of adamw, sgd",
    ),
    "missing file": (
        {},
        CORPORA.replace("results/raw/docs/*", "none/*.jsonl"),
        'corpus "docs": no file matches none/*.jsonl; fix the files column',
    ),
    "missing architecture": (
        {"model": {"architecture": "none.yaml"}},
        CORPORA,
        "none.yaml: no such file; fix model.architecture",
    ),
    "too long sequences": (
        {"train": {"sequence_length": 128}},
        CORPORA,
        "my.yaml: train.sequence_length: 128: more than the 64 max_position_embeddings",
    ),
    "missing tokenizer": (
        {"tokenizer": {"path": "none"}},
        CORPORA,
        "tokenizer none: no such file or folder; fix the path",
    ),
    "negative weight": (
        {},
        CORPORA.replace("\t1\n", "\t-1\n"),
        "corpora.tsv:3: weight: '-1': input should be greater than 0",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_fail_the_dry_run_with_one_line(tmp_path: Path, mistake: str) -> None:
    sections, table, expected = MISTAKES[mistake]
    make_workspace(tmp_path)
    (tmp_path / "my.yaml").write_text(yaml.safe_dump({**CONFIG, **sections}))
    (tmp_path / "corpora.tsv").write_text(table)
    result = snakemake(tmp_path, "-n", *MINE, "all")
    assert result.returncode != 0
    told = [line for line in result.stderr.splitlines() if not line.startswith("Using profile")]
    assert len(told) == 1
    assert told[0].startswith(f"tokamake: {expected}")
    assert not (tmp_path / "results").exists()


def test_every_rule_is_listed_with_a_sentence(tmp_path: Path) -> None:
    result = snakemake(make_workspace(tmp_path), "--list")
    listed = dict(re.findall(r"^(\w+) \((.*)\)$", result.stdout, re.M))
    assert {"tokenize", "merge", "train", "report", "all"} <= set(listed)
    assert all(len(sentence) > 20 for sentence in listed.values())


def test_the_default_dry_run_draws_its_graph(tmp_path: Path) -> None:
    make_workspace(tmp_path)
    planned = jobs(snakemake(tmp_path, "-n", "train"))
    assert planned["tokenize"] > planned["merge"] > 3
    assert {"sample_corpus", "train_tokenizer", "init_model", "import_hf", "train"} <= set(planned)
    graph = snakemake(tmp_path, "--rulegraph", "--", "all").stdout
    assert "digraph" in graph
    assert "tokenize" in graph
