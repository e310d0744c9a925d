"""CoLA (arXiv 1805.12471): is a sentence acceptable English?"""

from tokamake.finetune.tasks._table import TextTable

HEAD = "classes"
LABELS: tuple[str, ...] = ("0", "1")
METRICS = ("matthews",)
SETTINGS: dict[str, object] = {}

read = TextTable(
    first="sentence",
    # Only the test set has a line with names.
    columns=("source", "label", "mark", "sentence"),
).read
"""Read the examples of a file."""
