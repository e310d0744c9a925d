"""The executor's own options, --sbatch-... on the command line or sbatch-...: in a profile."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from snakemake_executor_plugin_pbs import ExecutorSettings as PbsSettings

from .request import PERSONAL, RESOURCES, read_defaults


@dataclass
class ExecutorSettings(PbsSettings):
    """Settings of the executor; README.md has them in a table."""

    personal: ClassVar[tuple[str, ...]] = PERSONAL
    resource_names: ClassVar[Mapping[str, str]] = RESOURCES

    user_file: str = field(
        default="~/.config/snakemake/slurm.yaml",
        metadata={
            "help": "YAML file with what differs from person to person (account, partition, qos, "
            "constraint, reservation, slurm_extra), for all rules and, under rules, for each. "
            "Resources of a job come first."
        },
    )
    required: str = field(
        default="",
        metadata={
            "help": "Those of account, partition, qos, constraint without which the site takes no "
            "job, separated by spaces."
        },
    )
    defaults: str = field(
        default="",
        metadata={
            "help": "The site's own values of account, partition, qos, constraint, reservation, as "
            "in 'constraint=gpu qos=regular', for jobs of which neither a resource nor the user's "
            "file says another."
        },
    )
    max_queued: str = field(
        default="",
        metadata={
            "help": "Jobs that may wait in a partition at a time, as in 'debug=1 *=50'; * is any "
            "other one, and jobs without a partition."
        },
    )
    patience: int = field(
        default=120,
        metadata={
            "help": "Seconds for which Slurm alone (a job that it does not know) or a job's "
            "exit-status file alone is not yet believed."
        },
    )
    command_timeout: int = field(
        default=60,
        metadata={"help": "Seconds after which sbatch, squeue or scancel is ended."},
    )
    jobs_per_call: int = field(
        default=2000,
        metadata={
            "help": "Jobs in one call of squeue. There is one call an interval; those asked about "
            "longest ago come first."
        },
    )

    def site_values(self) -> dict[str, str]:
        """The site's own values, which those of the user's file replace.

        Raises:
            UserError: they are not written as NAME=VALUE.
        """
        return read_defaults(self.defaults)
