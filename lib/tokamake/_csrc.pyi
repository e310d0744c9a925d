"""Types of the C++ extension (lib/csrc); `tokamake.data.samples` and `blend` are its callers."""

import numpy as np
import numpy.typing as npt

def build_sample_index(
    lengths: npt.NDArray[np.int32],
    document_index: npt.NDArray[np.int32],
    sequence_length: int,
    num_epochs: int,
    tokens_per_epoch: int,
    *,
    wide: bool = False,
) -> npt.NDArray[np.int32] | npt.NDArray[np.int64]:
    """Where each sample begins, as Megatron's `build_sample_idx` has it.

    Args:
        lengths: (documents,) tokens of each document; contiguous, need not be aligned.
        document_index: (epochs × documents,) order in which documents are read.
        sequence_length: tokens between the starts of neighbouring samples.
        num_epochs: epochs in `document_index`.
        tokens_per_epoch: tokens of one epoch.
        wide: answer in int64 even where int32 holds every position.

    Returns:
        (samples + 1, 2): position in `document_index` and offset in that document, of the first
        token of each sample and of the last sample's last label; int32 unless `document_index`
        has 2**31 entries or more.

    Raises:
        TypeError: an array is not contiguous or of another type.
        ValueError: a number is out of range, or the documents hold fewer tokens than promised.
        IndexError: `document_index` names a document that has no length.
    """

def build_blend_index(
    weights: npt.NDArray[np.float64], size: int
) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]:
    """Order in which datasets are drawn from, as Megatron's `build_blending_indices` has it.

    Args:
        weights: (datasets,) shares that add up to 1; used as they are.
        size: samples of the blend.

    Returns:
        (size,) int16 number of the dataset and (size,) int64 number of the sample in it.

    Raises:
        TypeError: `weights` is not contiguous or of another type.
        ValueError: `size` is negative, a weight is negative or not finite, or there are none or
            more than 32,767 weights.
    """
