"""The executor's own options, --pbs-... on the command line or pbs-...: in a profile."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from snakemake_interface_executor_plugins.settings import CommonSettings, ExecutorSettingsBase

from .request import PERSONAL


@dataclass
class ExecutorSettings(ExecutorSettingsBase):
    """Settings of the executor; README.md has them in a table."""

    personal: ClassVar[tuple[str, ...]] = PERSONAL
    """What the user's file may hold."""
    resource_names: ClassVar[Mapping[str, str]] = {}
    """Resources of a rule that have other names than in the user's file."""
    given: ClassVar["ExecutorSettings | None"] = None
    """Settings that the command line and the profile of this process gave. A dry run has them, too,
    although it has no executor, so that a workflow can check them there."""

    user_file: str = field(
        default="~/.config/snakemake/pbs.yaml",
        metadata={
            "help": "YAML file with what differs from person to person (account, queue, "
            "filesystems, place, select, pbs_extra), for all rules and, under rules, for each. "
            "Resources of a job come first."
        },
    )
    required: str = field(
        default="",
        metadata={
            "help": "Those of account, queue, filesystems without which the site takes no job, "
            "separated by spaces."
        },
    )
    max_queued: str = field(
        default="",
        metadata={
            "help": "Jobs that may wait in a queue at a time, as in 'debug=1 prod=20 *=50'; * is "
            "any other queue."
        },
    )
    patience: int = field(
        default=300,
        metadata={
            "help": "Seconds for which PBS alone (a job that it does not know) or a job's "
            "exit-status file alone is not yet believed."
        },
    )
    command_timeout: int = field(
        default=60,
        metadata={"help": "Seconds after which qsub, qstat, qselect or qdel is ended."},
    )
    jobs_per_call: int = field(
        default=2000,
        metadata={
            "help": "Jobs in one call of qstat. There is one call an interval; those asked about "
            "longest ago come first."
        },
    )

    def __post_init__(self) -> None:
        ExecutorSettings.given = self

    def site_values(self) -> dict[str, str]:
        """The site's own values, which those of the user's file replace."""
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
