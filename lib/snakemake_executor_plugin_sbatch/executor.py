"""Snakemake's interface to the executor, with the commands of Slurm."""

from snakemake_executor_plugin_pbs.base.executor import BatchExecutor

from .commands import SLURM, SlurmCommands
from .request import build_request
from .settings import ExecutorSettings


class Executor(BatchExecutor):
    """Runs each job of a workflow as a Slurm job."""

    dialect = SLURM
    settings = ExecutorSettings
    commands_class = SlurmCommands
    build_request = staticmethod(build_request)
