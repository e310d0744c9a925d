"""Snakemake executor for PBS Pro and OpenPBS. Snakemake finds it by the name of this package.

`executor` adds Snakemake's jobs to `tracker`, which runs the commands of PBS (`pbs_commands`) and
keeps records on disk (`records`). A step of the tracker: `polling` asks PBS, `recovery` handles
jobs of earlier controllers, `outcome` decides how jobs ended, `submission` submits ready jobs.
`replies`, `states` and `evidence` interpret PBS's answers.
"""

from .executor import Executor
from .settings import ExecutorSettings, common_settings

__all__ = ["Executor", "ExecutorSettings", "common_settings"]
