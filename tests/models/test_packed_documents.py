"""Separated documents of a sample: each is computed as transformers computes it alone."""

from itertools import islice
from pathlib import Path

import pytest
import torch
import yaml
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from tests.support.forked import train
from tests.support.llamas import ARCHITECTURES, label, reference, tensors_of
from tests.support.model_loss import mean_loss
from tests.support.runs import ARCHITECTURE, losses, make_run, prepare, read_weights
from tokamake.checkpoint.model_tensors import to_model
from tokamake.config.resolved_run import read_run
from tokamake.config.training import PACKING_SETTINGS
from tokamake.data.samples.document_samples import DocumentSamples
from tokamake.data.samples.steps import batches
from tokamake.errors import UserError

EOD = 7


def documents(row: torch.Tensor) -> list[range]:
    """Ranges of the documents in a row of inputs, each up to its EOD."""
    ends = [place + 1 for place, token in enumerate(row.tolist()) if token == EOD]
    bounds = [0, *(end for end in ends if end < len(row)), len(row)]
    return [range(*bounds[number : number + 2]) for number in range(len(bounds) - 1)]


def ids(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions within documents, and numbers of documents."""
    apart = [documents(row) for row in rows]
    positions = [[place - part.start for part in parts for place in part] for parts in apart]
    numbers = [[number for number, part in enumerate(parts) for _ in part] for parts in apart]
    return torch.tensor(positions), torch.tensor(numbers)


@pytest.mark.parametrize("architecture", ARCHITECTURES[::3], ids=label)
def test_separated_documents_equal_documents_alone(architecture) -> None:  # type: ignore[no-untyped-def]
    oracle = reference(architecture)
    model = to_model(architecture, tensors_of(oracle, architecture))
    rows = torch.randint(12, (4, 33), generator=torch.Generator().manual_seed(1))
    positions, numbers = ids(rows)
    assert numbers.max() > 2
    with torch.no_grad():
        separated = model(rows, position_ids=positions, document_ids=numbers)
        for row, logits in zip(rows, separated, strict=True):
            for part in documents(row):
                alone = oracle(row[None, part.start : part.stop]).logits[0]
                assert (logits[part.start : part.stop] - alone).abs().max() <= 1e-5
        # Rotary positions encode distances, which are the same inside a document.
        assert (model(rows, document_ids=numbers) - separated).abs().max() <= 1e-5
        for options in ({"position_ids": positions}, {}):
            assert (model(rows, **options) - separated).abs().max() > 1e-3
        moved = oracle(rows, position_ids=positions).logits
        assert (model(rows, position_ids=positions) - moved).abs().max() <= 1e-5


def test_tokens_without_loss_have_no_gradient() -> None:
    architecture = ARCHITECTURES[0]
    model = to_model(architecture, tensors_of(reference(architecture), architecture))
    rows = torch.tensor([[5, 9, EOD, 3, -1]])
    mask = torch.tensor([[True, True, False, True]])
    loss = mean_loss(model, rows, loss_mask=mask)
    logits = model(rows[:, :2])
    torch.testing.assert_close(loss, F.cross_entropy(logits[0], rows[0, 1:3]))
    none = mean_loss(model, rows, loss_mask=torch.zeros_like(mask))
    none.backward()
    assert none == 0
    assert all(not p.grad.any() for p in model.parameters() if p.grad is not None)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("packing"))


@pytest.mark.ranks
def test_a_run_separates_documents(root: Path) -> None:
    config = make_run(root, "apart", train_steps=2)
    described = yaml.safe_load(config.read_text())
    described["train"].update(dict.fromkeys(PACKING_SETTINGS, True))
    config.write_text(yaml.safe_dump({**described, "eod": EOD}))
    train(config)
    run = read_run(config)
    values = ARCHITECTURE.model_dump(exclude={"family", "rope_theta"})
    rope = {"rope_type": "default", "rope_theta": ARCHITECTURE.rope_theta}
    model = LlamaForCausalLM(LlamaConfig(**values, rope_parameters=rope)).eval()
    model.load_state_dict(read_weights(run.checkpoint)[1])
    layout = {"micro_batch_size": 2, "data_parallel_rank": 0, "data_parallel_size": 1}
    for name, key, number in (("valid", "validation_loss", 8), ("train", "loss", 4)):
        samples = DocumentSamples(run.index, split=name, data_root=run.data_root)
        micro_batches = batches(samples, consumed_samples=0, **layout)
        measured = [
            alone(model, torch.from_numpy(batch)) for batch in islice(micro_batches, number)
        ]
        # Every token has the same weight, however micro batches divide the samples.
        expected = float(torch.cat(measured).mean())
        assert losses(config, key)[0] == pytest.approx(expected, rel=1e-5)


@torch.no_grad()
def alone(model: LlamaForCausalLM, rows: torch.Tensor) -> torch.Tensor:
    """Losses of the tokens of a micro batch, with one forward pass per document."""
    losses = []
    for row in rows:
        for part in documents(row[:-1]):
            inputs, labels = row[part.start : part.stop], row[part.start + 1 : part.stop + 1]
            logits = model(inputs[None]).logits[0]
            losses.append(F.cross_entropy(logits, labels, reduction="none")[inputs != EOD])
    return torch.cat(losses)


@pytest.mark.parametrize("name", PACKING_SETTINGS)
def test_separation_requires_the_end_of_document_token(root: Path, name: str) -> None:
    with pytest.raises(UserError, match=rf"train\.{name}: needs the token that ends documents"):
        make_run(root, "endless", **{name: True})
