"""An objective is a folder: a run learns a new one, and no other file knows of it."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.model_loss import mean_loss
from tests.support.random_tensors import random_tensors
from tests.support.runs import ARCHITECTURE, losses, make_index, make_run, prepare, train_here
from tokamake import plugins
from tokamake.checkpoint.model_tensors import to_model
from tokamake.config.resolved_run import read_run
from tokamake.data.samples.index_folder import read_index
from tokamake.data.samples.loader import open_samples
from tokamake.errors import UserError
from tokamake.preflight.data import check_index
from tokamake.train import objectives

DATA = """
from tokamake.train.objectives.causal import data


class Data(data.Data):
    def sample_settings(self, train):
        return {"name": "answers", "answer_tokens": train.sequence_length // 2}
"""
OBJECTIVE = '''
import torch

from tokamake.parallel.loss import NO_LABEL
from tokamake.train.objectives.causal import objective


class Objective(objective.Objective):
    """The first half of a sample asks, the second half answers: only answers have a loss."""

    metrics = ("token_accuracy", "confidence")
    counts_labels = True

    def collate(self, rows):
        batch = super().collate(rows)
        labels = batch.labels.copy()
        labels[:, : labels.shape[1] // 2] = NO_LABEL
        return batch._replace(labels=labels)

    def measure(self, predicted, labels):
        has_label = labels.tokens != NO_LABEL
        number = has_label.sum().float()
        highest = predicted.logits.float().softmax(-1).amax(-1)[has_label].sum()
        right = self.num_right(predicted, labels.tokens)
        return torch.stack((right, number, highest, number)).view(2, 2)
'''


@pytest.fixture
def _answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new folder beside the objectives of tokamake."""
    library, root = plugins._ROOT, tmp_path / "library"
    for folder, without in ((library, "train"), (library / "train", "objectives")):
        there = root / folder.relative_to(library)
        there.mkdir()
        for path in folder.iterdir():
            if path.name != without:
                (there / path.name).symlink_to(path)
    own, known = root / "train/objectives", library / "train/objectives"
    own.mkdir()
    for path in known.iterdir():
        (own / path.name).symlink_to(path)
    (own / "answers").mkdir()
    (own / "answers/data.py").write_text(DATA)
    (own / "answers/objective.py").write_text(OBJECTIVE)
    monkeypatch.setattr(objectives, "__path__", [str(own), str(known)])
    monkeypatch.setattr(plugins, "_ROOT", root)


@pytest.mark.usefixtures("_answers", "lone_rank")
@pytest.mark.parametrize("backend", ["native", "deepspeed"])
def test_a_run_learns_a_new_objective(tmp_path: Path, backend: str) -> None:
    root = prepare(tmp_path)
    options = {"sequence_length": 16, "split": "80,20,0", "seed": 3, "valid_samples": 16}
    make_index(root, **options, train_samples=80, objective="answers")
    stated = json.loads((root / "index/index.json").read_text())["objective"]
    assert stated == {"name": "answers", "answer_tokens": 8}

    settings = {"objective": "answers", "train_steps": 2, "evaluation_interval": 2}
    config = make_run(root, "run", backend=backend, zero_stage=1, **settings)
    assert train_here(config) == 0
    run = read_run(config)
    samples = open_samples(run.index, split="train", data_root=root)
    rows = torch.from_numpy(np.stack([samples[sample] for sample in range(8)]))
    mask = torch.arange(16).expand(8, 16) >= 8
    start = to_model(ARCHITECTURE, random_tensors(ARCHITECTURE, 5)).float()
    assert losses(config)[0] == pytest.approx(mean_loss(start, rows, mask).item(), rel=1e-5)
    assert len(losses(config)) == 2
    assert all(0 <= share <= 1 for share in losses(config, "validation_token_accuracy"))
    assert len(losses(config, "validation_confidence")) == 2

    causal = read_run(config).model_copy(
        update={"train": run.train.model_copy(update={"objective": "causal"})}
    )
    with pytest.raises(UserError, match=r"has samples of objective answers, .* is causal"):
        check_index(causal, read_index(run.index))


def test_an_unknown_objective_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"objective: 'answers': unknown name; choose one of caus"):
        make_run(tmp_path, "run", objective="answers")
