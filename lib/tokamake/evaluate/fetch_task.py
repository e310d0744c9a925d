"""Stage `fetch-task`: download the data of a task."""

from pathlib import Path


def fetch_task(name: str, /, *, settings: str = "{}", output: Path | None = None) -> None:
    """Download the data of a task into the cache of the Hugging Face Hub, HF_HOME.

    Args:
        name: plug-in in evaluate/tasks/ that downloads data: lm_eval.
        settings: JSON of the task's settings.
        output: file to write when all is there.

    Raises:
        UserError: a setting is wrong, or the data cannot be read.
    """
    from tokamake import plugins
    from tokamake.config.tasks import FOLDER
    from tokamake.errors import UserError
    from tokamake.evaluate.evaluate_task import read_task
    from tokamake.files import write_text

    task = read_task(name, settings)
    if not plugins.constant(FOLDER, name, "IS_FETCHED", default=False):
        raise UserError(f"{name}: its data are files, which are not downloaded; name lm_eval")
    plugins.load(FOLDER, name).fetch(task)
    if output:
        write_text(output, "")
