"""Scores of a finetuned model follow from the logits of transformers' models."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.support.finetunes import (
    TASK,
    WORDS,
    planted_rows,
    prepare,
    run_here,
    small_bert,
    write_rows,
    write_vocabulary,
)
from tests.support.ranks import spawn
from tokamake.checkpoint.convert import convert
from tokamake.errors import UserError
from tokamake.finetune.evaluate_finetuned import evaluate_finetuned

SETTINGS = json.dumps({key: value for key, value in TASK.items() if key != "name"})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finetuned model, and its export."""
    folder = tmp_path_factory.mktemp("finetuned")
    run_here(prepare(folder, rows=(24, 9), task={"epochs": 1}))
    export(folder / "task")
    return folder


def export(folder: Path) -> None:
    convert(
        source=folder / "finetuned",
        target=folder / "export",
        format="hf",
        tokenizer=folder.parent / "vocab.txt",
    )


def evaluate(
    folder: Path, *, checkpoint: str = "finetuned", settings: str = SETTINGS, **options: Any
) -> dict[str, Any]:
    evaluate_finetuned(
        "labeled_text",
        checkpoint=folder / "task" / checkpoint,
        data=[f"dev={folder / 'validation.jsonl'}"],
        tokenizer=None if checkpoint == "export" else folder / "vocab.txt",
        settings=settings,
        sequence_length=16,
        output=folder / "scores.json",
        **options,
    )
    scores: dict[str, Any] = json.loads((folder / "scores.json").read_text())["scores"]
    return scores


def evaluate_on_rank(folder: Path) -> None:
    import os

    import torch.distributed as dist

    os.environ |= {"RANK": str(dist.get_rank()), "WORLD_SIZE": str(dist.get_world_size())}
    os.environ |= {"LOCAL_RANK": str(dist.get_rank()), "LOCAL_WORLD_SIZE": "3"}
    from tokamake.runtime import rank_errors

    rank_errors.leave = lambda *_: None  # the process has more to do
    evaluate(folder, batch_size=2, predictions=folder / "of-ranks")


def test_scores_follow_from_the_logits_of_the_export(trained: Path) -> None:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(trained / "task/export")
    tokenizer = transformers.AutoTokenizer.from_pretrained(trained / "task/export")
    rows = [json.loads(line) for line in (trained / "validation.jsonl").open()]
    inputs = tokenizer(
        [row["text"] for row in rows],
        [row["other"] for row in rows],
        padding=True,
        return_tensors="pt",
    )
    with torch.no_grad():
        predicted = model.eval()(**inputs).logits.argmax(-1).tolist()
    right = [
        ("no", "yes")[number] == row["label"] for number, row in zip(predicted, rows, strict=True)
    ]
    expected = {"dev": {"rows": 9, "accuracy": sum(right) / 9}}
    # transformers names the classes as the task does.
    assert model.config.id2label == {0: "no", 1: "yes"}
    assert model.config.label2id == {"no": 0, "yes": 1}
    assert evaluate(trained, predictions=trained / "predicted") == expected
    assert evaluate(trained, checkpoint="export", batch_size=4) == expected
    lines = (trained / "predicted/dev.jsonl").read_text().splitlines()
    assert [json.loads(line)["prediction"] for line in lines] == [
        ("no", "yes")[number] for number in predicted
    ]


def test_ranks_score_each_row_once(trained: Path) -> None:
    expected = evaluate(trained, predictions=trained / "alone")
    spawn(evaluate_on_rank, 3, trained)
    assert json.loads((trained / "scores.json").read_text())["scores"] == expected
    texts = [(trained / name / "dev.jsonl").read_text() for name in ("alone", "of-ranks")]
    assert texts[0] == texts[1]


