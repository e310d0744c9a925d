"""Settings that the executors of all batch systems have."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from snakemake_interface_executor_plugins.settings import CommonSettings, ExecutorSettingsBase


def setting(default: Any, help: str) -> Any:
    """Field of the settings, with the text that `snakemake --help` shows."""
    return field(default=default, metadata={"help": help})


@dataclass
class BatchSettings(ExecutorSettingsBase):
    """Settings of an executor; a subclass gives each a default and a help text."""

    personal: ClassVar[tuple[str, ...]]
    """Names of values in the user file."""
    resource_names: ClassVar[Mapping[str, str]] = {}
    """Name in the user file → name of the resource, where the two differ."""
    current: ClassVar["BatchSettings | None"] = None
    """Settings from the command line and the profile of this process. A dry run has no executor,
    but it has these settings, so that a workflow can check them."""

    user_file: str
    required: str
    max_queued: str
    patience: int
    command_timeout: int
    jobs_per_call: int

    def __post_init__(self) -> None:
        BatchSettings.current = self

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
