"""Checks of a task that need no model."""

from tokamake import plugins
from tokamake.config.tasks import FOLDER, TaskSettings
from tokamake.data.corpus.raw_files import expand


def check_task(task: TaskSettings) -> None:
    """Check that local files exist, and what the plug-in itself checks.

    Raises:
        UserError: a file does not exist, or a setting is wrong.
    """
    expand([each for each in task.data if each not in task.addresses])
    if not plugins.constant(FOLDER, task.name, "NEEDS_DATA"):
        plugins.load(FOLDER, task.name).check(task)
