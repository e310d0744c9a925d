"""Data frames of made-up runs: columns, dtypes, and files that are missing or damaged."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from tests.support.finished_run import RUN, TRAINED, make_inputs, metric, scores
from tokamake import results
from tokamake.errors import UserError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A results folder with a finished run `b`, and `a`, which trains."""
    folder = tmp_path / "results"
    inputs = make_inputs(_made(tmp_path / "inputs"))
    for name in ("a", "b"):
        run = {**RUN, "run": name, "data_root": "results/data"}
        training = _made(folder / name / "training")
        (folder / name / "run.yaml").write_text(yaml.safe_dump(run))
        (training / "metrics.jsonl").write_text(json.dumps(metric(5, 3.5)) + "\n")
    (folder / "b/training/metrics.jsonl").write_bytes(inputs["metrics"].read_bytes())
    inputs["index"].rename(folder / "b/index")
    (folder / "b/train.json").write_text(json.dumps(TRAINED))
    write = {"evaluate.json": 2.5, "evaluate.20.json": 4.0, "evaluate.4.json": None}
    for name, loss in write.items():
        value = {"overall": scores(loss), "corpora": {"code": scores(loss)}}
        (folder / "b" / name).write_text(json.dumps(value))
    for name in ("wiki", "wiki.20"):
        value = {"task": "wikitext", "scores": {"word_perplexity": 12, "bits": 0.5}}
        (_made(folder / "b/tasks") / f"{name}.json").write_text(json.dumps(value))
    inputs["metadata"].rename(_made(folder / "data") / "metadata.json")
    return folder


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


FUNCTIONS = [getattr(results, name) for name in results.__all__]


def test_runs_that_train_have_no_results_yet(folder: Path) -> None:
    training, finished = results.runs(folder).itertuples()
    assert (training.run, finished.run) == ("a", "b")
    assert (training.data_set, training.family, training.seed) == ("default", "llama", 1)
    assert finished.parameters == 36_688
    assert (finished.step, finished.consumed_tokens, finished.world_size) == (50, 12_800, 2)
    assert (finished.validation_loss, finished.perplexity) == (3.25, 2.5)
    assert finished.folder == str(folder / "b")
    missing = ("step", "last_loss", "checkpoint", "validation_loss", "bits_per_byte")
    assert all(pd.isna(getattr(training, name)) for name in missing)


def test_settings_are_columns(folder: Path) -> None:
    settings = results.settings(folder / "b", folder / "a")
    assert settings["run"].tolist() == ["b", "a"]
    assert settings["train.train_steps"].tolist() == [50, 50]


def test_metrics_have_a_row_for_each_step(folder: Path) -> None:
    with (folder / "a/training/metrics.jsonl").open("a") as file:
        file.write(json.dumps(metric(10, 3.0)) + '\n{"step": 15, "lo')
    metrics = results.metrics(folder)
    assert metrics.groupby("run")["step"].apply(list).to_dict() == {
        "a": [5, 10],
        "b": [*range(5, 51, 5)],
    }
    measured = metrics.dropna(subset=["validation_loss"])
    assert measured[["step", "validation_loss"]].to_numpy().tolist() == [[25, 3.5], [50, 3.25]]
    assert measured["loss"].tolist() == [3 + 4 / 25, 3 + 4 / 50]


def test_samples_have_a_row_for_each_text(folder: Path) -> None:
    assert results.samples(folder).empty
    line = {"step": 10, "corpus": "code", "prompt": "def", "text": " f"}
    path = folder / "a/training/samples.jsonl"
    path.write_text(json.dumps(line) + "\n" + json.dumps({**line, "step": 20}) + '\n{"step": 30, ')
    texts = results.samples(folder)
    assert texts.to_numpy().tolist() == [
        ["a", 10, "code", "def", " f"],
        ["a", 20, "code", "def", " f"],
    ]
    path.write_text(json.dumps({**line, "text": 7}) + "\n")
    with pytest.raises(UserError, match="text is 7, not a text"):
        results.samples(folder)


def test_evaluations_have_a_row_for_each_score(folder: Path) -> None:
    scores = results.evaluations(folder)
    losses = scores[(scores["metric"] == "loss") & (scores["subset"] == "overall")]
    assert losses["step"].tolist() == [4, 20, 50]
    assert losses["value"].tolist()[1:] == [4.0, 2.5]
    assert losses["value"].isna().tolist() == [True, False, False]
    assert {*scores["subset"]} == {"code", "overall"}
    task = scores[scores["task"] == "wiki"].drop(columns=["run", "task", "subset"])
    assert [*map(tuple, task.to_numpy().tolist())] == [
        *((20, "word_perplexity", 12.0), (20, "bits", 0.5)),
        *((50, "word_perplexity", 12.0), (50, "bits", 0.5)),
    ]
    (folder / "a/evaluate_finetuned.json").write_text(
        json.dumps({"task": "mrpc", "scores": {"dev": {"rows": 56, "f1": 0.75}}})
    )
    finetuned = results.evaluations(folder / "a")
    assert finetuned["step"].isna().all()
    rows = finetuned[["task", "subset", "metric", "value"]].to_numpy().tolist()
    assert rows == [["mrpc", "dev", "rows", 56.0], ["mrpc", "dev", "f1", 0.75]]


