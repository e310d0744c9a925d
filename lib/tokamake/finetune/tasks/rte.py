"""RTE (arXiv 1804.07461): does a sentence follow from another one?"""

from tokamake.finetune.tasks._table import TextTable

HEAD = "classes"
LABELS: tuple[str, ...] = ("entailment", "not_entailment")
METRICS = ("accuracy",)
SETTINGS: dict[str, object] = {}

read = TextTable(first="sentence1", second="sentence2").read
"""Read the examples of a file."""
