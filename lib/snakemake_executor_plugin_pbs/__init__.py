"""Snakemake executor for PBS Pro and OpenPBS. Snakemake finds it by the name of this package.

This package has PBS's commands (`commands`), the states of its jobs (`states`), and options of qsub
(`request`). `base` watches, recovers and deletes jobs of any batch system.
"""

from .base.settings import common_settings
from .executor import Executor
from .settings import ExecutorSettings

__all__ = ["Executor", "ExecutorSettings", "common_settings"]
