"""The executor as Snakemake sees it: that of PBS, talking to Slurm."""

from dataclasses import replace

from snakemake_executor_plugin_pbs import Executor as PbsExecutor

from .commands import SLURM, SlurmCommands
from .request import PERSONAL, build_request, read_defaults
from .settings import ExecutorSettings


class Executor(PbsExecutor):
    """Runs each job of a workflow as a job of Slurm."""

    dialect = SLURM
    settings = ExecutorSettings
    commands_class = SlurmCommands
    personal = PERSONAL
    build_request = staticmethod(build_request)

    def __post_init__(self) -> None:
        super().__post_init__()
        settings = self.workflow.executor_settings or self.settings()
        given = read_defaults(settings.defaults)
        self.user = replace(self.user, common={**given, **self.user.common})
