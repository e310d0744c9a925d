"""The next token is the label of each token.

Documents that share a row can be kept apart: train.reset_attention_mask and the like.
Shapes: B rows of a micro batch, L tokens of a row.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokamake.config.training import PACKING_SETTINGS
from tokamake.data.samples.loader import PAD
from tokamake.parallel.loss import NO_LABEL
from tokamake.train.batch import HostBatch
from tokamake.train.objectives._base import ObjectiveBase

TokenRows = npt.NDArray[np.int64]
"""(B, L + 1) tokens; one below 0 fills up a row and is no token."""


class Objective(ObjectiveBase):
    """Rows are (B, L + 1) tokens."""

    @property
    def counts_labels(self) -> bool:
        """Whether some tokens may have no loss."""
        train = self.run.train
        return train.fim.rate > 0 or any(getattr(train, name) for name in PACKING_SETTINGS)

    def collate(self, rows: TokenRows) -> HostBatch:
        """Split rows into inputs and labels."""
        loss_mask, arrays = self._documents(rows)
        if self.run.architecture.has_routers:
            arrays["is_token"] = rows[:, :-1] >= 0
        inputs, labels = inputs_and_labels(rows, loss_mask)
        if number := self.run.architecture.num_mtp_layers:
            further = further_tokens(
                rows, labels, number=number, document_ids=arrays.get("document_ids")
            )
            arrays["further_tokens"], arrays["further_labels"] = further
        return HostBatch(inputs, labels, arrays)

    def label_shape(self, rows: TokenRows) -> tuple[int, int]:
        """Samples, and tokens of each without the last one, which is a label alone."""
        num_samples, width = rows.shape
        return num_samples, width - 1

    def random_rows(self, generator: np.random.Generator) -> TokenRows:
        """Random tokens."""
        train = self.run.train
        shape = (train.micro_batch_size, train.sequence_length + 1)
        return generator.integers(self._vocab_size, size=shape)

    def _documents(
        self, rows: TokenRows
    ) -> tuple[npt.NDArray[np.bool_] | None, dict[str, npt.NDArray[Any]]]:
        """Loss mask, and inputs of the model, that keep the documents of a row apart."""
        train, eod = self.run.train, self.run.eod
        options = {name: getattr(train, name) for name in PACKING_SETTINGS}
        if not any(options.values()):
            return None, {}
        assert eod is not None, "resolve looks it up for these settings"
        samples = packed(rows, eod=eod, **options)
        arrays: dict[str, npt.NDArray[Any]] = {}
        if train.reset_position_ids:
            arrays["position_ids"] = samples.position_ids
        if train.reset_attention_mask:
            arrays["document_ids"] = samples.document_ids
        return samples.loss_mask, arrays


class DocumentMasks(NamedTuple):
    """Model inputs that keep the documents of a row apart."""

    loss_mask: npt.NDArray[np.bool_]
    """(B, L) true where the loss counts."""
    position_ids: npt.NDArray[np.int64]
    """(B, L) position of each token in its row or in its document."""
    document_ids: npt.NDArray[np.int32]
    """(B, L) number of the document within the row; a token attends only to its own document."""


def packed(
    rows: npt.NDArray[np.int64],
    *,
    eod: int,
    reset_position_ids: bool = False,
    reset_attention_mask: bool = False,
    eod_mask_loss: bool = False,
) -> DocumentMasks:
    """Return the loss mask, positions and document numbers, separating documents if requested.

    The rules are from Megatron's get_ltor_masks_and_position_ids: a document begins after an
    end-of-document token. `rows` (B, L + 1) are tokens; a label `PAD` has no loss. `eod_mask_loss`:
    no loss where the input is `eod`, since the next document is unpredictable.
    """
    tokens = rows[:, :-1]
    ends = tokens == eod
    begins = np.zeros(tokens.shape, bool)
    begins[:, 1:] = ends[:, :-1]
    position_ids = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    if reset_position_ids:
        first = np.where(begins, position_ids, 0)
        position_ids = position_ids - np.maximum.accumulate(first, axis=1)
    document_ids = np.zeros(tokens.shape, np.int32)
    if reset_attention_mask:
        document_ids = begins.cumsum(axis=1, dtype=np.int32)
    loss_mask = ~ends if eod_mask_loss else np.ones(tokens.shape, bool)
    padding = rows == PAD
    if padding.any():
        loss_mask = loss_mask & ~padding[:, 1:]
    return DocumentMasks(loss_mask, position_ids, document_ids)


def inputs_and_labels(
    rows: TokenRows, loss_mask: npt.NDArray[np.bool_] | None = None
) -> tuple[TokenRows, TokenRows]:
    """Split rows into inputs and labels: the label of a token is the next token.

    Args:
        rows: (B, L + 1) tokens.
        loss_mask: (B, L) which inputs have a loss; None: all.

    Returns:
        (B, L) inputs, 0 where a row is filled up; (B, L) labels, `NO_LABEL` where there is no loss.
    """
    labels = np.where(rows[:, 1:] < 0, NO_LABEL, rows[:, 1:])
    if loss_mask is not None:
        labels = np.where(loss_mask, labels, NO_LABEL)
    return np.maximum(rows[:, :-1], 0), labels


def further_tokens(
    rows: TokenRows,
    labels: TokenRows,
    *,
    number: int,
    document_ids: npt.NDArray[np.int32] | None = None,
) -> tuple[TokenRows, TokenRows]:
    """Inputs and labels of layers that predict further tokens (MTP).

    Layer k, from 1 on, sees token i + k at place i, and its label is token i + k + 1, if the loss
    also counts each token between: so no label is beyond the end of a row or of a document.

    Args:
        rows: (B, L + 1) tokens.
        labels: (B, L) labels of the next token.
        number: K, layers that predict further tokens.
        document_ids: (B, L) number of each token's document; None: the documents of a row are not
            kept apart, unless `labels` does so.

    Returns:
        (B, L, K) tokens, 0 beyond the end of a row; (B, L, K) labels, or `NO_LABEL`.
    """
    shape = (*labels.shape, number)
    tokens, further = np.zeros(shape, np.int64), np.full(shape, NO_LABEL)
    has_label = labels != NO_LABEL
    for k in range(1, number + 1):
        seen = rows[:, k : k + labels.shape[1]]
        tokens[:, : seen.shape[1], k - 1] = np.maximum(seen, 0)
        known = np.full(labels.shape, NO_LABEL)
        known[:, :-k] = labels[:, k:]
        has_label &= known != NO_LABEL
        if document_ids is not None:
            has_label[:, :-k] &= document_ids[:, k:] == document_ids[:, :-k]
        further[..., k - 1] = np.where(has_label, known, NO_LABEL)
    return tokens, further
