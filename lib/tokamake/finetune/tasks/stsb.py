"""STS-B (arXiv 1708.00055): how similar are two sentences, from 0 to 5?"""

from tokamake.finetune.tasks._table import TextTable

HEAD = "regression"
LABELS: tuple[str, ...] = ()
METRICS = ("pearson", "spearman")
SETTINGS: dict[str, object] = {}

read = TextTable(first="sentence1", second="sentence2", label="score").read
"""Read the examples of a file."""
