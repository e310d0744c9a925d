"""A micro batch on its way to the device: what goes in, what shall come out, what is kept apart.

TokenRows come from the loader; of a sequence that ranks share, each takes its part.
Shape suffixes: B samples of a micro batch, L tokens.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tokamake.config.resolved_run import Run
from tokamake.config.training import PACKING_SETTINGS
from tokamake.data.samples.packing import packed
from tokamake.parallel.context import share
from tokamake.parallel.loss import NO_LABEL
from tokamake.parallel.mesh import ALONE, Mesh

TokenRows = npt.NDArray[np.int64]
"""(B, L + 1) tokens."""


class MicroBatch(NamedTuple):
    """A micro batch, or several, of this rank's tokens."""

    inputs: Tensor
    """(B, L) tokens."""
    labels: Tensor
    """(B, L) tokens that shall come out, `NO_LABEL` where there is no loss."""
    apart: dict[str, Tensor]
    """What keeps documents apart, as `Model.forward` takes it."""


def to_batch(rows: TokenRows, run: Run, device: torch.device, mesh: Mesh = ALONE) -> MicroBatch:
    """Part rows of tokens into inputs and labels, on the device.

    Args:
        rows: from the loader; a token below 0 is none.
        run: says what is kept apart.
        device: where the model is.
        mesh: this rank among its peers.
    """
    apart = keep_apart(rows, run)
    labels = np.where(rows[:, 1:] < 0, NO_LABEL, rows[:, 1:])
    if (mask := apart.pop("loss_mask", None)) is not None:
        labels = np.where(mask, labels, NO_LABEL)
    arrays = {"inputs": np.maximum(rows[:, :-1], 0), "labels": labels, **apart}
    tensors = {
        name: share(to_device(array, device), axis=mesh.context) for name, array in arrays.items()
    }
    return MicroBatch(tensors.pop("inputs"), tensors.pop("labels"), tensors)


def chances(rows: Sequence[TokenRows], *, seed: int, step: int, mesh: Mesh = ALONE) -> list[Tensor]:
    """Numbers in [0, 1) to draw a label of each of this rank's tokens by, (B, L) fp32 each.

    They belong to the tokens of a global batch, however ranks share these.

    Args:
        rows: this rank's micro batches of a step.
        seed: of the run.
        step: which one it is.
        mesh: this rank among its peers.
    """
    samples, width = rows[0].shape
    shape = (len(rows), mesh.data.size, samples, width - 1)
    every = np.random.default_rng((seed, step)).random(shape, dtype=np.float32)
    own = torch.from_numpy(every[:, mesh.data.rank])
    return [*share(own, axis=mesh.context, dim=2)]


def concatenated(batches: list[MicroBatch]) -> MicroBatch:
    """TokenRows of several micro batches, one after the other."""
    first = batches[0]
    apart = {name: torch.cat([batch.apart[name] for batch in batches]) for name in first.apart}
    inputs = torch.cat([batch.inputs for batch in batches])
    return MicroBatch(inputs, torch.cat([batch.labels for batch in batches]), apart)


def leaves_out(run: Run) -> bool:
    """Whether some tokens of training samples may have no loss."""
    return run.train.fim.rate > 0 or any(getattr(run.train, name) for name in PACKING_SETTINGS)


def keep_apart(rows: TokenRows, run: Run) -> dict[str, npt.NDArray[Any]]:
    """What the run's settings say about documents that share a row, as `Model.loss` takes it."""
    options = {name: getattr(run.train, name) for name in PACKING_SETTINGS}
    if not any(options.values()):
        return {}
    assert run.eod is not None, "resolve has looked it up"
    made = packed(rows, eod=run.eod, **options)
    found: dict[str, npt.NDArray[Any]] = {"loss_mask": made.loss_mask}
    if run.train.reset_position_ids:
        found["position_ids"] = made.position_ids
    if run.train.reset_attention_mask:
        found["document_ids"] = made.document_ids
    return found


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Bring a batch to the device; an accelerator reads it from pinned memory, with no one waiting.

    torch keeps pinned memory and gives it out again once the device has read it.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)
