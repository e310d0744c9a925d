"""Page and figure of a finetuned run: the right numbers, and the same bytes again."""

import json
from pathlib import Path
from typing import Any

import pytest

from tokamake.errors import UserError
from tokamake.report.plot_finetuned import plot_finetuned

EPOCHS: list[dict[str, Any]] = [
    {"epoch": 1, "step": 10, "train_loss": 0.7, "scores": {"accuracy": 0.5, "f1": 0.25}},
    {"epoch": 2, "step": 20, "train_loss": 0.4, "scores": {"accuracy": 0.8125, "f1": 0.75}},
]
SCORES = {
    "task": "mrpc",
    "metrics": ["accuracy", "f1"],
    "rows": {"train": 1234, "validation": 56},
    "epochs": EPOCHS,
    "best": EPOCHS[1],
    "pretrained": "results/<bert>/training",
}
EVALUATION = {"scores": {"dev": {"rows": 56, "accuracy": 0.8125, "f1": 0.75}, "test": {"rows": 7}}}


@pytest.fixture
def inputs(tmp_path: Path) -> dict[str, Path]:
    (tmp_path / "finetune.json").write_text(json.dumps(SCORES))
    (tmp_path / "evaluation.json").write_text(json.dumps(EVALUATION))
    return {"scores": tmp_path / "finetune.json", "evaluation": tmp_path / "evaluation.json"}


def test_page_and_figure_have_the_numbers(inputs: dict[str, Path], tmp_path: Path) -> None:
    for name in ("first", "second"):
        plot_finetuned(**inputs, output=tmp_path / name)
    page = (tmp_path / "first/finetuning.html").read_text()
    for text in ("0.8125", "2 (best)", "1,234", "&lt;bert&gt;", "test", "–"):
        assert text in page
    for name in ("finetuning.html", "scores.svg"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()


def test_a_missing_file_is_named(inputs: dict[str, Path], tmp_path: Path) -> None:
    inputs["scores"].unlink()
    with pytest.raises(UserError, match=r"finetune.json: .*make it with `tokamake finetune`"):
        plot_finetuned(**inputs, output=tmp_path / "plots")
