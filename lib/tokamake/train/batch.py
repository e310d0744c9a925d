"""Micro batches: inputs of the model and labels, in host memory and on the device.

An objective makes them of samples. Where ranks share a sequence, each takes its part of it.
Shapes: B rows of a micro batch, each a sample unless samples share rows; L tokens of a row.
"""

from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tokamake.parallel.document_mask import ON_HOST, keep_ids, kept_ids
from tokamake.runtime.device import copied_to

Array = TypeVar("Array")


class SampleIds(NamedTuple):
    """Which samples this rank trains on in a step."""

    numbers: npt.NDArray[np.int64]
    """(micro batches, B) number of each sample in the run."""
    corpora: npt.NDArray[np.int64] | None = None
    """(micro batches, B) number of the corpus of each sample; None: their losses are not measured.
    """
    num_corpora: int = 0


class Batch(NamedTuple, Generic[Array]):
    """A micro batch, or several: `HostBatch` of arrays, `MicroBatch` of this rank's tensors."""

    inputs: Array
    """(B, L) tokens."""
    labels: Array
    """(B, L) tokens to predict, `NO_LABEL` where there is no loss; with label_places, (N,)."""
    further_inputs: dict[str, Array]
    """Keyword arguments of `Model.forward`: (B, L) position_ids and document_ids, which keep
    documents or samples apart; (B, L) token_types; (B, M) decoder_tokens, and their
    decoder_document_ids; (B, L) block_tokens, and their block_document_ids; (N,) label_places, flat
    index in the (B, L) grid of each label; (samples,) sample_places of first tokens, if samples
    share rows; (samples,) sample_numbers, from which masks of dropout follow; (B, L) is_token, for
    families with routers: False where a row is filled up; (B, L, K) further_tokens and
    further_labels, for layers that predict further tokens."""
    sample_labels: Array | None = None
    """(samples,) labels of whole samples: classes such as the order of sentences, or numbers."""
    num_sample_labels: int | None = None
    """Samples of the whole step, on all ranks, that have a label; None: all of them."""
    label_numbers: Array | None = None
    """(N,) flat index of each label in the grid `ObjectiveBase.label_shape`; None: `labels` has the
    whole grid."""


HostBatch = Batch[npt.NDArray[Any]]
MicroBatch = Batch[Tensor]


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Bring an array to the device; see `copied_to`."""
    return copied_to(torch.from_numpy(np.ascontiguousarray(array)), device)


def concatenated(batches: list[MicroBatch]) -> MicroBatch:
    """Join micro batches along their samples.

    Ids of documents that are kept in host memory are further inputs: see `keep_host_ids`.
    """
    names = {name for batch in batches for name in batch.further_inputs}
    inputs = [_with_documents(batch) if "document_ids" in names else batch for batch in batches]
    further = [batch.further_inputs for batch in inputs]
    joined = {name: torch.cat([each[name] for each in further]) for name in sorted(names)}
    if "document_ids" in names:
        arrays = [kept_ids(each["document_ids"]) for each in further]
        kept = [array for array in arrays if array is not None]
        if len(kept) == len(batches):
            joined[f"{ON_HOST}document_ids"] = torch.from_numpy(np.concatenate(kept))
    classes = [each.sample_labels for each in batches if each.sample_labels is not None]
    return MicroBatch(
        torch.cat([batch.inputs for batch in batches]),
        torch.cat([batch.labels for batch in batches]),
        joined,
        torch.cat(classes) if classes else None,
    )


def _with_documents(batch: MicroBatch) -> MicroBatch:
    """A micro batch with document_ids, also where no sample of an encoder has padding."""
    if "document_ids" in batch.further_inputs:
        return batch
    ids = torch.zeros_like(batch.inputs)
    keep_ids(ids, np.zeros(ids.shape, np.int64))
    return batch._replace(further_inputs={"document_ids": ids, **batch.further_inputs})
