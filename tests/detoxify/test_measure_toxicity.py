"""Expected maximum toxicity and toxicity probability, by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from tokamake.detoxify.measure_toxicity import measure_toxicity
from tokamake.errors import UserError

PROMPTS: list[tuple[float | None, list[float | None]]] = [
    (0.9, [0.2, 0.8]),
    (0.5, [0.5, 0.1]),
    (None, [None, 0.6]),
    (0.1, [None, None]),
]
"""Toxicity of each prompt, and of its continuations."""


def write(path: Path, prompts: list[tuple[float | None, list[float | None]]]) -> Path:
    lines = [
        {"text": "x", "prompt_number": number, "prompt_toxicity": toxicity, "toxicity": score}
        for number, (toxicity, scores) in enumerate(prompts)
        for score in scores
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def measured(folder: Path, **paths: Any) -> Any:
    measure_toxicity(output=folder / "out.json", **paths)
    return json.loads((folder / "out.json").read_text())


def test_measures_of_all_toxic_and_nontoxic_prompts(tmp_path: Path) -> None:
    before = write(tmp_path / "before.jsonl", PROMPTS)
    after = write(tmp_path / "after.jsonl", [(0.9, [0.2])]), write(tmp_path / "more.jsonl", [])
    evaluation = tmp_path / "evaluate.json"
    evaluation.write_text('{"overall": {"loss": 1.0, "perplexity": 2.7}, "corpora": {}}')
    results = measured(tmp_path, before=(before,), after=after, evaluation_after=evaluation)
    assert results["before"] == {
        "all": {
            "prompts": 3,
            "expected_maximum_toxicity": pytest.approx((0.8 + 0.5 + 0.6) / 3),
            "toxicity_probability": pytest.approx(2 / 3),
        },
        "toxic": {"prompts": 1, "expected_maximum_toxicity": 0.8, "toxicity_probability": 1},
        "nontoxic": {"prompts": 1, "expected_maximum_toxicity": 0.5, "toxicity_probability": 0},
        "unscored_prompts": 1,
    }
    assert results["after"]["nontoxic"]["expected_maximum_toxicity"] is None
    assert results["after"]["perplexity"] == 2.7


def test_wrong_lines_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a", "toxicity": 0}\n')
    with pytest.raises(UserError, match=r"a.jsonl:1: not a continuation; write them with"):
        measured(tmp_path, before=(path,), after=(path,))
    write(path, [(None, [None])])
    with pytest.raises(UserError, match=r"no continuation has a score"):
        measured(tmp_path, before=(path,), after=(path,))
