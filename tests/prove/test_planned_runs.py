"""Runs of a config before its data exist, and mistakes in naming them."""

import re
from pathlib import Path

import pytest

from tokamake.errors import UserError
from tokamake.prove.planned_runs import read_any

MODEL = Path("config/models/tiny-gpt.yaml")
CONFIG = f"""\
run: planned
model: {{architecture: {MODEL}}}
train:
  parallel: {{pipeline_parallel_size: 2}}
"""
ELSEWHERE = """\
run: planned
model: {checkpoint: elsewhere}
train: {finetune: true}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


def test_the_model_of_a_checkpoint_on_another_machine_is_given(tmp_path: Path) -> None:
    (run,) = read_any(write(tmp_path, ELSEWHERE), None, architecture=MODEL)
    assert run.architecture == read_any(write(tmp_path, CONFIG), None)[0].architecture
    assert run.train.finetune


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        (CONFIG, "other", "--run other: not in .*; choose one of planned"),
        (CONFIG, "", "--run '': not in .*; choose one of planned"),
        (CONFIG.replace("tiny-gpt", "none"), None, r"config/models/none\.yaml"),
        (ELSEWHERE, None, "checkpoint: elsewhere: no such folder; .*--architecture config/"),
        (
            re.sub("train.*", "", ELSEWHERE),
            None,
            "checkpoint: elsewhere: no such folder; .* set train.finetune",
        ),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, text: str, name: str | None, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        read_any(write(tmp_path, text), name)
    assert "\n" not in str(caught.value)
