"""Settings of the executor: --sbatch-... on the command line, or sbatch-...: in a profile."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from snakemake_executor_plugin_pbs.base.settings import BatchSettings, setting

from .request import PERSONAL, RESOURCES, read_defaults


@dataclass
class ExecutorSettings(BatchSettings):
    """Settings of the executor, listed in README.md."""

    personal: ClassVar[tuple[str, ...]] = PERSONAL
    resource_names: ClassVar[Mapping[str, str]] = RESOURCES

    user_file: str = setting(
        "~/.config/snakemake/slurm.yaml",
        "YAML file with the values of a user (account, partition, qos, constraint, "
        "reservation, gpus_per_node, container, slurm_extra), for all rules and, under "
        "rules, for each rule. Resources of a job come first.",
    )
    required: str = setting(
        "",
        "Values of account, partition, qos, constraint that the site requires, "
        "separated by spaces.",
    )
    defaults: str = setting(
        "",
        "Values of the site for account, partition, qos, constraint, reservation, "
        "gpus_per_node, such as 'constraint=gpu qos=regular'. Resources of a job and the user "
        "file come first.",
    )
    max_queued: str = setting(
        "",
        "Number of jobs that may wait in a partition, such as 'debug=1 *=50'; * is any "
        "other partition, and jobs without a partition.",
    )
    patience: int = setting(
        120, "Seconds for which Slurm alone, or a job's exit-status file alone, is not believed."
    )
    command_timeout: int = setting(60, "Seconds after which sbatch, squeue or scancel is killed.")
    jobs_per_call: int = setting(
        2000,
        "Jobs in one call of squeue. There is one call per interval; jobs with the "
        "oldest answers come first.",
    )

    def site_values(self) -> dict[str, str]:
        """Values of the site; the user file's values replace them."""
        return read_defaults(self.defaults)
