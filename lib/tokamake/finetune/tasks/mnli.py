"""MNLI (arXiv 1704.05426): does a hypothesis contradict a premise, follow from it, or neither?"""

from tokamake.finetune.tasks._table import TextTable

HEAD = "classes"
LABELS: tuple[str, ...] = ("contradiction", "entailment", "neutral")
METRICS = ("accuracy",)
SETTINGS: dict[str, object] = {}

read = TextTable(first="sentence1", second="sentence2", label="gold_label").read
"""Read the examples of a file."""
