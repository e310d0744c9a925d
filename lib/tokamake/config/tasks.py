"""Section `evaluate.tasks`: tasks that score a model, besides its held-out documents."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, model_validator

from tokamake import plugins
from tokamake.config.fields import Key, plug_in
from tokamake.config.plugin_settings import PlugInSettings
from tokamake.remote.addresses import is_remote

FOLDER = "evaluate/tasks"


class TaskSettings(PlugInSettings):
    """A task, with the settings of its plug-in."""

    folder: ClassVar[str] = FOLDER

    name: Annotated[str, plug_in(FOLDER)]
    """Plug-in in evaluate/tasks/. By default, the key of the task."""
    data: tuple[str, ...] = ()
    """Files, folders or patterns; or addresses, as in a table of corpora."""

    @property
    def addresses(self) -> list[str]:
        return [each for each in self.data if is_remote(each)]

    @property
    def is_fetched(self) -> bool:
        """Whether data are downloaded before the task."""
        fetches = plugins.constant(FOLDER, self.name, "IS_FETCHED", default=False)
        return bool(fetches or self.addresses)

    def evaluation_sets(self) -> dict[str, dict[str, Any]] | None:
        """Local data of a task that finds them itself: name of each set → its files and fields.

        None: the files of `data` are all.

        Raises:
            UserError: data are not local.
        """
        find = getattr(plugins.load(FOLDER, self.name), "evaluation_sets", None)
        return None if find is None else dict(find(self))

    @model_validator(mode="after")
    def _check_data(self) -> "TaskSettings":
        needs_data = plugins.constant(FOLDER, self.name, "NEEDS_DATA")
        if needs_data and not self.data:
            raise ValueError(f"data: empty; name the files of {self.name}")
        if self.data and not needs_data:
            raise ValueError(f"data: {self.name} does not use it; remove it")
        return self


def _with_names(value: Any) -> Any:
    """Tasks by their keys, each with the key as its name, if it has no other."""
    if not isinstance(value, Mapping):
        return value
    return {
        key: {"name": key, **task} if isinstance(task, Mapping) else task
        for key, task in value.items()
    }


Tasks = Annotated[dict[Key, TaskSettings], BeforeValidator(_with_names)]
