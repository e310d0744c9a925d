"""QNLI (arXiv 1804.07461): does a sentence answer a question?"""

from tokamake.finetune.tasks._table import TextTable

HEAD = "classes"
LABELS: tuple[str, ...] = ("entailment", "not_entailment")
METRICS = ("accuracy",)
SETTINGS: dict[str, object] = {}

read = TextTable(first="question", second="sentence").read
"""Read the examples of a file."""
