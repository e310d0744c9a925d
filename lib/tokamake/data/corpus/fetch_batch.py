"""Stage `fetch-batch`: download the raw files of a job batch that are behind addresses."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tokamake.data.corpus.plan_file import batch_shards, read_plan
from tokamake.errors import UserError
from tokamake.files import write_json
from tokamake.remote.download import download
from tokamake.runtime.console import counted
from tokamake.units import in_bytes

ALL = "all"
"""In place of a batch: the files that the tokenizer is trained on."""


def fetch_batch(*, plan: Path, batch: str, output: Path, workers: int = 4) -> None:
    """Download the raw files of a `tokenize` batch that the table of corpora names by addresses.

    The plan pins each file: its commit on the Hugging Face Hub, or its size and version on a web
    server. Downloads go to the cache (HF_HOME), where existing files are used again; the
    workspace gets links. An interrupted download continues.

    Args:
        plan: plan.json of the workflow.
        batch: name of a batch of shards in the plan; all: the files that the tokenizer is trained
            on.
        output: JSON file that names the files, written when all are there.
        workers: downloads at the same time.
    """
    read = read_plan(plan)
    members = read.tokenizer if batch == ALL else batch_shards(plan, batch)
    paths = {path for member in members for path in member.files}
    # Two addresses may stand for one file.
    downloads = {entry.path: entry.file for entry in read.downloads}
    files = [file for path, file in downloads.items() if path in paths]
    with ThreadPoolExecutor(max(workers, 1)) as pool:
        errors = [future.exception() for future in [pool.submit(download, f) for f in files]]
    for error in errors:
        if error and not isinstance(error, UserError):
            raise error
    if reasons := [str(error) for error in errors if error]:
        raise UserError("\n".join(reasons))
    listed = [{"path": file.path, "url": file.url, "bytes": file.size} for file in files]
    write_json(output, {"batch": batch, "files": listed})
    print(f"{output}: {counted(len(files), 'file')}, {in_bytes(sum(f.size for f in files))}")
