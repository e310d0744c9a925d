"""Many raw files in few jobs: only failed or changed shards are rebuilt."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.workflows import CONFIG, MINE, SNAKEMAKE, jobs, make_workspace, snakemake

WEB = "corpus\tfiles\ttext_key\tweight\nweb\traw\ttitle,text\t1\n"
ONE_OF_EACH = {"tokenize": 1, "merge": 1, "describe": 1, "weigh": 1, "data": 1}


def write_raw(path: Path, documents: int) -> None:
    lines = [{"title": f"{path.name} {n}", "text": f"document {n}. " * 9} for n in range(documents)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture(scope="module")
def batched(tmp_path_factory: pytest.TempPathFactory, sampled: Path) -> Path:
    """A workspace with six raw files, each a shard of two datasets; a job makes three shards."""
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
    """Files of indexed datasets, with the values that change on a rewrite."""
    paths = (path for path in (folder / "results/data" / kind).rglob("*") if path.is_file())
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in paths}


def changed(before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]) -> set[str]:
    """Names without endings of files that are new, gone or written again."""
    return {name.partition(".")[0] for name, _ in before.items() ^ after.items()}


@pytest.mark.slow
def test_a_failed_shard_reruns_alone(batched: Path) -> None:
    raw = batched / "raw/4.jsonl"
    good = raw.read_text()
    raw.write_text(good + "{\n")
    planned = jobs(snakemake(batched, "-n", *MINE, "data"))
    assert planned == {**ONE_OF_EACH, "tokenize": 2}
    result = snakemake(batched, *MINE, "data")
    assert result.returncode == 1
    assert (
        "tokamake tokenize-batch: raw/4.jsonl:21: not valid JSON" in result.stdout + result.stderr
    )
    before = state(batched, "shards")
    assert {"00003_text.json", "00003_title.json", "00005_title.json"} <= set(before)
    assert "00004_text.json" not in before
    # Quarantine keeps finished shards, as a repair of the file does.
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


@pytest.mark.grid
@pytest.mark.slow
def test_only_a_changed_raw_file_is_tokenized_again(batched: Path) -> None:
    assert snakemake(batched, *MINE, "data").returncode == 0
    shards, merged = state(batched, "shards"), state(batched, "merged")
    os.utime(batched / "raw/2.jsonl")
    assert not jobs(snakemake(batched, "-n", *MINE, "data"))  # the bytes are the same
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
def test_a_job_uses_the_plan_of_the_start_of_its_run(batched: Path) -> None:
    assert snakemake(batched, *MINE, "data").returncode == 0
    (batched / "raw").rename(batched / "moved")
    job = "--mode subprocess --cores 1 --target-jobs weigh:run=smoke --allowed-rules weigh"
    alone = snakemake(batched, *job.split(), "--force", "--nolock", "--no-hooks", *MINE[:2])
    whole = snakemake(batched, "-n", *MINE, "data")
    (batched / "moved").rename(batched / "raw")
    assert alone.returncode == 0, alone.stderr
    assert "corpora.tsv:2: files: raw: no such file; fix" in whole.stderr


@pytest.mark.grid
@pytest.mark.slow
def test_duplicate_documents_are_left_out(tmp_path: Path, sampled: Path) -> None:
    make_workspace(tmp_path)
    (tmp_path / "corpora.tsv").write_text(
        "corpus\tfiles\tweight\tkeep_copies\nweb\traw\t1\t\nbooks\traw/2.jsonl\t1\ttrue\n"
    )
    config = {
        **CONFIG,
        "sample_corpus": {},
        "tokenizer": {"path": str(sampled / "tokenizer")},
        "plan": {"shard_bytes": 3500},
        "tokenize": {"deduplicate": True, "near_duplicates": "fineweb", "repeats": "words"},
    }
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "raw").mkdir()
    for number, documents in enumerate((15, 20, 18)):
        write_raw(tmp_path / f"raw/{number}.jsonl", documents)
    planned = jobs(snakemake(tmp_path, "-n", *MINE, "data"))
    of_duplicates = {"hash_documents": 3, "find_duplicates": 1}
    of_near_duplicates = {"sign_documents": 3, "find_near_duplicates": 1}
    of_repeats = {"hash_passages": 3, "find_repeats": 1}
    found = {**of_duplicates, **of_near_duplicates, **of_repeats}
    assert planned == {**ONE_OF_EACH, **found, "tokenize": 4, "merge": 2}
    assert snakemake(tmp_path, *MINE, "data").returncode == 0
    books, web = json.loads((tmp_path / "results/data/metadata.json").read_text())
    names = ("documents_in", "total_num_docs", "duplicate_documents", "near_duplicate_documents")
    assert [web[name] for name in names] == [53, 20, 33, 0]
    assert [books.get(name, 0) for name in names] == [18, 18, 0, 0]
    assert "Nothing to be done" in snakemake(tmp_path, *MINE, "data").stderr


@pytest.mark.slow
def test_a_file_of_a_batch_is_no_result_of_all_batches(tmp_path: Path) -> None:
    """Else a dry run would try each signed batch as the output of find_near_duplicates, too."""
    make_workspace(tmp_path)
    near = {**CONFIG, "tokenize": {"near_duplicates": "fineweb"}}
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(near))
    result = snakemake(tmp_path, "-n", *MINE, "results/data/near_duplicates/signed/none.rows")
    assert result.returncode == 2
    assert "no rule has this name or writes this file" in result.stderr


PEAK = """
import resource, subprocess, sys
code = subprocess.call(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)  # kilobytes
sys.exit(code)
"""


@pytest.mark.grid
@pytest.mark.slow
def test_a_hundred_thousand_raw_files_need_hundreds_of_jobs(tmp_path: Path) -> None:
    make_workspace(tmp_path)
    (tmp_path / "corpora.tsv").write_text("corpus\tfiles\tweight\nweb\traw/*.jsonl\t1\n")
    plan = {"shard_bytes": 100_000, "merged_bytes": 300_000}  # 10,000 merged files
    config = {**CONFIG, "sample_corpus": {}, "plan": plan}
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "raw").mkdir()
    for number in range(100_000):
        descriptor = os.open(tmp_path / f"raw/{number}.jsonl", os.O_CREAT | os.O_WRONLY)
        os.write(descriptor, b'{"text": "a"}\n')
        os.truncate(descriptor, 60_000)  # takes no room
        os.close(descriptor)
    command = [sys.executable, "-c", PEAK, *SNAKEMAKE, "-n", *MINE, "data"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    shutil.rmtree(tmp_path / "raw")
    planned = jobs(result)
    assert planned == {"train_tokenizer": 1, **ONE_OF_EACH, "tokenize": 500, "merge": 125}
    assert int(result.stdout.split()[-1]) < 300_000
