"""Damage to the kept files of a run: what a job would continue with after each fault."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.support.damage import Counts, sweep, table, tensor_bytes
from tests.support.faults import Inject
from tokamake.checkpoint.native.resume_state import newest_state
from tokamake.errors import UserError
from tokamake.train.checkpoints.resume import state_before

Outlook = tuple[Any, str, str]
"""What a job would continue with, what it says, and whether the run is another one."""


def outlook(output: Path, digest: str, read: Callable[[Path], Any]) -> Outlook:
    """Read the newest whole checkpoint of a run; `digest` is of the run as it is configured now.

    Raises:
        UserError: no checkpoint is whole.
    """
    state, said = newest_state(output)
    while state:
        folder = output / f"global_step{state.step}"
        try:
            values = tensor_bytes(folder)
        except UserError as error:
            said += f"{error}"
            state = state_before(output, state)
            continue
        changed = "says so" if digest != state.digest else ""
        return (state.to_json(), values, read(folder)), said, changed
    if said:
        raise UserError(said)
    return None, "", "starts again"


def sweep_run(
    root: Path,
    look: Callable[[], Outlook],
    *,
    files: Iterable[Path],
    names: Callable[[Path], Iterable[Path]],
    group: Callable[[Path], str],
    faults_a_file: int,
    inject: Inject,
) -> Counts:
    """Damage files of a finished run in the folder `root`; see `sweep`.

    `look` reads all that a job reads before it continues. An error names one of the paths `names`.
    """
    expected, said, changed = look()
    assert not said + changed

    def outcome(path: Path) -> str:
        try:
            found, said, changed = look()
        except UserError as error:
            # run.yaml names other files, and the message names the one that is missing.
            is_named = any(str(name) in str(error) for name in names(path))
            return "refused" if is_named or path.name == "run.yaml" else f"unnamed: {error}"
        if changed:
            return changed
        # A person may let `latest` name an earlier checkpoint: the same steps follow again.
        if said or (path.name == "latest" and found[0]["step"] < expected[0]["step"]):
            return "goes back"
        return "harmless" if found == expected else "silent"

    counts = sweep(
        files,
        outcome,
        everything=[path for path in sorted(root.rglob("*")) if path.is_file()],
        group=group,
        faults_a_file=faults_a_file,
        inject=inject,
    )
    print(table(counts))
    return counts
