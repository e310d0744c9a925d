"""Runs whose data change: the change is named, and training continues from the same position."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.support.forked import train
from tests.support.interrupted_runs import CONTINUE, Settings, output, stopped
from tests.support.runs import hashes, losses, make_index, make_run, prepare, vouch
from tokamake.data.indexed.dataset import DatasetWriter
from tokamake.errors import UserError
from tokamake.train.trace.trace_sample import trace_sample
from tokamake.train.trace.trace_steps import trace_steps


def add_dataset(root: Path, name: str) -> None:
    generator = np.random.default_rng(7)
    lengths = generator.integers(5, 40, 200)
    tokens = np.repeat(generator.integers(0, 120, lengths.sum()), 3)[: lengths.sum()]
    with DatasetWriter(root / f"{name}.bin", root / f"{name}.idx", dtype=np.uint16) as writer:
        writer.add(tokens, lengths.astype(np.int32))
    vouch(root / name, vocab_size=120, tokenizer="a")


def rewrite_index(root: Path, lines: str, *, train_samples: int = 80) -> None:
    (root / "weights.txt").write_text(lines)
    shutil.rmtree(root / "index")
    options: Settings = {"sequence_length": 16, "split": "80,20,0", "seed": 3}
    make_index(root, **options, train_samples=train_samples, valid_samples=16)


BOTH = "0.5 corpus corpus\n0.5 more web\n"


def test_added_data_are_trained_on_from_the_same_position(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = prepare(tmp_path)
    config = stopped(root, "data")
    add_dataset(root, "more")
    rewrite_index(root, BOTH)
    make_run(root, "data")
    assert "corpus web: added more; 4 steps are trained" in train(config, code=2)
    start = output(config) / "global_step4"
    by_hand = make_run(root, "by-hand", start=start, finetune=False)
    train(by_hand)
    make_run(root, "data", **CONTINUE)
    train(config)
    assert hashes(config) == hashes(by_hand)
    assert losses(config)[4:] == losses(by_hand)
    trace_sample(output(config).parent, 5, 0)
    with pytest.raises(UserError, match=r"step 4: trained before the data changed, at step 4: its"):
        trace_sample(config, 4, 0)
    trace_steps(config, "more", 0)
    assert "steps up to 4 had other data, which the index does not know" in capsys.readouterr().out


def test_steps_before_a_change_of_the_length_are_traced_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = prepare(tmp_path)
    config = stopped(root, "longer")
    rewrite_index(root, "1.0 corpus corpus\n", train_samples=400)
    make_run(root, "longer", train_steps=7, **CONTINUE)
    train(config)
    capsys.readouterr()
    trace_sample(config, 4, 0)
    assert capsys.readouterr().out.startswith(
        "step 4: trained before the length of the run changed, at step 4: its samples may have "
        "been different\nstep 4, row 0: sample 24, of corpus corpus\n"
    )
    trace_steps(config, "corpus", 0)
    warning = "steps up to 4 may have had other samples: the run had another length"
    assert warning in capsys.readouterr().out
    trace_sample(config, 5, 0)
    assert capsys.readouterr().out.startswith("step 5, row 0: sample 32, of corpus")


DATA_CHANGES: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "removed": (
        BOTH,
        lambda root: rewrite_index(root, "1 more web\n"),
        "corpus corpus: removed corpus",
    ),
    "weights": (
        BOTH,
        lambda root: rewrite_index(root, BOTH.replace("0.5 more", "0.25 more")),
        "weights of the corpora",
    ),
}


@pytest.mark.parametrize("change", DATA_CHANGES)
def test_changes_of_data_are_named(tmp_path: Path, change: str) -> None:
    before, apply, expected = DATA_CHANGES[change]
    root = prepare(tmp_path)
    add_dataset(root, "more")
    rewrite_index(root, before)
    config = stopped(root, "data")
    apply(root)
    make_run(root, "data")
    message = train(config, code=2).splitlines()[-1]
    assert message.startswith(f"tokamake train: {expected}; 4 steps")


def test_changed_data_are_named_and_another_tokenizer_is_refused(tmp_path: Path) -> None:
    root = prepare(tmp_path)
    add_dataset(root, "more")
    rewrite_index(root, BOTH)
    config = stopped(root, "data")
    vouch(root / "corpus", vocab_size=120)
    with DatasetWriter(root / "more.bin", root / "more.idx", dtype=np.uint16) as writer:
        writer.add(np.arange(4000) % 120, np.full(200, 20, np.int32))
    vouch(root / "more", vocab_size=120, tokenizer="b")
    rewrite_index(root, BOTH)
    make_run(root, "data", **CONTINUE)
    message = train(config, code=2)
    assert "corpus web: changed more; 4 steps are trained" in message
    assert "the run cannot continue (the data have another tokenizer)" in message
