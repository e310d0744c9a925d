"""Texts of your own, or pairs of texts, with labels: columns and labels are settings."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokamake.finetune.tasks._table import TextTable
from tokamake.train.objectives.classification.data import Example

HEAD = "classes"
LABELS: tuple[str, ...] = ()
METRICS = ("accuracy",)
SETTINGS = {
    "labels": {"default": [], "description": "All labels, in the order of the model's classes."},
    "first_key": {"default": "text", "description": "Key or column of the text."},
    "second_key": {"default": "", "description": "Key or column of a second text; empty: none."},
    "label_key": {"default": "label", "description": "Key or column of the label."},
}


def read(path: Path, settings: Mapping[str, Any]) -> Iterator[Example]:
    """Read the examples of a file."""
    table = TextTable(
        settings["first_key"], settings["second_key"] or None, label=settings["label_key"]
    )
    return table.read(path, settings)
