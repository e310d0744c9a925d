"""The whole workflow as a user runs it: dry run, run, run again, repair, and clear refusals."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.workflows import (
    CONFIG,
    CORPORA,
    MINE,
    SNAKEMAKE,
    jobs,
    make_workspace,
    snakemake,
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace in which everything has been built once."""
    folder = make_workspace(tmp_path_factory.mktemp("smoke"))
    before = jobs(snakemake(folder, "-n", *MINE, "all"))
    assert before == {
        "sample_corpus": 1, "train_tokenizer": 1, "tokenize": 6, "merge": 4, "describe": 1,
        "weigh": 1, "index": 1, "init_model": 1, "import_checkpoint": 1, "resolve": 1, "train": 1,
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
def test_a_broken_shard_is_redone_with_what_depends_on_it(finished: Path) -> None:
    shard = finished / "results/data/shards/docs/00001.bin"
    whole = shard.read_bytes()
    flip(shard)
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


def progress(folder: Path) -> str:
    command = [sys.executable, "-m", "tokamake", "status", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def of_run(
    finished: Path,
    name: str,
    *,
    checkpoint: str,
    architecture: str = "architecture.yaml",
    **train: object,
) -> list[str]:
    """Arguments for a run that starts from a checkpoint of the finished workspace."""
    settings = {**CONFIG["train"], **train}  # type: ignore[dict-item]
    model = {"checkpoint": f"results/smoke/{checkpoint}", "architecture": architecture}
    tokenizer = {"path": "results/tokenizer"}
    given = {**CONFIG, "run": name, "model": model, "tokenizer": tokenizer, "train": settings}
    (finished / f"{name}.yaml").write_text(yaml.safe_dump(given))
    return ["--configfile", f"{name}.yaml", "--", "train"]


@pytest.mark.grid
@pytest.mark.slow
def test_runs_continue_a_checkpoint_or_take_its_weights(finished: Path) -> None:
    records = {}
    for finetune, steps in ((False, 50), (True, 8)):
        name = f"finetune-{finetune}"
        run = of_run(finished, name, checkpoint="training", finetune=finetune, train_steps=steps)
        # Such a checkpoint is read where it is.
        planned = jobs(snakemake(finished, "-n", *run))
        assert planned == dict.fromkeys(("weigh", "index", "resolve", "train"), 1)
        assert snakemake(finished, *run).returncode == 0
        log = (finished / f"logs/{name}/train.log").read_text()
        how = "finetuned: weights alone, at step 0" if finetune else "continued at step 40: weights"
        assert f"start     results/smoke/training/global_step40, {how}" in log
        lines = (finished / f"results/{name}/training/metrics.jsonl").read_text().splitlines()
        records[finetune] = [one for line in lines if "loss" in (one := json.loads(line))]
    assert [record["step"] for record in records[False]] == [*range(41, 51)]
    assert [record["step"] for record in records[True]] == [*range(1, 9)]
    assert records[False][0]["consumed_samples"] == 41 * 16
    begun = (finished / "results/smoke/training/metrics.jsonl").read_text().splitlines()
    for found in records.values():
        assert found[0]["loss"] < json.loads(begun[1])["loss"] - 0.5


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_all_processes_lets_training_save(
    finished: Path, number: signal.Signals
) -> None:
    name = f"stopped-{number.name}"
    run = of_run(finished, name, checkpoint="training", finetune=True, train_steps=5000)
    with subprocess.Popen(
        [*SNAKEMAKE, *run],
        cwd=finished,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert any(line.startswith("step 2/") for line in process.stdout)
        told = progress(finished)
        assert f"run {name}\n  running  train (last output " in told
        os.killpg(process.pid, number)
        printed = process.stdout.read()  # up to the end of the last process
    log = (finished / f"logs/{name}/train.log").read_text()
    (step,) = re.findall(rf"^stopped by {number.name}: saved at step (\d+), run", log, re.M)
    assert "Traceback" not in log + printed
    words = f"tokamake: run {name} is saved at step {step}; run the same command again to go on"
    assert printed.count(words) == 1
    latest = finished / f"results/{name}/training/latest"
    assert latest.read_text().strip() == f"global_step{step}"


@pytest.mark.grid
@pytest.mark.slow
def test_other_formats_are_imported(finished: Path) -> None:
    run = of_run(finished, "exported", checkpoint="export", finetune=True, train_steps=4)
    planned = jobs(snakemake(finished, "-n", *run))
    made = ("weigh", "index", "import_checkpoint", "resolve", "train")
    assert planned == dict.fromkeys(made, 1)
    assert snakemake(finished, *run).returncode == 0
    assert "Nothing to be done" in snakemake(finished, *run).stderr


@pytest.mark.slow
def test_a_start_that_does_not_fit_fails_the_dry_run(finished: Path) -> None:
    def told(**train: object) -> list[str]:
        result = snakemake(finished, "-n", *of_run(finished, "unfit", **train))  # type: ignore
        assert result.returncode != 0
        lines = result.stderr.splitlines()
        return [line for line in lines if not line.startswith("Using profile")]

    (missing,) = told(checkpoint="none", finetune=True)
    assert "unfit.yaml: model.checkpoint: results/smoke/none: no such folder; give" in missing
    (states,) = told(checkpoint="export", finetune=False)
    assert "results/smoke/export: has no optimizer states of adamw to continue with" in states
    (ended,) = told(checkpoint="training", finetune=False)
    assert "global_step40: is at step 40 already, and the run ends at step 40; raise" in ended
    text = (finished / "architecture.yaml").read_text()
    (finished / "wide.yaml").write_text(text.replace("hidden_size: 32", "hidden_size: 64"))
    first, second = told(checkpoint="export", architecture="wide.yaml", finetune=True)
    assert "model.checkpoint: results/smoke/export: is of another architecture than" in first
    assert second == "tokamake: hidden_size: checkpoint 32, config 64 (wide.yaml)"


def replant(path: Path, content: bytes, before: os.stat_result) -> None:
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.slow
@pytest.mark.parametrize("damage", [Path.unlink, flip], ids=["deleted", "damaged"])
@pytest.mark.parametrize(
    ("name", "redone"),
    [
        ("shards/docs/00001.bin", {"tokenize": 1, "merge": 1}),
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
    assert "tokamake train: global_batch_size: 16 samples cannot be shared by 2" in text
    assert "non-zero exit status 2" in text
    assert "MissingOutputException" not in text
    assert "Traceback" not in text
    told = progress(finished)
    assert "run bad\n  failed   train\n  done     weigh, index, init_model, resolve\n" in told
    assert "\nfailed: train, logs/bad/train.log ends with:\n" in told
    assert "  tokamake train: global_batch_size: 16 samples cannot be shared by 2" in told


@pytest.mark.grid
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


MISTAKES = {
    "unknown key": (
        {"trian": {}},
        CORPORA,
        "my.yaml: trian: unknown key; did you mean train?",
    ),
    "unknown plug-in": (
        {"train": {"optimizer": {"name": "adamww"}}},
        CORPORA,
        "my.yaml: train.optimizer.name: 'adamww': unknown name; choose one of adafactor, ",
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


MISTAKES |= {
    "nothing to validate on": (
        {"train": {**CONFIG["train"], "split": "9,0,1"}},
        CORPORA,
        "my.yaml: train: split: '9,0,1': nothing to validate on; give the second number a share",
    ),
    "no length": (
        {"train": {**CONFIG["train"], "train_steps": None}},
        CORPORA,
        "my.yaml: train: no train_steps, train_samples or train_tokens, so the epochs of all "
        "corpora say how long to train; code, docs has none, give it epochs or give train_steps",
    ),
    "no tokens to fill gaps with": (
        {"train": {**CONFIG["train"], "fim": {"rate": 0.5}}},
        CORPORA,
        "my.yaml: train.fim: <fim_prefix>, <fim_suffix>, <fim_middle>: not a token of the "
        "tokenizer that is to be trained; add it to tokenizer.special_tokens",
    ),
    "a form that the model cannot have": (
        {"convert": ["mds-tp3"]},
        CORPORA,
        "my.yaml: convert: mds-tp3: tp3: does not divide num_attention_heads 4; give a divisor",
    ),
    "braces in a path": (
        {"model": {"architecture": "{x}.yaml"}},
        CORPORA,
        "my.yaml: model.architecture: {x}.yaml: braces in a path are wildcards of Snakemake; "
        "rename the file or folder, or give a link to it",
    ),
    "sets without one to validate on": (
        {},
        "corpus\tfiles\tweight\tsets\ncode\tresults/raw/code/*\t2\ttrain=0:0.9 test=0.9:1\n",
        "my.yaml: train: split: '80,10,10': nothing to validate on (all corpora have sets of "
        "their own); name a validation set in the column sets",
    ),
    "heads that ranks cannot share": (
        {"train": {**CONFIG["train"], "parallel": {"tensor_parallel_size": 3}}},
        CORPORA,
        "my.yaml: train.parallel.tensor_parallel_size: 3: does not divide 4 (attention heads)",
    ),
    "too few ranks": (
        {"train": {**CONFIG["train"], "parallel": {"tensor_parallel_size": 4}}},
        CORPORA,
        "run smoke: train.parallel: tensor 4 × context 1 × pipeline 1 needs 4 ranks or a multiple, "
        "this run has 2; change the number of ranks or these sizes (ranks: the resource tasks of",
    ),
    "a batch that ranks cannot share": (
        {"train": {**CONFIG["train"], "micro_batch_size": 16}},
        CORPORA,
        "run smoke: global_batch_size: 16 samples cannot be shared by 2 data-parallel ranks",
    ),
    "a bad part": (
        {},
        "corpus\tfiles\tweight\tsets\ncode\tresults/raw/code/*\t2\ttrain=1:0\n",
        "corpora.tsv:2: sets: 'train=1:0': '1:0': give a part of the documents, START:END",
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


def test_a_folder_and_special_tokens_may_have_braces(tmp_path: Path) -> None:
    folder = tmp_path / "{folder}"
    folder.mkdir()
    make_workspace(folder)
    tokenizer = {"vocab_size": 500, "special_tokens": ["<{x}>"]}
    (folder / "my.yaml").write_text(yaml.safe_dump({**CONFIG, "tokenizer": tokenizer}))
    assert jobs(snakemake(folder, "-n", *MINE, "all"))["report"] == 1


@pytest.mark.parametrize(
    ("split", "sets", "use"),
    [
        ("95,5,0", "", "evaluation uses the split valid"),
        ("98,1,1", "train=0:0.9 hard=0.9:1", "evaluation uses the split hard"),
        ("98,1,1", "train=0:0.8 hard=0.8:0.9 valid=0.9:1", "evaluation uses the split valid"),
        ("100,0,0", "", "there is no evaluation"),
    ],
)
def test_a_run_without_a_test_split_says_what_it_is_evaluated_on(
    tmp_path: Path, split: str, sets: str, use: str
) -> None:
    make_workspace(tmp_path)
    steps = int(split != "100,0,0")
    settings = {**CONFIG["train"], "split": split, "evaluation_steps": steps}
    (tmp_path / "my.yaml").write_text(yaml.safe_dump({**CONFIG, "train": settings}))
    table = "corpus\tfiles\tweight\tsets\n" + "".join(
        f"{name}\tresults/raw/{name}/*\t1\t{sets}\n" for name in ("code", "docs")
    )
    (tmp_path / "corpora.tsv").write_text(table)
    result = snakemake(tmp_path, "-n", *MINE, "evaluate")
    assert jobs(result)["evaluate"] == 1
    assert f"tokamake: run smoke: no test split: {use}\n" in result.stderr
    assert ("smoke.weights.hard.txt" in result.stdout + result.stderr) == bool(sets)


def test_conversion_to_no_form_is_told(tmp_path: Path) -> None:
    result = snakemake(make_workspace(tmp_path), "-n", *MINE, "convert")
    assert result.returncode != 0
    assert result.stderr.splitlines()[-1].startswith("tokamake: convert: the config names no form;")


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (
            "results/smoke/train.40.json",
            "run smoke ends at step 40; its last job makes results/smoke/",
        ),
        (
            "results/smoke/evaluate.41.json",
            "run smoke ends at step 40; its last job makes results/smoke/",
        ),
        ("results/smok/train.json", "no run is called smok; there is smoke"),
        ("tarin", "no rule is called so, or makes it; did you mean train?"),
        ("results/smoke/what", "no rule is called so, or makes it; `snakemake --list` lists"),
    ],
)
def test_a_target_that_nothing_makes_is_told_in_a_line(
    tmp_path: Path, target: str, expected: str
) -> None:
    result = snakemake(make_workspace(tmp_path), "-n", *MINE, target)
    assert result.returncode != 0
    told = [line for line in result.stderr.splitlines() if not line.startswith("Using profile")]
    assert len(told) == 1
    assert told[0].startswith(f"tokamake: {target}: {expected}")


def test_every_rule_is_listed_with_a_sentence(tmp_path: Path) -> None:
    result = snakemake(make_workspace(tmp_path), "--list")
    listed = dict(re.findall(r"^(\w+) \((.*)\)$", result.stdout, re.M))
    assert {"tokenize", "merge", "train", "report", "all"} <= set(listed)
    assert all(len(sentence) > 20 for sentence in listed.values())


def test_the_default_dry_run_draws_its_graph(tmp_path: Path) -> None:
    make_workspace(tmp_path)
    planned = jobs(snakemake(tmp_path, "-n", "train"))
    assert planned["tokenize"] > planned["merge"] > 3
    assert {"sample_corpus", "train_tokenizer", "init_model", "import_checkpoint", "train"} <= set(
        planned
    )
    graph = snakemake(tmp_path, "--rulegraph", "--", "all").stdout
    assert "digraph" in graph
    assert "tokenize" in graph


@pytest.mark.grid
@pytest.mark.slow
def test_sets_and_epochs_of_corpora(tmp_path: Path, sampled: Path) -> None:
    """Trains for exactly the epochs that corpora state, and measures on sets that they name."""
    make_workspace(tmp_path)
    (tmp_path / "raw").symlink_to(sampled / "raw")
    settings = {**CONFIG["train"], "train_steps": None, "blend": "corpora", "split": "90,5,5"}
    settings |= {"drop_last_partial_sequence": False, "evaluation_interval": 1000}
    settings |= {"global_batch_size": 32, "micro_batch_size": 16, "log_interval": 50}
    changed = {**CONFIG, "train": settings, "sample_corpus": {}}
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(changed))
    (tmp_path / "corpora.tsv").write_text(
        "corpus\tfiles\tepochs\tsets\n"
        "code\traw/code/*\t0.5\t\n"
        "docs\traw/docs/*\t1.5\ttrain=0:0.8 valid=0.8:0.9 hard=0.8:0.9 test=0.9:1\n"
    )
    result = snakemake(tmp_path, *MINE, "train", "evaluate")
    assert result.returncode == 0, result.stderr
    index = json.loads((tmp_path / "results/smoke/index/index.json").read_text())
    files = index["splits"]["train"]["files"]
    for file in files:
        wanted = (3 if file["corpus"] == "docs" else 1) * file["tokens"] // 2 - 1
        assert file["drawn_samples"] == wanted // 32
    trained = json.loads((tmp_path / "results/smoke/train.json").read_text())
    assert trained["step"] == sum(file["drawn_samples"] for file in files) // 32
    last = trained["validation_losses"][-1]
    assert last["step"] == trained["step"]
    # One and the same documents under two names.
    assert last["validation_loss"] == last["validation_loss/hard"] > 0
    evaluated = json.loads((tmp_path / "results/smoke/evaluate.json").read_text())
    assert set(evaluated["corpora"]) == {"docs"}
