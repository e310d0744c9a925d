"""Micro batches: rows of tokens become inputs and labels on the device.

Rows come from the loader. Where ranks share a sequence, each takes its part of it.
Shapes: B rows of a micro batch, each a sample unless samples share rows; L tokens of a row.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tokamake.config.resolved_run import Run
from tokamake.config.training import PACKING_SETTINGS, TrainSettings
from tokamake.data.samples.document_masks import packed
from tokamake.data.samples.loader import Rows, StepBatch, steps
from tokamake.parallel.context import share
from tokamake.parallel.loss import NO_LABEL
from tokamake.parallel.mesh import SINGLE_RANK, Mesh
from tokamake.train.masked_rows import MaskedRows, inputs_of_encoder, masked_rows
from tokamake.train.packing import EncoderInputs
from tokamake.train.span_rows import SpanRows, span_rows
from tokamake.train.task_rows import TaskRows

TokenRows = npt.NDArray[np.int64]
"""(B, L + 1) tokens; one below 0 fills up a row and is no token."""

SampleRows = npt.NDArray[Any] | MaskedRows | SpanRows | TaskRows
"""A micro batch as the loader makes it: rows of tokens, or samples of an encoder, also as the
records that `masked_rows` and `span_rows` take; or labeled rows of a task."""


class StepSamples(NamedTuple):
    """This rank's samples of a step."""

    numbers: npt.NDArray[np.int64]
    """(micro batches, B) number of each sample in the run."""
    corpora: npt.NDArray[np.int64] | None = None
    """(micro batches, B) number of the corpus of each sample; None: their losses are not measured.
    """
    num_corpora: int = 0


class MicroBatch(NamedTuple):
    """A micro batch, or several, of this rank's tokens."""

    inputs: Tensor
    """(B, L) tokens."""
    labels: Tensor
    """(B, L) tokens to predict, `NO_LABEL` where there is no loss; with label_places, (N,)."""
    further_inputs: dict[str, Tensor]
    """Keyword arguments of `Model.forward`: (B, L) position_ids and document_ids, which keep
    documents or samples apart; (B, L) token_types; (B, M) decoder_tokens, and their
    decoder_document_ids; (N,) label_places of the tokens with a label, among all tokens that could
    have one; (samples,) sample_places of first tokens, if samples share rows; (samples,)
    sample_numbers, from which masks of dropout follow."""
    sample_labels: Tensor | None = None
    """(samples,) int64 class of each sample, of masked samples; labels of `TaskRows`."""
    num_sample_labels: int | None = None
    """Samples of the whole step, on all ranks, that have a label; None: all of them."""
    label_numbers: Tensor | None = None
    """(N,) number of each label among those of all tokens, sample by sample, as `label_draws` has
    them; None: there are labels of all tokens."""


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


def to_batch(
    rows: SampleRows,
    run: Run,
    *,
    device: torch.device,
    mesh: Mesh = SINGLE_RANK,
    sample_numbers: npt.NDArray[np.int64] | None = None,
) -> MicroBatch:
    """Split rows into inputs and labels and bring this rank's part of them to the device.

    Args:
        rows: (B, L + 1) tokens, samples of an encoder, or labeled rows.
        sample_numbers: (B,) number of each sample in the run; None: nothing is dropped.
    """
    rows, sample_labels, num_sample_labels = with_fields(rows), None, None
    label_numbers = None
    if isinstance(rows, TaskRows):
        inputs, arrays = rows.tokens, inputs_of_encoder(rows.types, rows.padding_mask)
        labels = np.full((len(inputs), 1), NO_LABEL)
        sample_labels, num_sample_labels = to_device(rows.labels, device), rows.num_labels
    elif isinstance(rows, MaskedRows | SpanRows):
        inputs, arrays, labeled = _encoder_inputs(rows, run, mesh=mesh)
        # Losses of corpora need those of each row; a pipeline needs equal shapes.
        if run.train.log_corpus_losses or mesh.pipeline.size > 1:
            labels = labeled.rows(rows.labels, padding=NO_LABEL)
        else:
            label_numbers = np.flatnonzero(rows.labels != NO_LABEL)
            labels = rows.labels.flatten()[label_numbers]
            arrays["label_places"] = labeled.places_of(label_numbers, rows.labels.shape[1])
        if isinstance(rows, MaskedRows):
            sample_labels = to_device(rows.is_random, device)
    else:
        loss_mask, arrays = _documents(rows, run)
        inputs, labels = inputs_and_labels(rows, loss_mask)

    def rank_tensor(array: npt.NDArray[Any]) -> Tensor:
        return share(to_device(array, device), axis=mesh.context)

    further = {name: rank_tensor(array) for name, array in arrays.items()}
    if sample_numbers is not None and any(run.train.dropout.rates):
        further["sample_numbers"] = to_device(sample_numbers, device)
    return MicroBatch(
        rank_tensor(inputs),
        rank_tensor(labels),
        further,
        sample_labels,
        num_sample_labels,
        None if label_numbers is None else to_device(label_numbers, device),
    )


