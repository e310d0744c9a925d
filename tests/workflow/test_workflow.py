"""The whole workflow as a user runs it: dry run, run, rerun, repair."""

import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.support.grids import params
from tests.support.html_page import Page
from tests.support.programs import programs, torch_python
from tests.support.workflows import (
    CONFIG,
    MINE,
    SNAKEMAKE,
    jobs,
    make_workspace,
    snakemake,
    snakemake_alone,
)
from tokamake.evaluate.evaluate import evaluate
from tokamake.generate.generate import Ends, generate


@pytest.mark.slow
def test_the_workflow_writes_all_results(finished: Path) -> None:
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
    page = Page(finished / "results/report.html")
    assert page.texts[0] == "Run smoke"
    assert page.sections.keys() > {"overview", "workflow", "corpora", "curves", "provenance"}
    top = {path.name for path in finished.iterdir()} - {".snakemake"}
    inputs = {
        "workflow",
        "profiles",
        "config",
        "my.yaml",
        "architecture.yaml",
        "corpora.tsv",
        "alone.sh",
    }
    assert top - inputs == {"results", "logs"}


FIRST_JOBS = {
    "sample_corpus": {"sample_corpus": {"code": {"num_files": 3, "file_bytes": 80_000}}},
    "train_tokenizer": {"tokenizer": {"vocab_size": 520}},
    "tokenize": {"tokenize": {"append_eod": False}},
    "merge": {"plan": {**CONFIG["plan"], "merged_bytes": 60_000}},
    "index": {"seed": 3},
    "resolve": {"train": {"schedule": {"warmup_steps": 3}}},
    "convert": {"convert": ["megatron"]},
    "evaluate": {"evaluate": {"max_tokens": 1000}},
    "generate": {"generate": {"max_new_tokens": 9}},
}
"""Settings that change the params of a job, by the first job that they change."""


def in_another_clone(finished: Path) -> Path:
    """A clone that has the results, and none of Snakemake's memory."""
    shutil.rmtree(finished / ".snakemake")
    for name in ("my.yaml", "architecture.yaml", "corpora.tsv"):
        os.utime(finished / name)  # `git clone` gives files new times
    return finished


@pytest.mark.slow
def test_another_clone_has_nothing_to_do(finished: Path) -> None:
    assert not jobs(snakemake(in_another_clone(finished), "-n", *MINE, "all"))


