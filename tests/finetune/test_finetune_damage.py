"""Random damage to the kept files of a run that finetunes: its weights do not change silently."""

from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.support import damage, finetunes
from tests.support.damage import Outlook, sweep_run
from tests.support.faults import Inject
from tokamake import files
from tokamake.checkpoint.native.resume_state import newest_state
from tokamake.finetune.finetune_run import read_finetune_run
from tokamake.finetune.start import effective_settings, read_data
from tokamake.runtime.ranks import Ranks
from tokamake.train.checkpoints.first_weights import weights_digest
from tokamake.train.numerics import with_precision
from tokamake.train.objectives._epochs import read_history

FAULTS_A_FILE = 14

pytestmark = pytest.mark.usefixtures("lone_rank")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory, lone_rank: None) -> Path:
    """A finished run of 2 epochs of 3 steps."""
    run = finetunes.prepare(tmp_path_factory.mktemp("damage"), rows=(18, 8), save_interval=2)
    finetunes.run_here(run)
    return run.output.with_name("run.yaml")


def outlook(config: Path) -> Outlook:
    """Read what a job reads before it continues the run."""
    run = read_finetune_run(config)
    data = read_data(run, say=lambda _: None)
    with_precision(run.resolved(len(data.train)), torch.device("cpu"))
    note = run.output.with_name(".training.start")
    weights = weights_digest(run.checkpoint, Ranks(0, 1, 0, 1), note=note, beat=lambda: None)
    digest = files.digest(effective_settings(run, data, weights=weights))
    return damage.outlook(run.output, digest, lambda folder: read_history(folder).to_json())


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
    counts = sweep_run(
        root,
        partial(outlook, config),
        files=kept_files(root),
        names=lambda path: (path, path.parent, path.parents[1]),  # the file or its checkpoint
        group=lambda path: str(path.relative_to(root)),
        faults_a_file=faults_a_file,
        inject=inject,
    )
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
