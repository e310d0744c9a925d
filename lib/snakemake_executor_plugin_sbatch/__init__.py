"""Snakemake executor for Slurm. Snakemake finds it by the name of this package.

This package has Slurm's commands (`commands`), the states of its jobs (`states`), and options of
sbatch (`request`). `snakemake_executor_plugin_pbs.base` watches, recovers and deletes jobs.
"""

from snakemake_executor_plugin_pbs.base.settings import common_settings

from .executor import Executor
from .settings import ExecutorSettings

__all__ = ["Executor", "ExecutorSettings", "common_settings"]
