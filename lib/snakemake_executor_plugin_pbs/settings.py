"""Settings of the executor: --pbs-... on the command line, or pbs-...: in a profile."""

from dataclasses import dataclass

from .base.settings import BatchSettings, setting
from .request import PERSONAL


@dataclass
class ExecutorSettings(BatchSettings):
    """Settings of the executor, listed in README.md."""

    personal = PERSONAL

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
