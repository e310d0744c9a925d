"""Samples of sentence data (BERT, T5, ICT): runs of whole sentences of one document, shuffled.

Documents' bounds and sentence lengths come from `indexed`. Rows and their order equal those of
megatron-core's `build_mapping` and `build_blocks_mapping`.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tokamake import _csrc
from tokamake.errors import UserError

Rows = npt.NDArray[np.uint32] | npt.NDArray[np.uint64]


class Sentences(NamedTuple):
    """What is known of the sentences of a pair."""

    documents: npt.NDArray[np.int64]
    """(documents + 1,) bounds: document d has sentences `documents[d]` to `documents[d + 1]`."""
    lengths: npt.NDArray[np.int32]
    """(sentences,) tokens of each; need not be aligned, is not copied."""


_EVERY_EPOCH = 2**63 - 1
"""Samples that no epoch reaches."""


def sentence_mapping(
    sentences: Sentences,
    *,
    max_seq_length: int,
    seed: int,
    num_epochs: int = 1,
    max_num_samples: int | None = None,
    short_seq_prob: float = 0.1,
    min_num_sent: int = 1,
) -> Rows:
    """Cut documents into samples of whole sentences, for BERT and T5.

    A sample ends at the sentence with which it has as many tokens as it aims at, unless a single
    one would remain; documents with a sentence of more than 512 tokens are left out.

    Args:
        sentences: of one pair.
        max_seq_length: tokens that a sample aims at, 2 or more: what the model takes less 3 for
            BERT, less 2 for T5.
        seed: of the aims and of the order, 1 to 2**31 - 2.
        num_epochs: times that each document is cut.
        max_num_samples: no epoch begins when there are so many; none: all epochs.
        short_seq_prob: share of samples that aim at fewer tokens, 0 to 1.
        min_num_sent: sentences that a sample has at least: 2 where it must be cut in two.

    Returns:
        (samples, 3) first sentence, end of sentences and tokens aimed at; uint32, or uint64 if
        there are more sentences than uint32 counts.

    Raises:
        UserError: an array has another shape or type, or a number is out of range.
    """
    _check_sentences(sentences)
    _check_numbers(max_seq_length, seed, num_epochs, max_num_samples)
    _check("min_num_sent", min_num_sent, 1, 2**31 - 1)
    if not (short_seq_prob == 0 or 1e-9 <= short_seq_prob <= 1):
        raise UserError(f"short_seq_prob: {short_seq_prob}: out of range; give 0, or 1e-9 to 1")
    try:
        return _csrc.build_mapping(
            *sentences,
            num_epochs=num_epochs,
            max_num_samples=_EVERY_EPOCH if max_num_samples is None else max_num_samples,
            max_seq_length=max_seq_length,
            short_seq_prob=short_seq_prob,
            seed=seed,
            min_num_sent=min_num_sent,
        )
    except (ValueError, IndexError) as error:
        raise UserError(f"documents: {error}; make the pair's .idx file again") from error


def block_mapping(
    sentences: Sentences,
    title_lengths: npt.NDArray[np.int32],
    *,
    max_seq_length: int,
    seed: int,
    num_epochs: int = 1,
    max_num_samples: int | None = None,
    use_one_sent_blocks: bool = False,
) -> Rows:
    """Cut documents into blocks of whole sentences, for the inverse cloze task (ICT).

    A block ends at the sentence with which it and the title have as many tokens as it aims at, if
    enough sentences for another remain.

    Args:
        sentences: of one pair.
        title_lengths: (documents,) tokens of each document's title.
        max_seq_length: tokens that a block with its title aims at: what the model takes less 3.
        seed: of the order, 1 to 2**31 - 2.
        num_epochs: times that each document is cut.
        max_num_samples: no epoch begins when there are so many; none: all epochs.
        use_one_sent_blocks: a block may have one sentence; else it has two at least.

    Returns:
        (blocks, 4) first sentence, end of sentences, document, and the block's number in its
        epoch; dtype as of `sentence_mapping`.

    Raises:
        UserError: an array has another shape or type, or a number is out of range.
    """
    _check_sentences(sentences)
    _check_array("title_lengths", title_lengths, np.int32)
    _check_numbers(max_seq_length, seed, num_epochs, max_num_samples)
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
            max_num_samples=_EVERY_EPOCH if max_num_samples is None else max_num_samples,
            max_seq_length=max_seq_length,
            seed=seed,
            use_one_sent_blocks=use_one_sent_blocks,
        )
    except (ValueError, IndexError) as error:
        raise UserError(f"documents: {error}; make the pair's .idx file again") from error


def _check_sentences(sentences: Sentences) -> None:
    _check_array("documents", sentences.documents, np.int64)
    _check_array("lengths", sentences.lengths, np.int32)
    if not len(sentences.documents):
        raise UserError("documents: no bound; give one more than there are documents")


def _check_array(
    name: str, array: npt.NDArray[np.integer], dtype: type[np.int32] | type[np.int64]
) -> None:
    if array.ndim != 1 or array.dtype != dtype or not array.flags.c_contiguous:
        shape = f"{array.ndim} dimensions of {array.dtype}"
        raise UserError(f"{name}: {shape}; give one, contiguous, of {dtype.__name__}")


def _check_numbers(
    max_seq_length: int, seed: int, num_epochs: int, max_num_samples: int | None
) -> None:
    _check("max_seq_length", max_seq_length, 2, 2**31 - 1)
    _check("seed", seed, 1, 2**31 - 2)
    _check("num_epochs", num_epochs, 1, 2**31 - 1)
    if max_num_samples is not None:
        _check("max_num_samples", max_num_samples, 1, _EVERY_EPOCH)


def _check(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise UserError(f"{name}: {value}: out of range; give {least} to {most}")
