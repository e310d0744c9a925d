"""QQP (Quora Question Pairs): do two questions have the same meaning?"""

from tokamake.finetune.tasks._table import TextTable

HEAD = "classes"
LABELS: tuple[str, ...] = ("0", "1")
METRICS = ("accuracy", "f1")
SETTINGS: dict[str, object] = {}

read = TextTable(
    first="question1",
    second="question2",
    label="is_duplicate",
    # Some lines of GLUE's file lack columns.
    skips_damaged=True,
).read
"""Read the examples of a file."""
