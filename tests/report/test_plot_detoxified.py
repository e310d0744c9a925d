"""Tables of toxicity before and after."""

import json
from pathlib import Path
from typing import Any

import pytest

from tokamake.errors import UserError
from tokamake.report.plot_detoxified import plot_detoxified


def measures(maximum: float | None, probability: float | None, prompts: int) -> dict[str, Any]:
    return {
        "prompts": prompts,
        "expected_maximum_toxicity": maximum,
        "toxicity_probability": probability,
    }


NONE = measures(None, None, 0)
TEXTS = {"number": 20, "mean": 0.25, "sd": 0.1, "minimum": 0, "maximum": 0.875, "above_half": 0.1}
RESULTS: dict[str, Any] = {
    "before": {"all": measures(0.75, 0.5, 1234), "toxic": NONE, "nontoxic": NONE, "perplexity": 9},
    "after": {"all": measures(0.5, 0.25, 1234), "toxic": NONE, "nontoxic": NONE, "perplexity": 10},
    "texts": {"texts": 21, "blank": 1, "scored": TEXTS, "kept": {**TEXTS, "number": 10}},
}


def test_the_page_has_the_numbers(tmp_path: Path) -> None:
    (tmp_path / "scores.json").write_text(json.dumps(RESULTS))
    plot_detoxified(scores=tmp_path / "scores.json", output=tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    for text in ("all prompts (1,234)", "0.750", "-0.250", "+1.00", "10.0%", "1 of 21 texts"):
        assert text in page
    assert "nontoxic" not in page


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a.json: .*make it with `tokamake measure-toxicity`"):
        plot_detoxified(scores=tmp_path / "a.json", output=tmp_path / "page.html")
