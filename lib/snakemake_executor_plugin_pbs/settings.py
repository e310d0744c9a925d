"""Settings of the executor: --pbs-... on the command line, or pbs-...: in a profile."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from snakemake_interface_executor_plugins.settings import CommonSettings, ExecutorSettingsBase

from .request import PERSONAL


def setting(default: Any, help: str) -> Any:
    """Field of the settings, with the text that `snakemake --help` shows."""
    return field(default=default, metadata={"help": help})


@dataclass
class ExecutorSettings(ExecutorSettingsBase):
    """Settings of the executor, listed in README.md."""

    personal: ClassVar[tuple[str, ...]] = PERSONAL
    """Names of values in the user file."""
    resource_names: ClassVar[Mapping[str, str]] = {}
    """Name in the user file to that of the resource, if they differ."""
    current: ClassVar["ExecutorSettings | None"] = None
    """Settings from the command line and the profile of this process. A dry run has no executor,
    but it has these settings, so that a workflow can check them."""

    user_file: str = setting(
        "~/.config/snakemake/pbs.yaml",
        "YAML file with the values of a user (account, queue, filesystems, place, "
        "select, container, pbs_extra), for all rules and, under rules, for each rule. "
        "Resources of a job come first.",
    )
    required: str = setting(
        "", "Values of account, queue, filesystems that the site requires, separated by spaces."
    )
    max_queued: str = setting(
        "",
        "Number of jobs that may wait in a queue, such as 'debug=1 prod=20 *=50'; * is "
        "any other queue.",
    )
    patience: int = setting(
        300, "Seconds for which PBS alone, or a job's exit-status file alone, is not believed."
    )
    command_timeout: int = setting(
        60, "Seconds after which qsub, qstat, qselect or qdel is killed."
    )
    jobs_per_call: int = setting(
        2000,
        "Jobs in one call of qstat. There is one call per interval; jobs with the "
        "oldest answers come first.",
    )

    def __post_init__(self) -> None:
        ExecutorSettings.current = self

    def site_values(self) -> dict[str, str]:
        """Values of the site; the user file's values replace them."""
        return {}


common_settings = CommonSettings(
    non_local_exec=True,
    implies_no_shared_fs=False,
    job_deploy_sources=False,
    pass_default_storage_provider_args=True,
    pass_default_resources_args=True,
    pass_envvar_declarations_to_cmd=True,
    auto_deploy_default_storage_provider=False,
    init_seconds_before_status_checks=0,
)