@pytest.mark.slow
@pytest.mark.parametrize("first", params(FIRST_JOBS, ["tokenize", "evaluate"]))
def test_another_clone_reruns_what_a_setting_changes(finished: Path, first: str) -> None:
    config = yaml.safe_load((in_another_clone(finished) / "my.yaml").read_text())
    for section, value in FIRST_JOBS[first].items():
        is_section = isinstance(value, dict) and section in config
        config[section] = {**config[section], **value} if is_section else value
    config["train"]["on_change"] = "restart"
    (finished / "my.yaml").write_text(yaml.safe_dump(config))
    planned = jobs(snakemake(finished, "-n", *MINE, "all"))
    names = [*FIRST_JOBS]
    earlier = names[: names.index(first)]
    assert first in planned
    assert not planned.keys() & {*earlier}


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
def test_a_run_is_scored_and_continues_text_by_the_name_of_its_folder(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(finished)
    run, data = Path("results/smoke"), ("results/raw/docs/docs-00.jsonl",)
    newest, tokenizer = run / "training/global_step40", Path("results/tokenizer")
    evaluate(checkpoint=run, data=data, output=Path("a.json"))
    evaluate(
        checkpoint=newest, data=data, tokenizer=tokenizer, sequence_length=32, output=Path("b.json")
    )
    assert Path("a.json").read_bytes() == Path("b.json").read_bytes()
    capsys.readouterr()
    ends = Ends(max_new_tokens=4)
    generate(checkpoint=run, prompts=("The ",), ends=ends, output=Path("a.json"))
    assert capsys.readouterr().out.startswith("The ")
    generate(
        checkpoint=newest,
        prompts=("The ",),
        ends=ends,
        tokenizer=tokenizer,
        output=Path("b.json"),
    )
    assert Path("a.json").read_bytes() == Path("b.json").read_bytes()


@pytest.mark.slow
def test_a_second_run_has_nothing_to_do(finished: Path) -> None:
    result = snakemake(finished, *MINE, "all")
    assert "Nothing to be done" in result.stdout + result.stderr


@pytest.mark.slow
def test_a_second_config_needs_a_data_set_of_its_own(finished: Path) -> None:
    second = {**CONFIG, "run": "second", "tokenizer": {"vocab_size": 400}}
    (finished / "second.yaml").write_text(yaml.safe_dump(second))
    arguments = ("--configfile", "second.yaml", "--")
    refused = snakemake(finished, "-n", *arguments, "all")
    assert refused.returncode == 2
    assert (
        "tokamake: data_set default: tokenizer.vocab_size 500 -> 400. The data of run smoke in "
        "results/data would be written again: give this config its own data folder"
    ) in refused.stderr
    planned = snakemake(finished, "-n", "--config", "data_set=other", *arguments, "all")
    outputs = re.findall(r"^ +output: (.*)$", planned.stdout + planned.stderr, re.M)
    paths = {path for line in outputs for path in line.split(", ")}
    assert "results/data/other/tokenizer/tokenizer.json" in paths
    assert not {path for path in paths if (finished / path.partition(" ")[0]).exists()}


@pytest.mark.slow
def test_a_changed_setting_reruns_the_jobs_that_depend_on_it(finished: Path) -> None:
    train = {**CONFIG["train"], "on_change": "restart"}  # type: ignore[dict-item]

    def changed(**sections: object) -> dict[str, int]:
        (finished / "other.yaml").write_text(yaml.safe_dump({**CONFIG, "train": train, **sections}))
        return jobs(snakemake(finished, "-n", "--configfile", "other.yaml", "--", "evaluate"))

    assert changed(evaluate={"max_tokens": 3000}) == {"evaluate": 1}
    steps = changed(train={**train, "train_steps": 50})
    assert set(steps) == {"index", "resolve", "train", "model_card", "export_hf", "evaluate"}
    retokenized = changed(tokenize={"append_eod": False})
    assert retokenized["tokenize"] == 6
    assert "train_tokenizer" not in retokenized
    assert "train_tokenizer" not in changed(tokenize={"on_bad_document": "quarantine"})
    assert changed(tokenizer={"vocab_size": 501})["train_tokenizer"] == 1


def progress(folder: Path, run: str) -> str:
    command = [torch_python(), "-m", "tokamake", "status", run, "--folder", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def run_arguments(
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
    config = {**CONFIG, "run": name, "model": model, "tokenizer": tokenizer, "train": settings}
    (finished / f"{name}.yaml").write_text(yaml.safe_dump(config))
    return ["--configfile", f"{name}.yaml", "--", "train"]


@pytest.mark.grid
@pytest.mark.slow
def test_runs_continue_a_checkpoint_or_take_its_weights(finished: Path) -> None:
    records = {}
    for finetune, steps in ((False, 50), (True, 8)):
        name = f"finetune-{finetune}"
        run = run_arguments(
            finished, name, checkpoint="training", finetune=finetune, train_steps=steps
        )
        # A native checkpoint is not converted.
        planned = jobs(snakemake(finished, "-n", *run))
        assert planned == dict.fromkeys(("weigh", "index", "resolve", "train"), 1)
        assert snakemake(finished, *run).returncode == 0
        log = (finished / f"logs/{name}/train.log").read_text()
        how = "finetuned: weights alone, at step 0" if finetune else "continued at step 40: weights"
        assert f"start     results/smoke/training/global_step40, {how}" in log
        lines = (finished / f"results/{name}/training/metrics.jsonl").read_text().splitlines()
        again = snakemake(finished, "--forcerun", "train", *run)
        assert again.returncode == 0, again.stderr
        kept = (finished / f"logs/{name}/train.log").read_text()
        assert kept.startswith(log)
        assert f"already at step {steps}, the last; nothing to train" in kept.removeprefix(log)
        records[finetune] = [entry for line in lines if "loss" in (entry := json.loads(line))]
    assert [record["step"] for record in records[False]] == [*range(41, 51)]
    assert [record["step"] for record in records[True]] == [*range(1, 9)]
    assert records[False][0]["consumed_samples"] == 41 * 16
    begun = (finished / "results/smoke/training/metrics.jsonl").read_text().splitlines()
    for entries in records.values():
        assert entries[0]["loss"] < json.loads(begun[1])["loss"] - 0.5


@pytest.mark.grid
@pytest.mark.fault("stop signal")
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_all_processes_lets_training_save(
    finished: Path, number: signal.Signals
) -> None:
    name = f"stopped-{number.name}"
    run = run_arguments(finished, name, checkpoint="training", finetune=True, train_steps=5000)
    # Jobs are clients of a server: in the group of Snakemake, and without imports of seconds.
    python = programs("tokamake") / "python"
    with subprocess.Popen(
        [python, *SNAKEMAKE[1:], *run],
        cwd=finished,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert any(line.startswith("step 2/") for line in process.stdout)
        assert f"run {name}\n  running  train (last output " in progress(finished, name)
        os.killpg(process.pid, number)
        printed = process.stdout.read()  # until the last process ends
    log = (finished / f"logs/{name}/train.log").read_text()
    (step,) = re.findall(rf"^stopped by {number.name}: saved at step (\d+), run", log, re.M)
    assert "Traceback" not in log + printed
    words = f"tokamake: run {name} is saved at step {step}; the same command continues from there"
    assert printed.count(words) == 1
    latest = finished / f"results/{name}/training/latest"
    assert latest.read_text().strip() == f"global_step{step}"


@pytest.mark.grid
@pytest.mark.slow
def test_other_formats_are_imported(finished: Path) -> None:
    run = run_arguments(finished, "exported", checkpoint="export", finetune=True, train_steps=4)
    planned = jobs(snakemake(finished, "-n", *run))
    rules = ("weigh", "index", "import_checkpoint", "resolve", "train")
    assert planned == dict.fromkeys(rules, 1)
    assert snakemake(finished, *run).returncode == 0
    assert "Nothing to be done" in snakemake(finished, *run).stderr


@pytest.mark.slow
def test_a_checkpoint_that_does_not_fit_fails_the_dry_run(finished: Path) -> None:
    def messages(**train: object) -> list[str]:
        result = snakemake(finished, "-n", *run_arguments(finished, "unfit", **train))  # type: ignore
        assert result.returncode != 0
        lines = result.stderr.splitlines()
        return [line for line in lines if not line.startswith("Using profile")]

    (missing,) = messages(checkpoint="none", finetune=True)
    assert "unfit.yaml: model.checkpoint: results/smoke/none: no such folder; give" in missing
    (states,) = messages(checkpoint="export", finetune=False)
    assert "results/smoke/export: has no optimizer states of adamw to continue with" in states
    text = (finished / "architecture.yaml").read_text()
    (finished / "wide.yaml").write_text(text.replace("hidden_size: 32", "hidden_size: 64"))
    first, second = messages(checkpoint="export", architecture="wide.yaml", finetune=True)
    assert "model.checkpoint: results/smoke/export: does not match model.architecture" in first
    assert second == "tokamake: hidden_size: checkpoint 32, config 64 (wide.yaml)"


@pytest.mark.slow
def test_the_error_of_a_failed_job_is_printed(finished: Path) -> None:
    # Only training knows the device, so no dry run can refuse this.
    sections = {**CONFIG["train"], "backend": "deepspeed", "precision": "fp16"}  # type: ignore[dict-item]
    (finished / "other.yaml").write_text(
        yaml.safe_dump({**CONFIG, "run": "bad", "train": sections})
    )
    result = snakemake_alone(finished, "--configfile", "other.yaml", "--", "train")
    text = result.stdout + result.stderr
    assert result.returncode == 1
    assert "tokamake train: train.precision: fp16: DeepSpeed has no fp16 on the CPU" in text
    assert "non-zero exit status 2" in text
    assert "MissingOutputException" not in text
    assert "Traceback" not in text
    report = progress(finished, "bad")
    assert "run bad\n  failed   train\n  done     weigh, index, resolve\n" in report
    assert "\nfailed: train, logs/bad/train.log ends with:\n" in report
    assert "  tokamake train: train.precision: fp16: DeepSpeed has no fp16" in report


def test_list_prints_a_sentence_about_each_rule(tmp_path: Path) -> None:
    result = snakemake(make_workspace(tmp_path), "--list")
    listed = dict(re.findall(r"^(\w+) \((.*)\)$", result.stdout, re.M))
    assert {"tokenize", "merge", "train", "report", "all"} <= set(listed)
    assert all(len(sentence) > 20 for sentence in listed.values())


def test_the_default_config_has_a_dry_run_and_a_rule_graph(tmp_path: Path) -> None:
    make_workspace(tmp_path)
    planned = jobs(snakemake(tmp_path, "-n", "train"))
    assert planned["tokenize"] > planned["merge"] > 3
    assert {"sample_corpus", "train_tokenizer", "resolve", "train"} <= set(planned)
    graph = snakemake(tmp_path, "--rulegraph", "--", "all").stdout
    assert "digraph" in graph
    assert "tokenize" in graph


@pytest.mark.grid
@pytest.mark.slow
def test_corpora_set_epochs_and_evaluation_splits(tmp_path: Path, sampled: Path) -> None:
    """Training lasts exactly the epochs of the corpora; each named set has its own loss."""
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
        num_samples = (3 if file["corpus"] == "docs" else 1) * file["tokens"] // 2 - 1
        assert file["drawn_samples"] == num_samples // 32
    trained = json.loads((tmp_path / "results/smoke/train.json").read_text())
    assert trained["step"] == sum(file["drawn_samples"] for file in files) // 32
    last = trained["validation_losses"][-1]
    assert last["step"] == trained["step"]
    # Both names select the same documents.
    assert last["validation_loss"] == last["validation_loss/hard"] > 0
    evaluated = json.loads((tmp_path / "results/smoke/evaluate.json").read_text())
    assert set(evaluated["corpora"]) == {"docs"}


@pytest.mark.grid
@pytest.mark.slow
def test_two_ranks_score_and_continue_text_for_the_report(finished: Path) -> None:
    files = [finished / "results/smoke" / name for name in ("evaluate.json", "samples.json")]
    before = [json.loads(path.read_text()) for path in files]
    for path in files:
        path.unlink()
    sizes = ("--set-resources", "evaluate:tasks=2", "generate:tasks=2")
    result = snakemake(finished, *sizes, *MINE, "evaluate", "generate", "report")
    assert result.returncode == 0, result.stdout + result.stderr
    scores, samples = (json.loads(path.read_text()) for path in files)
    assert scores["overall"]["loss"] == pytest.approx(before[0]["overall"]["loss"], rel=1e-5)
    assert [each["text"] for each in samples] == [each["text"] for each in before[1]]
    for name in ("evaluate", "generate"):
        assert "2 ranks" in (finished / f"logs/smoke/{name}.log").read_text()
