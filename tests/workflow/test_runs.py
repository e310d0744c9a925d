"""A table of runs: they share data and conversions; each is built, rebuilt and reported alone."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from tests.support.html_page import Page
from tests.support.shared_folders import made_once
from tests.support.workflows import CONFIG, CORPORA, MINE, jobs, make_workspace, snakemake
from tokamake.checkpoint.detect import open_any
from tokamake.status.status import status

SWEEP = """\
run\tseed\ttrain.optimizer.learning_rate\ttrain.train_steps\tcorpora\ttrain.segment_steps
low\t1\t2e-3\t6\t\t4
docs\t2\t\t8\tdocs.tsv\t
"""
DOCS = """\
corpus\tfiles\ttext_key\tweight
docs\tresults/raw/docs/*\ttext\t1
"""


@pytest.fixture
def swept(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Path:
    """A workspace in which two runs of a table have been built."""
    built = made_once(tmp_path_factory, "swept", build)
    return Path(shutil.copytree(built, tmp_path / "copy", symlinks=True))


def build(folder: Path) -> None:
    make_workspace(folder)
    config = {**CONFIG, "runs": "runs.tsv", "convert": ["mds-pipeline-tp2-pp2-bf16", "hf-bf16"]}
    (folder / "my.yaml").write_text(yaml.safe_dump(config))
    (folder / "runs.tsv").write_text(SWEEP)
    (folder / "docs.tsv").write_text(DOCS)
    planned = jobs(snakemake(folder, "-n", *MINE, "all"))
    of_each = (
        "weigh", "index", "resolve", "train", "model_card", "export_hf", "convert", "evaluate",
        "generate",
    )  # fmt: skip
    shared = ("sample_corpus", "train_tokenizer", "describe", "report", "all")
    assert planned == {**dict.fromkeys(of_each, 2), **dict.fromkeys(shared, 1)} | {
        "tokenize": 6, "merge": 4, "convert": 4, "train": 3, "evaluate": 3,
    }  # fmt: skip
    result = snakemake(folder, *MINE, "all")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.grid
def test_each_run_has_its_settings_and_its_mixture(swept: Path) -> None:
    results = swept / "results"
    for name, seed, steps, rate in (("low", 1, 6, 2e-3), ("docs", 2, 8, 0.02)):
        run = yaml.safe_load((results / name / "run.yaml").read_text())
        assert (run["seed"], run["train"]["optimizer"]["learning_rate"]) == (seed, rate)
        assert json.loads((results / name / "train.json").read_text())["step"] == steps
        assert name in Page(results / "report.html").sections["overview"]
    weights = {
        name: {line.split()[2] for line in (results / f"data/{name}.weights.txt").open()}
        for name in ("low", "docs")
    }
    assert weights == {"low": {"code", "docs"}, "docs": {"docs"}}


@pytest.mark.slow
@pytest.mark.grid
def test_a_run_of_segments_is_a_chain_with_an_evaluation_each(swept: Path) -> None:
    run = swept / "results/low"
    steps = [json.loads((run / f"train{name}.json").read_text())["step"] for name in (".4", "")]
    assert steps == [4, 6]
    assert "continuing at step 4" in (swept / "logs/low/train.log").read_text()
    losses = [
        json.loads((run / f"evaluate{name}.json").read_text())["overall"]["loss"]
        for name in (".4", "")
    ]
    assert losses[0] != losses[1]
    texts = Page(swept / "results/report.html").texts
    assert "Held-out documents over checkpoints" in texts
    assert "the next segment starts, as planned" in texts
    # If the record of a segment is lost, its job alone reruns; the checkpoint still exists.
    record = (run / "train.4.json").rename(run / "record.json")
    result = snakemake(swept, *MINE, "results/low/train.4.json")
    assert result.returncode == 0, result.stderr
    assert jobs(result) == {"train": 1}
    assert (run / "train.4.json").read_bytes() == record.read_bytes()
    record.rename(run / "train.4.json")


@pytest.mark.slow
@pytest.mark.grid
def test_the_trained_model_is_converted_to_the_formats_of_the_config(swept: Path) -> None:
    name = "mds-pipeline-tp2-pp2-bf16"
    assert (swept / f"logs/low/convert/{name}.log").read_text().count("parameters") == 1
    converted = open_any(swept / f"results/low/convert/{name}")
    assert str(converted.layout) == "tensor 2 × pipeline 2"
    assert {converted.source.dtype(key).name for key in converted.source} == {"bfloat16"}
    described = json.loads((swept / "results/low/convert/hf-bf16/config.json").read_text())
    exported = json.loads((swept / "results/low/export/config.json").read_text())
    assert described["eos_token_id"] == exported["eos_token_id"] is not None
    assert (swept / "results/low/convert/hf-bf16/tokenizer.json").exists()
    other = jobs(snakemake(swept, "-n", *MINE, "results/docs/convert/megatron-tp2"))
    assert other == {"convert": 1}
    refused = snakemake(swept, "-n", *MINE, "results/docs/convert/mds-pp2")
    assert "tokamake: results/docs/convert/mds-pp2: format mds has no pipeline" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.slow
@pytest.mark.grid
def test_status_lists_all_finished_jobs(swept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status(folder=swept)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [
        ["done", "run"], ["done", "run"], ["done", "data"], ["done", "report"],
    ]  # fmt: skip
    status("low", folder=swept)
    assert capsys.readouterr().out.splitlines()[2] == (
        "  done     weigh, index, resolve, train 2 of 2, evaluate 2 of 2, convert 2 of 2, "
        "model_card, export_hf, generate"
    )


@pytest.mark.slow
@pytest.mark.grid
def test_the_segments_of_a_run_by_epochs_are_planned_from_its_data(swept: Path) -> None:
    rows = [line.split("\t") for line in CORPORA.splitlines()]
    table = [[*row[:-1], "epochs" if row[-1] == "weight" else "0.05"] for row in rows]
    (swept / "epochs.tsv").write_text("".join("\t".join(row) + "\n" for row in table))
    train = {**CONFIG["train"], "train_steps": None, "segment_steps": 6}
    config = {**CONFIG, "run": "epochs", "corpora": "epochs.tsv", "train": train}
    (swept / "epochs.yaml").write_text(yaml.safe_dump(config))
    arguments = ("--configfile", "epochs.yaml", "--")
    planned = jobs(snakemake(swept, "-n", *arguments, "evaluate", "generate"))
    of_run = (
        "weigh", "index", "resolve", "plan_segments", "train", "model_card", "export_hf",
        "evaluate", "generate",
    )  # fmt: skip
    assert planned == dict.fromkeys(of_run, 1)
    result = snakemake(swept, *arguments, "train")
    assert result.returncode == 0, result.stdout + result.stderr

    run = swept / "results/epochs"
    chain = json.loads((run / "segments.json").read_text())
    last = yaml.safe_load((run / "run.yaml").read_text())["train"]["train_steps"]
    assert chain == {"num_steps": last, "segments": [*range(6, last, 6)]}
    assert chain["segments"]
    names = ["train.json", *(f"train.{step}.json" for step in chain["segments"])]
    steps = [json.loads((run / name).read_text())["step"] for name in names]
    assert steps == [last, *chain["segments"]]
    for target in ("plan_segments", "train"):
        assert "Nothing to be done" in snakemake(swept, *arguments, target).stderr
    # The report shows the evaluation after each segment.
    remaining = jobs(snakemake(swept, "-n", *arguments, "report"))
    of_report = {"report": 1, "evaluate": len(names)}
    assert remaining == {**dict.fromkeys(of_run[-4:], 1), **of_report}
    # If a record is lost, its job alone reruns.
    (run / "train.6.json").unlink()
    assert jobs(snakemake(swept, "-n", *arguments, "results/epochs/train.6.json")) == {"train": 1}
    refused = snakemake(swept, "-n", *MINE, "plan_segments")
    assert "tokamake: plan_segments: there is nothing to plan" in refused.stderr
    for folder in (run, swept / "logs/epochs"):
        shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.grid
def test_rules_are_targets_for_all_runs(swept: Path) -> None:
    for target in (
        "train",
        "generate",
        "convert",
        "data",
        "results/low/train.json",
    ):
        assert "Nothing to be done" in snakemake(swept, *MINE, target).stderr
    forced = jobs(snakemake(swept, "-n", "--forcerun", "train", *MINE, "train"))
    assert forced == {"train": 3}


@pytest.mark.slow
@pytest.mark.grid
def test_a_changed_row_reruns_its_run_alone(swept: Path) -> None:
    (swept / "runs.tsv").write_text(SWEEP.replace("2e-3", "3e-3"))
    dry_run = snakemake(swept, "-n", "--config", "train={on_change: restart}", *MINE, "evaluate")
    assert "run low: train.optimizer.learning_rate 0.002 -> 0.003; 6 steps" in dry_run.stderr
    changed = jobs(dry_run)
    rerun = ("resolve", "model_card", "export_hf", "evaluate")
    assert changed == dict.fromkeys(rerun, 1) | {"train": 2}
    (swept / "runs.tsv").write_text(SWEEP + "more\t3\t\t\t\t\n")
    added = jobs(snakemake(swept, "-n", *MINE, "train"))
    new = ("weigh", "index", "resolve", "train")
    assert added == dict.fromkeys(new, 1)
    (swept / "runs.tsv").write_text(SWEEP)


@pytest.mark.slow
@pytest.mark.grid
def test_runs_start_from_the_same_conversion(swept: Path) -> None:
    start = "results/low/export"
    (swept / "starts.tsv").write_text(
        "run\tmodel.checkpoint\tmodel.architecture\ttrain.finetune\tseed\n"
        f"one\t{start}\tfrom_checkpoint\ttrue\t1\n"
        f"two\t./{start}/\tfrom_checkpoint\ttrue\t2\n"
    )
    config = {**CONFIG, "runs": "starts.tsv", "tokenizer": {"path": "results/tokenizer"}}
    (swept / "starts.yaml").write_text(yaml.safe_dump(config))
    arguments = ("--configfile", "starts.yaml", "--")
    planned = jobs(snakemake(swept, "-n", *arguments, "train"))
    assert planned["import_checkpoint"] == 1
    assert planned["train"] == planned["resolve"] == 2
    assert snakemake(swept, *arguments, "import_checkpoint", "resolve").returncode == 0
    starts = {
        yaml.safe_load((swept / f"results/{name}/run.yaml").read_text())["checkpoint"]
        for name in ("one", "two")
    }
    assert len(starts) == 1
    assert starts.pop().startswith("results/import/export-")


@pytest.mark.slow
@pytest.mark.grid
def test_checkpoints_with_different_tokenizers_are_refused(swept: Path) -> None:
    first, second = (swept / name for name in ("first", "second"))
    for folder in (first, second):
        folder.mkdir()
        for file in (swept / "results/low/export").iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
    tokenizer = json.loads((second / "tokenizer.json").read_text())
    (second / "tokenizer.json").write_text(json.dumps(tokenizer, indent=3))
    (swept / "starts.tsv").write_text(
        "run\tmodel.checkpoint\ttrain.finetune\none\tfirst\ttrue\ntwo\tsecond\ttrue\n"
    )
    config = {**CONFIG, "runs": "starts.tsv"}
    (swept / "starts.yaml").write_text(yaml.safe_dump(config))
    result = snakemake(swept, "-n", "--configfile", "starts.yaml", "--", "train")
    (message,) = [line for line in result.stderr.splitlines() if line.startswith("tokamake")]
    assert "starts.tsv:3: model.checkpoint: second/tokenizer.json is another tokenizer" in message