def with_fields(rows: SampleRows) -> TokenRows | MaskedRows | SpanRows | TaskRows:
    """Samples of an encoder by their fields; other rows as they are."""
    if isinstance(rows, np.ndarray) and rows.dtype.names:
        return span_rows(rows) if "decoder_tokens" in rows.dtype.names else masked_rows(rows)
    return rows


def label_shape(rows: SampleRows) -> tuple[int, int]:
    """Samples of a micro batch, and labels of each."""
    rows = with_fields(rows)
    if isinstance(rows, TaskRows):
        return len(rows.tokens), 1
    if isinstance(rows, MaskedRows | SpanRows):
        num_samples, length = rows.labels.shape
        return num_samples, length
    num_samples, width = rows.shape  # the last token is a label alone
    return num_samples, width - 1


def _encoder_inputs(rows: MaskedRows | SpanRows, run: Run, *, mesh: Mesh) -> EncoderInputs:
    """Inputs of an encoder; with the setting for it, samples share rows."""
    is_packed = run.train.pack_samples
    if isinstance(rows, MaskedRows):
        return rows.packed_inputs() if is_packed else rows.inputs()
    # Sequence parallelism divides the tokens of the decoder, too.
    multiple = mesh.tensor.size if mesh.sequence_parallel else 1
    return rows.packed_inputs(multiple) if is_packed else rows.inputs(multiple)


def _documents(
    rows: TokenRows, run: Run
) -> tuple[npt.NDArray[np.bool_] | None, dict[str, npt.NDArray[Any]]]:
    """Loss mask, and inputs of the model, that keep the documents of a row apart."""
    options = {name: getattr(run.train, name) for name in PACKING_SETTINGS}
    if not any(options.values()):
        return None, {}
    assert run.eod is not None, "resolve looks it up for these settings"
    samples = packed(rows, eod=run.eod, **options)
    arrays: dict[str, npt.NDArray[Any]] = {}
    if run.train.reset_position_ids:
        arrays["position_ids"] = samples.position_ids
    if run.train.reset_attention_mask:
        arrays["document_ids"] = samples.document_ids
    return samples.loss_mask, arrays


def to_device(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Bring an array to the device; an accelerator copies it while the host continues.

    That needs pinned memory. torch does not reuse pinned memory before the copy has ended.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def concatenated(batches: list[MicroBatch]) -> MicroBatch:
    """Join micro batches along their samples."""
    names = {name for batch in batches for name in batch.further_inputs}
    inputs = [_with_documents(batch) if "document_ids" in names else batch for batch in batches]
    further = [batch.further_inputs for batch in inputs]
    classes = [each.sample_labels for each in batches if each.sample_labels is not None]
    return MicroBatch(
        torch.cat([batch.inputs for batch in batches]),
        torch.cat([batch.labels for batch in batches]),
        {name: torch.cat([each[name] for each in further]) for name in sorted(names)},
        torch.cat(classes) if classes else None,
    )


def _with_documents(batch: MicroBatch) -> MicroBatch:
    """A micro batch with document_ids, also where no sample of an encoder has padding."""
    further = {"document_ids": torch.zeros_like(batch.inputs), **batch.further_inputs}
    return batch._replace(further_inputs=further)


def steps_of_rank(
    samples: Rows,
    train: TrainSettings,
    *,
    mesh: Mesh,
    consumed_samples: int,
    left_out: Sequence[tuple[int, int]] = (),
) -> Iterator[StepBatch]:
    """This rank's share of the remaining training steps, without the ranges `left_out`."""
    return steps(
        samples,
        train.batch_sizes,
        consumed_samples=consumed_samples,
        micro_batch_size=train.micro_batch_size,
        data_parallel_rank=mesh.data.rank,
        data_parallel_size=mesh.data.size,
        left_out=left_out,
    )


def num_micro_batches(train: TrainSettings, mesh: Mesh) -> int:
    """Micro batches of each rank in a global batch of full size."""
    return train.global_batch_size // (train.micro_batch_size * mesh.data.size)


def has_masked_labels(train: TrainSettings) -> bool:
    """Whether some tokens of training samples may have no loss."""
    has_gaps = train.fim.rate > 0 or any(getattr(train, name) for name in PACKING_SETTINGS)
    return has_gaps or train.objective != "causal"
