"""Snakemake executor for Slurm. Snakemake finds it by the name of this package.

snakemake_executor_plugin_pbs watches, recovers and deletes the jobs. This package has Slurm's
commands (`commands`), the status of jobs from squeue (`states`), and options of sbatch (`request`).
"""

from snakemake_executor_plugin_pbs import common_settings

from .executor import Executor
from .settings import ExecutorSettings

__all__ = ["Executor", "ExecutorSettings", "common_settings"]
