"""How a new checkpoint takes its place in the output folder: complete, or not at all.

A back end writes it inside `SAVING`; `commit` moves it into place.
"""

import shutil
from itertools import chain, count
from pathlib import Path

from tokamake import files
from tokamake.checkpoint.native.folder import check_files
from tokamake.checkpoint.native.resume_state import HASHED, ResumeState, read_state
from tokamake.errors import UserError

SAVING = ".saving"
"""Folder inside the output folder where a checkpoint grows until it is complete."""


def commit(output: Path, state: ResumeState) -> Path:
    """Move the complete checkpoint inside `SAVING` into place, then let `latest` name it.

    Call it from one process only, once the checkpoint's files are on disk. A folder of the same
    name exists if training restarted from an earlier checkpoint. One of this run is removed once
    the new one is in place; one of another run is renamed.
    """
    name = f"global_step{state.step}"
    source, target = output / SAVING / name, output / name
    try:
        check_files(source)
    except UserError as error:
        raise UserError(
            f"{target}: not saved, because its files are not complete ({error}); `latest` still "
            "names the checkpoint before: run the same command again"
        ) from None
    hashes = {name: files.sha256(source / name) for name in HASHED if (source / name).is_file()}
    files.write_sealed_json(source / "state.json", {**state.to_json(), "files": hashes})
    files.sync(source)
    if target.exists():
        replaced = free_name(output / f"{name}.old")
        if _is_of_run(target, state.digest):
            replaced = output / SAVING / f"{name}.replaced"  # goes with `SAVING`, even after a kill
        target.rename(replaced)
    source.rename(target)
    files.sync(output)
    # `latest` comes last: a job that is killed before resumes from the checkpoint before.
    files.write_text(output / "latest_checkpointed_iteration.txt", f"{state.step}\n")
    files.write_text(output / "latest", name)
    shutil.rmtree(output / SAVING)
    return target


def _is_of_run(folder: Path, digest: str) -> bool:
    try:
        state = read_state(folder)
    except UserError:  # damaged
        return False
    return state is not None and state.digest == digest


def free_name(path: Path) -> Path:
    """The path, or the first of PATH.2, PATH.3, … that does not exist."""
    names = (path.with_name(f"{path.name}.{number}") for number in count(2))
    return next(name for name in chain([path], names) if not name.exists())