def test_files_without_labels_get_predictions_alone(trained: Path, tmp_path: Path) -> None:
    rows = [{key: row[key] for key in ("text", "other")} for row in planted_rows(4, 1)]
    evaluate_finetuned(
        "labeled_text",
        checkpoint=trained / "task/finetuned",
        data=[f"test={write_rows(tmp_path / 'test.jsonl', rows)}"],
        tokenizer=trained / "vocab.txt",
        settings=SETTINGS,
        sequence_length=16,
        output=tmp_path / "scores.json",
        predictions=tmp_path,
    )
    assert json.loads((tmp_path / "scores.json").read_text())["scores"] == {"test": {"rows": 4}}
    assert len((tmp_path / "test.jsonl").read_text().splitlines()) == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": ["dev"]}, r"--data dev: give NAME=FILES"),
        ({"sequence_length": 64}, r"--sequence-length 64: give 3 to 32"),
        ({"batch_size": 0}, r"--batch-size 0: give 1 or more"),
        ({"checkpoint": "pretrained"}, r"has task_head none.*name a model that was finetuned"),
    ],
)
def test_mistakes_are_one_line(trained: Path, change: dict[str, Any], message: str) -> None:
    options: dict[str, Any] = {
        "data": [f"dev={trained / 'validation.jsonl'}"],
        "tokenizer": trained / "vocab.txt",
        "settings": SETTINGS,
        "sequence_length": 16,
        **change,
    }
    checkpoint = trained / options.pop("checkpoint", "task/finetuned")
    with pytest.raises(UserError, match=message):
        evaluate_finetuned("labeled_text", checkpoint=checkpoint, **options)


def race_files(folder: Path, number: int, seed: int) -> str:
    """Articles whose first word is the right option."""
    generator, lines = np.random.default_rng(seed), []
    for _ in range(number):
        options = [*generator.choice(WORDS[4:], 4, replace=False)]
        answer = int(generator.integers(4))
        lines.append(
            json.dumps(
                {
                    "article": f"{options[answer]} a b",
                    "questions": ["x _ y"],
                    "options": [options],
                    "answers": ["ABCD"[answer]],
                }
            )
        )
    path = folder / f"race-{seed}.txt"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_choices_equal_those_of_transformers(tmp_path: Path) -> None:
    files = [race_files(tmp_path, number, seed) for seed, number in enumerate((13, 7))]
    task = {"task": "race", "train_files": files[0], "validation_files": files[1], "epochs": 1}
    result = run_here(prepare(tmp_path, task=task, dropout={"hidden": 0.1}))
    export(tmp_path / "task")
    model = transformers.AutoModelForMultipleChoice.from_pretrained(tmp_path / "task/export").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "task/export")
    right = 0
    for line in Path(files[1]).read_text().splitlines():
        row = json.loads(line)
        asked = [f"x {option} y" for option in row["options"][0]]
        inputs = tokenizer(asked, [row["article"]] * 4, padding=True, return_tensors="pt")
        with torch.no_grad():
            logits = model(**{name: tensor[None] for name, tensor in inputs.items()}).logits
        right += "ABCD"[int(logits.argmax())] == row["answers"][0]
    assert result["best"]["scores"]["accuracy"] == pytest.approx(right / 7)


def test_a_regression_is_exported_with_one_label(tmp_path: Path) -> None:
    generator = np.random.default_rng(1)
    lines = ["sentence1\tsentence2\tscore"]
    for number in range(11):
        words = generator.choice(WORDS[4:], 2)
        lines.append(f"{words[0]}\t{words[1]}\t{number % 4 + 0.5}")
    path = tmp_path / "dev.tsv"
    path.write_text("\n".join(lines) + "\n")
    task = {"task": "stsb", "train_files": str(path), "validation_files": str(path), "epochs": 1}
    result = run_here(prepare(tmp_path, task=task))
    assert result["best"]["scores"].keys() == {"pearson", "spearman"}
    export(tmp_path / "task")
    folder = tmp_path / "task/export"
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    cells = [line.split("\t") for line in lines[1:]]
    inputs = tokenizer(
        [row[0] for row in cells], [row[1] for row in cells], padding=True, return_tensors="pt"
    )
    with torch.no_grad():
        predicted = model(**inputs).logits[:, 0].numpy()
    expected = np.corrcoef(predicted, [float(row[2]) for row in cells])[0, 1]
    assert result["best"]["scores"]["pearson"] == pytest.approx(expected, abs=1e-4)


def test_classes_in_another_order_are_refused(trained: Path) -> None:
    reversed_labels = json.dumps({**json.loads(SETTINGS), "labels": ["Yes", "No"]})
    for checkpoint in ("finetuned", "export"):
        with pytest.raises(UserError, match=r"has classes in the order no, yes, task labeled_text"):
            evaluate(trained, checkpoint=checkpoint, settings=reversed_labels)


def test_the_vocabulary_of_tests_fits_their_model(tmp_path: Path) -> None:
    number = len(write_vocabulary(tmp_path).read_text().split())
    assert small_bert().vocab_size == number
