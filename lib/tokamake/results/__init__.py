"""Results of a workflow as pandas data frames, for notebooks and the report.

    from tokamake import results

    results.runs("results")

Each function takes folders: results folders, or folders of single runs. Results that a run does not
have yet are missing values or missing rows. Rows have the same order in each call.
"""

from tokamake.results.corpora import documents, mixtures
from tokamake.results.costs import costs
from tokamake.results.finished_runs import runs, settings
from tokamake.results.metrics_file import metrics
from tokamake.results.samples import samples
from tokamake.results.scores import evaluations
from tokamake.results.starts import starts

__all__ = [
    "costs",
    "documents",
    "evaluations",
    "metrics",
    "mixtures",
    "runs",
    "samples",
    "settings",
    "starts",
]
