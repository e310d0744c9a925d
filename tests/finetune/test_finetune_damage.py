"""Random damage to the kept files of a run that finetunes: its weights do not change silently."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import finetunes
from tests.support.damage import sweep, table, tensor_bytes
from tests.support.faults import Inject
from tokamake import files
from tokamake.checkpoint.native.resume_state import newest_state
from tokamake.errors import UserError
from tokamake.finetune.epochs import read_history
from tokamake.finetune.finetune_run import read_finetune_run
from tokamake.finetune.start import effective_settings, read_data
from tokamake.preflight.run_digest import weights_digest
from tokamake.runtime.ranks import Ranks
from tokamake.train.checkpoints.resume import state_before
from tokamake.train.numerics import with_precision

FAULTS_A_FILE = 14
ALONE = Ranks(0, 1, 0, 1)

pytestmark = pytest.mark.usefixtures("lone_rank")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, lone_rank: None) -> Path:
    """A finished run of 2 epochs of 3 steps."""
    run = finetunes.prepare(tmp_path_factory.mktemp("damage"), rows=(18, 8), save_interval=2)
    finetunes.run_here(run)
    return run.output.with_name("run.yaml")


def outlook(config: Path) -> tuple[Any, str, str]:
    """What a job would continue with, what it says, and whether the run is another one.

    Raises:
        UserError: as the job would.
    """
    run = read_finetune_run(config)
    data = read_data(run, say=lambda _: None)
    with_precision(run.resolved(len(data.train)), torch.device("cpu"))
    note = run.output.with_name(".training.start")
    weights = weights_digest(run.checkpoint, ALONE, note=note, beat=lambda: None)
    digest = files.digest(effective_settings(run, data, weights=weights))
    state, said = newest_state(run.output)
    while state:
        folder = run.output / f"global_step{state.step}"
        try:
            values = tensor_bytes(folder)
        except UserError as error:
            said += f"{error}"
            state = state_before(run.output, state)
            continue
        history = read_history(folder).to_json()
        changed = "says so" if digest != state.digest else ""
        return (state.to_json(), values, history), said, changed
    if said:
        raise UserError(said)
    return None, "", "starts again"


def outcome(config: Path, path: Path, expected: Any) -> str:
    try:
        found, said, changed = outlook(config)
    except UserError as error:
        # The name of the file, its folder, or its checkpoint. run.yaml names other files, and the
        # message names the one that is missing.
        names = (str(path), str(path.parent), str(path.parents[1]))
        is_named = path.name == "run.yaml" or any(name in str(error) for name in names)
        return "refused" if is_named else f"unnamed: {error}"
    if changed:
        return changed
    # A person may let `latest` name an earlier checkpoint: the same steps follow again.
    if said or (path.name == "latest" and found[0]["step"] < expected[0]["step"]):
        return "goes back"
    return "harmless" if found == expected else "silent"


def kept_files(root: Path) -> Iterator[Path]:
    """Of the checkpoints, the newest; `finetuned` has links to one, and `pretrained` is copied."""
    for path in sorted(root.rglob("*")):
        parts = {*path.relative_to(root).parts}
        is_other = parts & {"finetuned", "pretrained", "global_step3", "global_step4"}
        if path.is_file() and not is_other and path.stat().st_size:
            yield path


@pytest.mark.fault("damaged file")
@pytest.mark.parametrize("faults_a_file", [1, pytest.param(FAULTS_A_FILE, marks=pytest.mark.grid)])
def test_no_damage_is_silent(config: Path, faults_a_file: int, inject: Inject) -> None:
    root = config.parents[1]
    expected, said, changed = outlook(config)
    assert not said + changed
    counts = sweep(
        kept_files(root),
        lambda path: outcome(config, path, expected),
        everything=[path for path in sorted(root.rglob("*")) if path.is_file()],
        group=lambda path: str(path.relative_to(root)),
        faults_a_file=faults_a_file,
        inject=inject,
    )
    print(table(counts))
    decisive = sum((count for name, count in counts.items() if "global_step6" in name), Counter())
    assert decisive["goes back"] > decisive["harmless"]


def test_a_changed_score_chooses_no_other_checkpoint(config: Path) -> None:
    run = read_finetune_run(config)
    history = run.output / "global_step6/finetune.json"
    content = history.read_text()
    history.write_text(content.replace('"accuracy": 0.', '"accuracy": 9.', 1))
    try:
        state, said = newest_state(run.output)
    finally:
        history.write_text(content)
    assert state
    assert state.step < 6
    assert f"{history}: does not match its hash" in said
