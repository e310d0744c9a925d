"""Each task reads its own files; the tables are those of GLUE, cut to a few lines."""

from pathlib import Path

import numpy as np
import pytest

from tokamake import plugins
from tokamake.config.finetune import FOLDER, FinetuneTask
from tokamake.config_files import validate
from tokamake.errors import UserError
from tokamake.train.objectives.classification.scoring import METRICS
from tokamake.train.objectives.retrieval.scoring import scores_of_places

MNLI = "index promptID pairID genre sentence1_binary_parse sentence2_binary_parse sentence1_parse"
MNLI += " sentence2_parse sentence1 sentence2 label1 gold_label"
FILES = {
    "mnli": (MNLI, "0 1 1n fiction p p p p A B neutral entailment", ("A", "B", "entailment")),
    "qqp": ("id qid1 qid2 question1 question2 is_duplicate", "1 2 3 A B 0", ("A", "B", "0")),
    "cola": ("", "gj04 0 * A", ("A", None, "0")),
    "sst2": ("sentence label", "A 1", ("A", None, "1")),
    "mrpc": ("Quality;#1_ID;#2_ID;#1_String;#2_String", "1 7 8 A B", ("A", "B", "1")),
    "stsb": ("index genre sentence1 sentence2 score", "0 news A B 3.800", ("A", "B", "3.800")),
    "qnli": ("index question sentence label", "0 A B entailment", ("A", "B", "entailment")),
    "rte": (
        "index sentence1 sentence2 label",
        "0 A B not_entailment",
        ("A", "B", "not_entailment"),
    ),
}
UNLABELED = {
    "mnli": (MNLI.rpartition(" label1")[0], "0 1 1n fiction p p p p A B", ("A", "B", None)),
    "qqp": ("id question1 question2", "1 A B", ("A", "B", None)),
    "cola": ("index sentence", "0 A", ("A", None, None)),
}


def table(header: str, line: str) -> str:
    names = header.replace(";", " ").split(" ") if header else []
    if ";" in header:
        names = [name.replace("_", " ") for name in names]
    lines = [names, line.split(" ")] if names else [line.split(" ")]
    return "".join("\t".join(cells) + "\n" for cells in lines)


@pytest.mark.parametrize(
    ("name", "header", "line", "expected"),
    [(name, *case) for cases in (FILES, UNLABELED) for name, case in cases.items()],
)
def test_tasks_of_glue_read_its_files(
    tmp_path: Path, name: str, header: str, line: str, expected: tuple[str, str | None, str | None]
) -> None:
    path = tmp_path / "train.tsv"
    path.write_text(table(header, line))
    (example,) = plugins.load(FOLDER, name).read(path, {})
    assert (example.firsts[0], example.second, example.label) == expected


@pytest.mark.parametrize("name", plugins.names(FOLDER))
def test_every_task_states_head_labels_and_metrics(name: str) -> None:
    labels = {"labels": ["a", "b"]} if name == "labeled_text" else {}
    task = FinetuneTask(name=name, **labels)
    assert task.head in ("classes", "regression", "choice", "none")
    places = scores_of_places(np.array([1, 2]))
    assert {*task.metrics} <= METRICS.keys() or task.metrics == (*places,)
    assert bool(task.labels) == (task.head not in ("regression", "none"))
    assert callable(plugins.load(FOLDER, name).read)


def test_classes_have_the_order_of_megatron() -> None:
    assert FinetuneTask(name="mnli").labels == ("contradiction", "entailment", "neutral")
    fields = FinetuneTask(name="mnli").architecture_fields
    assert fields == {"task_head": "classes", "num_classes": 3}
    assert FinetuneTask(name="race").architecture_fields == {
        "task_head": "choice",
        "num_classes": 1,
    }
    assert FinetuneTask(name="stsb").architecture_fields["num_classes"] == 1


def test_labeled_text_has_columns_and_labels_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"title": "A", "body": "B", "kind": "spam"}\n')
    settings = {"labels": ["ham", "spam"], "first_key": "title", "second_key": "body"}
    task = FinetuneTask(name="labeled_text", label_key="kind", **settings)
    (example,) = plugins.load(FOLDER, "labeled_text").read(path, task.own)
    assert (example.firsts, example.second, example.label) == (("A",), "B", "spam")


@pytest.mark.parametrize("labels", [[], ["a"], ["a", "a"]])
def test_labels_must_be_different_ones(labels: list[str]) -> None:
    with pytest.raises(UserError, match=r"labels: .*give all labels"):
        validate(FinetuneTask, {"name": "labeled_text", "labels": labels}, "settings")


def test_a_setting_of_another_task_is_refused() -> None:
    with pytest.raises(UserError, match="rte does not use it"):
        validate(FinetuneTask, {"name": "rte", "max_question_tokens": 3}, "settings")
