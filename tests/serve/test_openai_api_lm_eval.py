"""lm-eval scores a server through `/v1/completions` as `evaluate-task` scores the model."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.served import Served
from tokamake.evaluate.evaluate_task import evaluate_task

TASK = """
task: last_words
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{question}}}}"
doc_to_target: " {{{{answer}}}}"
metric_list: [{{metric: perplexity}}, {{metric: acc}}]
---
task: written
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["e"], max_gen_toks: 8, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""


@pytest.mark.extra("oracles", "lm_eval", "tenacity")
def test_lm_eval_scores_the_server(
    server: Served, tiny: Path, chat_tokenizer: Path, tmp_path: Path
) -> None:
    import lm_eval
    from lm_eval.tasks import TaskManager

    questions = ["def main", "The list of words", "return the value", "He reads", "a b c d"]
    rows = []
    for question in questions:
        body = {"prompt": question, "max_tokens": 8, "temperature": 0, "stop": ["e"]}
        (choice,) = server.complete(**body)["choices"]
        # Half of the answers are what the model writes.
        rows.append({"question": question, "answer": choice["text"] if len(rows) % 2 else "word"})
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for number, text in enumerate(TASK.format(data=data).split("---")):
        (tmp_path / f"{number}.yaml").write_text(text)
    names = ["last_words", "written"]
    arguments: dict[str, Any] = {
        "model": "tiny",
        "base_url": f"{server.url}/v1/completions",
        "tokenizer": str(chat_tokenizer),
        "max_length": 64,
    }
    expected = lm_eval.simple_evaluate(
        "local-completions",
        model_args=arguments,
        tasks=names,
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
    )["results"]
    evaluate_task(
        "lm_eval",
        checkpoint=tiny,
        tokenizer=chat_tokenizer,
        settings=json.dumps({"tasks": names, "include": str(tmp_path)}),
        output=tmp_path / "scores.json",
    )
    scores = json.loads((tmp_path / "scores.json").read_text())["scores"]
    for task, metric in (
        ("last_words", "perplexity"),
        ("last_words", "acc"),
        ("written", "exact_match"),
    ):
        value = expected[task][f"{metric},none"]
        assert scores[f"{task}/{metric}"] == pytest.approx(value, rel=1e-5), metric
    assert scores["written/exact_match"] > 0
