"""Checks of a task that need no model, and its files."""

from pathlib import Path

from tokamake import plugins
from tokamake.config.tasks import FOLDER, TaskSettings
from tokamake.data.corpus.raw_files import expand


def check_task(task: TaskSettings) -> None:
    """Check that local files exist, then run the plug-in's own checks."""
    local_files(task)
    if not plugins.constant(FOLDER, task.name, "NEEDS_DATA"):
        plugins.load(FOLDER, task.name).check(task)


def local_files(task: TaskSettings) -> list[Path]:
    """Return the local files of a task: its data, and the files that the plug-in itself names."""
    files = expand([each for each in task.data if each not in task.addresses])
    if not plugins.constant(FOLDER, task.name, "NEEDS_DATA"):
        files += plugins.load(FOLDER, task.name).files(task)
    return files
