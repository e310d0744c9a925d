"""Samples of sentence data (BERT, T5, ICT): whole sentences of one document, shuffled.

Rows and their order are the same as in megatron-core's `build_mapping` and `build_blocks_mapping`.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokamake import _csrc
from tokamake.errors import UserError

SampleMapping = npt.NDArray[np.uint32] | npt.NDArray[np.uint64]


class Sentences(NamedTuple):
    """Sentences of an indexed dataset."""

    documents: npt.NDArray[np.int64]
    """(documents + 1,) bounds: document d has sentences `documents[d]` to `documents[d + 1]`."""
    lengths: npt.NDArray[np.int32]
    """(sentences,) tokens of each; may be unaligned, is not copied."""


class SentenceIndex(NamedTuple):
    """Samples of a dataset in the order in which they are drawn."""

    mapping: SampleMapping
    """(samples, 3) first sentence, end of sentences, target tokens."""

    @property
    def num_samples(self) -> int:
        return len(self.mapping)


MAX_SEED = 2**31 - 2
_UNLIMITED = 2**63 - 1


def sentence_mapping(
    sentences: Sentences,
    *,
    max_seq_length: int,
    seed: int,
    num_epochs: int = 1,
    max_num_samples: int | None = None,
    short_seq_prob: float = 0.1,
    min_num_sent: int = 1,
) -> SampleMapping:
    """Cut documents into samples of whole sentences, for BERT and T5.

    A sample ends with the sentence that reaches its target length, unless only one sentence would
    remain. Documents with a sentence of more than 512 tokens are left out. Returns (samples, 3)
    first sentence, end of sentences and target tokens; uint64 if uint32 cannot count the sentences.

    Args:
        max_seq_length: target tokens of a sample, 2 or more: the model's length minus 3 for BERT,
            minus 2 for T5.
        seed: seed of the targets and of the order, 1 to 2**31 - 2.
        max_num_samples: start no further epoch at this number of samples; None: unlimited.
        short_seq_prob: share of samples with a shorter target, 0 to 1.
        min_num_sent: minimum sentences of a sample: 2 if it is divided in two.
    """
    _check_sentences(sentences)
    _check_numbers(max_seq_length, seed, num_epochs=num_epochs, max_num_samples=max_num_samples)
    check_range("min_num_sent", min_num_sent, lowest=1, highest=2**31 - 1)
    # Megatron rounds 1 / short_seq_prob to an int32.
    if not (short_seq_prob == 0 or 1e-9 <= short_seq_prob <= 1):
        raise UserError(f"short_seq_prob: {short_seq_prob}: out of range; give 0, or 1e-9 to 1")
    try:
        return _csrc.build_mapping(
            *sentences,
            num_epochs=num_epochs,
            max_num_samples=_UNLIMITED if max_num_samples is None else max_num_samples,
            max_seq_length=max_seq_length,
            short_seq_prob=short_seq_prob,
            seed=seed,
            min_num_sent=min_num_sent,
        )
    except (ValueError, IndexError) as error:
        raise UserError(f"documents: {error}; write the dataset's .idx file again") from error


def block_mapping(
    sentences: Sentences,
    title_lengths: npt.NDArray[np.int32],
    *,
    max_seq_length: int,
    seed: int,
    num_epochs: int = 1,
    max_num_samples: int | None = None,
    use_one_sent_blocks: bool = False,
) -> SampleMapping:
    """Cut documents into blocks of whole sentences, for the inverse cloze task (ICT).

    A block ends with the sentence that reaches, together with the title, its target length (the
    model's length minus 3), if enough sentences remain for another block. Returns (blocks, 4) first
    sentence, end of sentences, document, and number of the block in its epoch.

    Args:
        title_lengths: (documents,) tokens of each document's title.
        use_one_sent_blocks: allow blocks of one sentence; otherwise a block has at least two.
    """
    _check_sentences(sentences)
    _check_array("title_lengths", title_lengths, dtype=np.int32)
    _check_numbers(max_seq_length, seed, num_epochs=num_epochs, max_num_samples=max_num_samples)
    if len(title_lengths) != len(sentences.documents) - 1:
        raise UserError(
            f"title_lengths: {len(title_lengths)} titles for {len(sentences.documents) - 1} "
            "documents; give one for each"
        )
    try:
        return _csrc.build_blocks_mapping(
            *sentences,
            title_lengths,
            num_epochs=num_epochs,
            max_num_samples=_UNLIMITED if max_num_samples is None else max_num_samples,
            max_seq_length=max_seq_length,
            seed=seed,
            use_one_sent_blocks=use_one_sent_blocks,
        )
    except (ValueError, IndexError) as error:
        raise UserError(f"documents: {error}; write the dataset's .idx file again") from error


def _check_sentences(sentences: Sentences) -> None:
    _check_array("documents", sentences.documents, dtype=np.int64)
    _check_array("lengths", sentences.lengths, dtype=np.int32)
    if not len(sentences.documents):
        raise UserError("documents: empty; give one bound more than there are documents")


def _check_array(
    name: str, array: npt.NDArray[np.integer], *, dtype: type[np.int32] | type[np.int64]
) -> None:
    if array.ndim != 1 or array.dtype != dtype or not array.flags.c_contiguous:
        shape = f"{array.ndim} dimensions of {array.dtype}"
        raise UserError(f"{name}: {shape}; give one contiguous dimension of {dtype.__name__}")


def _check_numbers(
    max_seq_length: int, seed: int, *, num_epochs: int, max_num_samples: int | None
) -> None:
    check_range("max_seq_length", max_seq_length, lowest=2, highest=2**31 - 1)
    # Megatron adds 1 to the seed for the order.
    check_range("seed", seed, lowest=1, highest=MAX_SEED)
    check_range("num_epochs", num_epochs, lowest=1, highest=2**31 - 1)
    if max_num_samples is not None:
        check_range("max_num_samples", max_num_samples, lowest=1, highest=_UNLIMITED)


def check_range(name: str, value: int, *, lowest: int, highest: int) -> None:
    if not lowest <= value <= highest:
        raise UserError(f"{name}: {value}: out of range; give {lowest} to {highest}")
