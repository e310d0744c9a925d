"""Snakemake's interface to the executor, with the commands of PBS."""

from .base.executor import BatchExecutor
from .commands import PBS, PbsCommands
from .request import build_request
from .settings import ExecutorSettings


class Executor(BatchExecutor):
    """Runs each job of a workflow as a PBS job."""

    dialect = PBS
    settings = ExecutorSettings
    commands_class = PbsCommands
    build_request = staticmethod(build_request)
