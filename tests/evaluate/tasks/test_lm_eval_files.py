"""Files and fields of lm-eval's tasks are the ones that `datasets` and lm-eval read."""

from pathlib import Path
from typing import Any

import pytest

from tokamake.config.filters import complete_filters
from tokamake.config.tasks import TaskSettings
from tokamake.errors import UserError
from tokamake.evaluate.tasks._lm_eval_files import evaluation_sets

BASE = """
dataset_path: json
dataset_kwargs: {data_files: {train: train.jsonl, validation: [v0.jsonl, v1.jsonl], test: t.jsonl}}
training_split: train
validation_split: validation
doc_to_target: !function utils.target
"""
FILES = {
    "base.yaml": BASE,
    "quiz.yaml": """
task: quiz
tag: [science, short]
include: base.yaml
test_split: test
doc_to_text: "{{question.strip()}}\\nA. {{choices[0]}} {% if hint %}{{hint}}{% endif %}"
""",
    "sub/column.yaml": """
task: column
tag: science
dataset_path: csv
dataset_kwargs: {data_files: columns.csv}
test_split: train
doc_to_text: prompt
""",
    "whole.yml": """
task: whole
dataset_path: parquet
dataset_kwargs: {data_files: [a.parquet, b.parquet]}
doc_to_text: ""
doc_to_target: "{{page}}"
""",
    "group.yaml": "group: both\ntask: [quiz, whole]\n",
    "far.yaml": "task: far\ndataset_path: allenai/ai2_arc\ndoc_to_text: '{{question}}'\n",
    "function.yaml": "task: function\ninclude: base.yaml\ndoc_to_text: !function utils.text\n",
    "broken.yaml.txt": "task: [",
}
QUIZ = {
    "path": ["t.jsonl", "v0.jsonl", "v1.jsonl"],
    "fields": ["question", "choices", "hint"],
}
COLUMN = {"path": ["columns.csv"], "fields": ["prompt"]}
WHOLE = {"path": ["a.parquet", "b.parquet"], "fields": ["page"]}


@pytest.fixture
def include(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content)
    return tmp_path


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["quiz"], {"quiz": QUIZ}),
        (["column", "whole"], {"column": COLUMN, "whole": WHOLE}),
        (["both"], {"quiz": QUIZ, "whole": WHOLE}),
        (["science"], {"quiz": QUIZ, "column": COLUMN}),
    ],
)
def test_tasks_groups_and_tags_name_files_and_fields(
    include: Path, names: list[str], expected: dict[str, Any]
) -> None:
    assert evaluation_sets(names, include) == expected


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("arc_easy", "task arc_easy of lm-eval has no YAML file in `include`, so its data"),
        ("far", "task far of lm-eval has no local files: dataset_path is allenai/ai2_arc; name"),
        ("function", "task function of lm-eval: doc_to_text names no field; name the task's"),
    ],
)
def test_a_task_without_local_data_is_one_line(include: Path, name: str, message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}"):
        evaluation_sets([name], include)


def test_files_that_cannot_be_read_are_one_line(include: Path) -> None:
    (include / "bad.yaml").write_text("task: [")
    with pytest.raises(UserError, match=r"bad\.yaml: not a YAML file \(.*\); fix it"):
        evaluation_sets(["quiz"], include)
    (include / "bad.yaml").write_text("task: bad\ninclude: none.yaml\n")
    with pytest.raises(UserError, match=r"none\.yaml: no such file; fix `include`"):
        evaluation_sets(["quiz"], include)
    (include / "bad.yaml").write_text(f"task: bad\n{BASE}doc_to_text: '{{{{a'\n")
    with pytest.raises(UserError, match=r"task bad of lm-eval: doc_to_text: .*; fix it"):
        evaluation_sets(["bad"], include)


def test_decontamination_takes_the_data_of_tasks_by_itself(include: Path) -> None:
    own = {"tasks": ["quiz", "column"], "include": str(include)}
    tasks = {
        "mine": TaskSettings(name="lm_eval", **own),  # type: ignore[arg-type]
        "text": TaskSettings(name="text", data=("a.jsonl",)),
    }
    text = {"path": ["a.jsonl"], "fields": ["text"]}
    ((_, options),) = complete_filters([{"decontaminate": {}}], tasks)[0].items()
    assert options == {"files": {"mine/quiz": QUIZ, "mine/column": COLUMN, "text": text}}
    bundled = {"arc": TaskSettings(name="lm_eval", tasks=["arc_easy"])}  # type: ignore[call-arg]
    with pytest.raises(UserError, match="decontaminate: task arc: lm-eval's own tasks have no"):
        complete_filters([{"decontaminate": {}}], bundled)


@pytest.mark.parametrize(
    "files",
    [
        {"a.yaml": "task: x\ninclude: a.yaml\n"},
        {"a.yaml": "group: x\ntask: [y]\n", "b.yaml": "group: y\ntask: [x]\n"},
    ],
)
def test_files_and_groups_that_contain_themselves_are_one_line(
    tmp_path: Path, files: dict[str, str]
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=r"files or groups contain themselves; fix it$"):
        evaluation_sets(["x"], tmp_path)
