"""Random damage to the kept files of a run: nothing that decides its weights changes silently.

Each fault damages one file. Then everything is read that a job reads before it continues: settings,
data, index and checkpoints. The outcome is one of `OUTCOMES`; `silent` fails.
"""

from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.support import damage
from tests.support.damage import Outlook, sweep_run
from tests.support.faults import Inject
from tests.support.runs import make_run, prepare, train_here
from tokamake.config.resolved_run import read_run
from tokamake.data.samples.index_folder import read_index
from tokamake.data.samples.loader import open_samples
from tokamake.preflight.run_record import run_digest
from tokamake.runtime.ranks import Ranks
from tokamake.train.checkpoints.first_weights import weights_digest
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


def outlook(config: Path) -> Outlook:
    """Read what a job reads before it continues the run."""
    run = with_precision(read_run(config), torch.device("cpu"))
    index = read_index(run.index)
    for split in index["splits"]:
        open_samples(run.index, split=split, data_root=run.data_root)
    verify_data(run, ALONE, index)
    start = weights_digest(run.checkpoint, ALONE, note=config.with_name(".training.start"))
    digest = run_digest(run, index=index, weights=start)
    return damage.outlook(run.output, digest, lambda _: index["digest"])


def kept_files(root: Path) -> Iterator[Path]:
    """Files that are read, or could be: of the checkpoints, the newest."""
    for path in sorted(root.rglob("*")):
        is_other = {"global_step2", "global_step4", "tensorboard"} & {*path.parts}
        if path.is_file() and not is_other and path.stat().st_size:
            yield path


def group(path: Path, root: Path) -> str:
    """Row of the table of docs/explanation/reliability.md."""
    name = path.relative_to(root).as_posix()
    if "global_step" in name:
        return f"{'start' if name.startswith('start') else 'checkpoint'}: {path.name}"
    return name


@pytest.mark.fault("damaged file")
@pytest.mark.parametrize("faults_a_file", [1, pytest.param(FAULTS_A_FILE, marks=pytest.mark.grid)])
def test_no_damage_is_silent(config: Path, faults_a_file: int, inject: Inject) -> None:
    root = config.parents[1]
    counts = sweep_run(
        root,
        partial(outlook, config),
        files=[*kept_files(root)],
        # The file, its folder, its dataset, or the file that names it.
        names=lambda path: (path, path.parent, path.with_suffix(""), root),
        group=lambda path: group(path, root),
        faults_a_file=faults_a_file,
        inject=inject,
    )
    assert sum(counts.values(), Counter()).total() >= faults_a_file * 22
    decisive = counts["checkpoint: state.json"] + counts["index/index.json"] + counts["corpus.idx"]
    assert decisive["refused"] + decisive["goes back"] > 0
