"""Stage `fetch-task`: download the data of a task."""

from pathlib import Path


def fetch_task(name: str, /, *, settings: str = "{}", output: Path | None = None) -> None:
    """Download the data of a task.

    Downloads go to the cache of the Hugging Face Hub, HF_HOME. Files behind the addresses of `data`
    get links below results/raw.

    Args:
        name: plug-in in evaluate/tasks/.
        settings: JSON of the task's settings.
        output: JSON file that names the files of each address, for `evaluate-task`.
    """
    from tokamake import plugins
    from tokamake.config.tasks import FOLDER
    from tokamake.errors import UserError
    from tokamake.evaluate.evaluate_task import read_task
    from tokamake.files import write_json
    from tokamake.remote.download import download, list_files

    task = read_task(name, settings)
    if not task.is_fetched:
        raise UserError(f"{name}: all its data are local files; there is nothing to download")
    fetched: dict[str, list[str]] = {}
    for address in task.addresses:
        files = list_files(address)
        for file in files:
            download(file)
            print(f"{file.path}: {file.size:,} bytes", flush=True)
        fetched[address] = [file.path for file in files]
    if not task.addresses:
        plugins.load(FOLDER, name).fetch(task)
    if output:
        write_json(output, {"files": fetched})
