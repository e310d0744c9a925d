"""Snakemake executor for Slurm; found by Snakemake by this module's name.

How jobs are followed, found again and deleted is snakemake_executor_plugin_pbs's; here are Slurm's
commands (`commands`), what its answers mean (`states`), and what a job asks for (`request`).
"""

from snakemake_executor_plugin_pbs import common_settings

from .executor import Executor
from .settings import ExecutorSettings

__all__ = ["Executor", "ExecutorSettings", "common_settings"]
