"""SST-2 (Socher et al. 2013): is the opinion of a sentence positive?"""

from tokamake.finetune.tasks._table import TextTable

HEAD = "classes"
LABELS: tuple[str, ...] = ("0", "1")
METRICS = ("accuracy",)
SETTINGS: dict[str, object] = {}

read = TextTable(first="sentence").read
"""Read the examples of a file."""
