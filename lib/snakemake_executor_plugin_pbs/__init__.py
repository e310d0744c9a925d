"""Snakemake executor for PBS Pro and OpenPBS; found by Snakemake by this module's name.

Jobs flow from `executor` (Snakemake's side) through `tracker` to `commands` (PBS's side); `records`
keeps them on disk, `states`, `replies` and `evidence` tell what PBS's answers mean.
"""

from .executor import Executor
from .settings import ExecutorSettings, common_settings

__all__ = ["Executor", "ExecutorSettings", "common_settings"]
