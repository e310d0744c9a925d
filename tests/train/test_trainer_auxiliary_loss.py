"""A family whose forward pass returns an auxiliary loss, as mixtures of experts do."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.layouts import laid_out, parallel
from tests.support.model_loss import mean_loss
from tests.support.runs import make_run, prepare
from tokamake import plugins
from tokamake.config.resolved_run import Run, read_run
from tokamake.errors import UserError
from tokamake.models.llama import model as llama
from tokamake.parallel.loss import NO_LABEL
from tokamake.parallel.mesh import SINGLE_RANK
from tokamake.preflight.run import check_run
from tokamake.train.numerics import with_precision
from tokamake.train.pipeline_stages import LossFactors, PipelineStages

CPU = torch.device("cpu")


class Model(llama.Model):
    """A Llama that keeps its embeddings small."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return logits, and while training the mean square of the embeddings."""
        logits = super().forward(x, *args, **kwargs)
        return (logits, self.embed_tokens(x).square().mean()) if self.training else logits


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    load = plugins.load

    def load_stub(kind: str, name: str) -> Any:
        return SimpleNamespace(Model=Model) if kind == "models/*/model" else load(kind, name)

    monkeypatch.setattr(plugins, "load", load_stub)
    constant = plugins.constant

    def constant_stub(kind: str, name: str, key: str, **options: Any) -> Any:
        return key == "HAS_AUXILIARY_LOSS" or constant(kind, name, key, **options)

    monkeypatch.setattr(plugins, "constant", constant_stub)
    return with_precision(read_run(make_run(prepare(tmp_path), "auxiliary")), CPU)


def stages_with_weights(run: Run) -> PipelineStages:
    stages = PipelineStages(run, SINGLE_RANK, device=CPU)
    for parameter in stages.modules[0].parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(1))
    return stages


def test_the_trainer_adds_an_auxiliary_loss_to_the_mean_cross_entropy(run: Run) -> None:
    stages = stages_with_weights(run)
    model, size = stages.modules[0], run.train.sequence_length + 1
    rows = np.random.default_rng(1).integers(run.architecture.vocab_size or 0, size=(2, size))
    rows[1, -5:] = -1  # no tokens, hence no labels
    batch = stages.objective.to_batch(rows)
    num_labels = int((batch.labels != NO_LABEL).sum())
    stages.forward_backward([batch], LossFactors(1 / num_labels))
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    cross_entropy = mean_loss(model, torch.from_numpy(rows))
    (cross_entropy + model(batch.inputs)[1]).backward()
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)
    assert stages.losses([batch]).item() / num_labels == pytest.approx(cross_entropy.item())


def test_a_pipeline_refuses_auxiliary_losses(run: Run) -> None:
    with pytest.raises(UserError, match=r"pipeline_parallel_size: 2: .* auxiliary losses of llama"):
        check_run(laid_out(run, parallel(pp=2)), index=None, world_size=2, device=CPU)
