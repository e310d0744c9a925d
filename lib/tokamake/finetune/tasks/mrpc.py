"""MRPC (Dolan and Brockett 2005): do two sentences have the same meaning?"""

from tokamake.finetune.tasks._table import TextTable

HEAD = "classes"
LABELS: tuple[str, ...] = ("0", "1")
METRICS = ("accuracy", "f1")
SETTINGS: dict[str, object] = {}

read = TextTable(first="#1 String", second="#2 String", label="Quality").read
"""Read the examples of a file."""
