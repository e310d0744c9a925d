"""Tasks of `evaluate.tasks`: names of plug-ins, data and settings."""

from typing import Any

import pytest

from tokamake.config.root import EvaluateSettings
from tokamake.config_files import validate
from tokamake.errors import UserError


def read(tasks: dict[str, Any]) -> EvaluateSettings:
    return validate(EvaluateSettings, {"tasks": tasks}, "config")


def test_the_key_is_the_kind_unless_another_is_named() -> None:
    tasks = read({"lambada": {"data": ["a"]}, "own": {"name": "text", "data": ["b"]}}).tasks
    assert {key: task.name for key, task in tasks.items()} == {"lambada": "lambada", "own": "text"}
    assert tasks["lambada"].own == {"strict": True, "text_key": "text"}
    assert read({}).tasks == {}


def test_addresses_and_tasks_of_lm_eval_are_fetched() -> None:
    data = ["local.jsonl", "https://host/far.jsonl", "hf://datasets/a/b"]
    tasks = read(
        {
            "near": {"name": "text", "data": data[:1]},
            "far": {"name": "text", "data": data},
            "lm_eval": {"tasks": ["hellaswag"]},
        }
    ).tasks
    assert {key: task.is_fetched for key, task in tasks.items()} == {
        "near": False,
        "far": True,
        "lm_eval": True,
    }
    assert tasks["far"].addresses == data[1:]


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ({"text": {}}, "data: empty; name the files of text"),
        ({"lm_eval": {"tasks": ["a"], "data": ["b"]}}, "data: lm_eval does not use it; remove it"),
        ({"nope": {}}, "unknown name; choose one of lambada, lm_eval, text, wikitext"),
        ({"wikitext": {"data": ["a"], "stride": 0}}, "stride: 0: "),
        ({"text": 1}, "tasks.text: 1: not a section; give its settings: "),
        ({"a b": {"name": "text", "data": ["a"]}}, "tasks.a b"),
    ],
)
def test_mistakes_are_explained(tasks: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        read(tasks)
    assert message in str(caught.value)
