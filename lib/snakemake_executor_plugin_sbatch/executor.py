"""Snakemake's interface to the executor: that of PBS with the commands of Slurm."""

from snakemake_executor_plugin_pbs import Executor as PbsExecutor

from .commands import SLURM, SlurmCommands
from .request import build_request
from .settings import ExecutorSettings


class Executor(PbsExecutor):
    """Runs each job of a workflow as a Slurm job."""

    dialect = SLURM
    settings = ExecutorSettings
    commands_class = SlurmCommands
    build_request = staticmethod(build_request)
