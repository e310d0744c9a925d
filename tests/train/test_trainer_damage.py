"""Random damage to the kept files of a run: nothing that decides its weights changes silently.

Each fault damages one file. Then everything is read that a job reads before it continues: settings,
data, index and checkpoints. The outcome is one of `OUTCOMES`; `silent` fails.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.damage import sweep, table, tensor_bytes
from tests.support.faults import Inject
from tests.support.runs import make_run, prepare, train_here
from tokamake.checkpoint.native.resume_state import newest_state
from tokamake.config.resolved_run import read_run
from tokamake.data.samples.index_folder import read_index
from tokamake.data.samples.open_samples import open_samples
from tokamake.errors import UserError
from tokamake.preflight.run_digest import initial_digest, run_digest
from tokamake.runtime.ranks import Ranks
from tokamake.train.checkpoints.resume import state_before
from tokamake.train.data_verification import verify_data
from tokamake.train.numerics import with_precision

FAULTS_A_FILE = 70
ALONE = Ranks(0, 1, 0, 1)

pytestmark = pytest.mark.usefixtures("lone_rank")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, lone_rank: None) -> Path:
    """A finished run of 6 steps, with checkpoints at 2, 4 and 6."""
    path = make_run(prepare(tmp_path_factory.mktemp("damage")), "run")
    assert train_here(path) == 0
    return path


def outlook(config: Path) -> tuple[Any, str, str]:
    """What a job would continue with, what it says, and whether the run is another one.

    Raises:
        UserError: as the job would.
    """
    run = with_precision(read_run(config), torch.device("cpu"))
    index = read_index(run.index)
    for split in index["splits"]:
        open_samples(run.index, split=split, data_root=run.data_root)
    verify_data(run, ALONE, index)
    digest = run_digest(
        run,
        index=index,
        weights=initial_digest(run, ALONE, note=config.with_name(".training.start")),
    )
    state, said = newest_state(run.output)
    while state:
        folder = run.output / f"global_step{state.step}"
        try:
            values = tensor_bytes(folder)
        except UserError as error:
            said += f"{error}"
            state = state_before(run.output, state)
            continue
        changed = "says so" if digest != state.digest else ""
        return (state.to_json(), values, index["digest"]), said, changed
    if said:
        raise UserError(said)
    return None, "", "starts again"


def outcome(config: Path, path: Path, expected: Any) -> str:
    try:
        found, said, changed = outlook(config)
    except UserError as error:
        # The name of the file, its folder, its dataset, or the file that names it.
        names = {str(path), str(path.parent), str(path.with_suffix("")), str(config.parents[1])}
        # run.yaml names other files, and the message names the one that is missing.
        is_named = path.name == "run.yaml" or any(name in str(error) for name in names)
        return "refused" if is_named else f"unnamed: {error}"
    if changed:
        return changed
    # A person may let `latest` name an earlier checkpoint: the same steps follow again.
    if said or (path.name == "latest" and found[0]["step"] < expected[0]["step"]):
        return "goes back"
    return "harmless" if found == expected else "silent"


def kept_files(root: Path) -> Iterator[Path]:
    """Files that are read, or could be: of the checkpoints, the newest."""
    for path in sorted(root.rglob("*")):
        is_earlier = {"global_step2", "global_step4"} & {*path.parts}
        if path.is_file() and not is_earlier and "tensorboard" not in path.parts:
            yield path


def group(path: Path, root: Path) -> str:
    """Row of the table of docs/explanation/reliability.md."""
    name = path.relative_to(root).as_posix()
    if "global_step" in name:
        return f"{'start' if name.startswith('start') else 'checkpoint'}: {path.name}"
    return name


@pytest.mark.fault("damaged file")
@pytest.mark.parametrize("faults_a_file", [2, pytest.param(FAULTS_A_FILE, marks=pytest.mark.grid)])
def test_no_damage_is_silent(config: Path, faults_a_file: int, inject: Inject) -> None:
    root = config.parents[1]
    expected, said, changed = outlook(config)
    assert not said + changed
    counts = sweep(
        [path for path in kept_files(root) if path.stat().st_size],
        lambda path: outcome(config, path, expected),
        everything=[path for path in sorted(root.rglob("*")) if path.is_file()],
        group=lambda path: group(path, root),
        faults_a_file=faults_a_file,
        inject=inject,
    )
    print(table(counts))
    assert sum(counts.values(), Counter()).total() >= faults_a_file * 22
    decisive = counts["checkpoint: state.json"] + counts["index/index.json"] + counts["corpus.idx"]
    assert decisive["refused"] + decisive["goes back"] > 0