def test_mixtures_and_documents_count_the_same(folder: Path) -> None:
    mixture, documents = results.mixtures(folder), results.documents(folder)
    assert mixture[["run", "corpus", "datasets"]].to_numpy().tolist() == [
        ["b", "code", 2],
        ["b", "a&b", 1],
    ]
    assert mixture["share_of_samples"].tolist() == [0.25, 0.75]
    assert mixture["epochs"].tolist() == pytest.approx([2 / 3, 6])
    prefixes = ["merged/code-0000", "merged/code-0001", "merged/a&b-0000"]
    assert documents["prefix"].tolist() == prefixes
    counts = ["documents", "tokens", "text_bytes", "documents_in", "duplicate_documents"]
    grouped = documents.groupby("corpus", sort=False)[counts].sum()
    assert mixture.set_index("corpus")[counts].equals(grouped)
    (folder / "data/metadata.json").unlink()
    without = results.mixtures(folder)
    assert without["tokens"].isna().all()
    assert without["share_of_samples"].tolist() == [0.25, 0.75]


@pytest.mark.parametrize("function", FUNCTIONS, ids=results.__all__)
def test_columns_and_their_dtypes_are_those_of_the_docstring(
    folder: Path, function: Callable[..., pd.DataFrame]
) -> None:
    """Also without any rows."""
    empty = _made(folder.parent / "empty")
    rows = re.findall(r"^ +\| ([\w/, ]+) \| (\w+) \|", function.__doc__ or "", re.MULTILINE)
    dtypes = {name: dtype for names, dtype in rows for name in names.split(", ")}
    dtypes.pop("column", None)  # settings have no table
    for frame in (function(folder), function(empty)):
        found = {name: str(dtype) for name, dtype in frame.dtypes.items()}
        known = {name: dtype for name, dtype in dtypes.items() if name in found}
        assert known == {name: found[name] for name in known}
        if function is not results.metrics:
            assert known == dtypes
    assert function(folder).equals(function(folder))
    assert len(function(empty)) == 0
    with pytest.raises(UserError, match=r"nowhere: no such folder; name a results folder"):
        function(folder / "nowhere")


_DAMAGED: list[tuple[str, Any]] = [
    ("run.yaml", "[1]"),
    ("run.yaml", "seed: many"),
    ("run.yaml", "{"),
    ("train.json", '{"step": "many"}'),
    ("train.json", "[]"),
    ("train.json", '{"validation_losses": [7]}'),
    ("train.json", ""),
    ("training/metrics.jsonl", '{"step": 1}\n{"step": 2, "lo'),
    ("training/metrics.jsonl", '{"step": 1, "loss": "low"}\n'),
    ("evaluate.json", '{"overall": {"perplexity": "low"}, "corpora": {}}'),
    ("evaluate.json", '{"overall": 1, "corpora": {}}'),
    ("evaluate.json", "7"),
    ("evaluate.20.json", '{"overall": {}, "corpora": {"code": 1}}'),
    ("tasks/wiki.json", '{"scores": {"bits": []}}'),
    ("tasks/wiki.json", '{"scores": null}'),
    ("index/index.json", '{"version": 99}'),
    ("../data/metadata.json", "{}"),
    ("../data/metadata.json", '[{"lengths": [1]}]'),
    ("../data/metadata.json", '[{"lengths": [], "filters": [1]}]'),
    ("../data/metadata.json", '[{"lengths": [], "total_num_docs": "many"}]'),
]


@pytest.mark.parametrize(("name", "text"), _DAMAGED)
def test_a_damaged_file_is_named_in_a_line(folder: Path, name: str, text: str) -> None:
    (folder / "b" / name).write_text(text)
    messages = []
    for function in FUNCTIONS:
        try:
            function(folder)
        except UserError as error:
            messages.append(str(error))
    assert messages
    assert all(Path(name).name in message and "\n" not in message for message in messages)


def test_values_of_later_versions_are_left_out(folder: Path) -> None:
    run = yaml.safe_load((folder / "b/run.yaml").read_text())
    run["architecture"]["family"] = "later"
    (folder / "b/run.yaml").write_text(yaml.safe_dump(run | {"later": 1}))
    (folder / "b/train.json").write_text(json.dumps({**TRAINED, "later": {"a": 1}}))
    (row,) = results.runs(folder / "b").itertuples()
    assert row.step == 50
    assert pd.isna(row.parameters)
