"""Types of the C++ extension (lib/csrc), which modules of `tokamake.data` call."""

from os import PathLike

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

def map_file(path: str | PathLike[str]) -> npt.NDArray[np.uint8]:
    """Map a file into memory, for reading: pages come from disk when they are looked at.

    Unlike `mmap` and `np.memmap` it keeps no file descriptor open, of which a process often has
    1,024. An empty file is an empty array.

    Raises:
        OSError: the file cannot be opened or mapped, or is a folder.
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

def build_exhaustive_blend_index(
    sizes: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]:
    """Order of all samples of all datasets, as Megatron's `build_exhaustive_blending_indices`.

    Args:
        sizes: (datasets,) samples of each.

    Returns:
        (samples,) int16 number of the dataset and (samples,) int64 number of the sample in it.

    Raises:
        TypeError: `sizes` is not contiguous or of another type.
        ValueError: a size is below 1, or there are none or more than 32,767.
    """

class Blender:
    """The order of `build_blend_index`, piece by piece. Not for several threads at once."""

    def __init__(self, weights: npt.NDArray[np.float64], *, widest: bool = True) -> None:
        """Begin an order by weights; it has no end.

        Args:
            weights: as of `build_blend_index`.
            widest: use the widest vectors that the processor has, else those that all have; only
                the speed differs.
        """

    @staticmethod
    def exhaustive(sizes: npt.NDArray[np.int64], *, widest: bool = True) -> Blender:
        """Begin the order of `build_exhaustive_blend_index`."""

    def draw(self, size: int) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]:
        """Take the next `size` samples.

        Raises:
            ValueError: `size` is negative, or there are not so many left.
        """

class ExactBlend:
    """A blend that is exact in integers; see `tokamake.data.samples.blend.ExactBlend`."""

    def __init__(self, counts: npt.NDArray[np.int64]) -> None:
        """Take (datasets,) the samples of each.

        Raises:
            TypeError: `counts` is not contiguous or of another type.
            ValueError: a count is negative, there are none, or they add up to more than 2**53.
        """

    def block(self, start: int, stop: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """Compute samples `start` to `stop`: number of the dataset and of the sample in it.

        Raises:
            IndexError: there are no such samples.
        """

def shuffle(
    values: npt.NDArray[np.int32] | npt.NDArray[np.uint32] | npt.NDArray[np.int64],
    key: npt.NDArray[np.uint32],
    position: int,
) -> int:
    """Shuffle in place, bit for bit as `numpy.random.RandomState.shuffle` does.

    Args:
        values: (values,) at most 2**32 of them.
        key: (624,) of the generator's state; changed as by numpy.
        position: in the key, of the generator's state.

    Returns:
        The position afterwards.

    Raises:
        TypeError: an array is not contiguous or of another type.
        ValueError: a shape or number is out of range, or an array cannot be written to.
    """

def build_mapping(
    documents: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int32],
    *,
    num_epochs: int,
    max_num_samples: int,
    max_seq_length: int,
    short_seq_prob: float,
    seed: int,
    min_num_sent: int,
) -> npt.NDArray[np.uint32] | npt.NDArray[np.uint64]:
    """Shuffled samples of sentences, as Megatron's function of this name has them.

    Returns:
        (samples, 3): first sentence, end of sentences, tokens aimed at; uint64 if there are more
        sentences than uint32 counts. `tokamake.data.samples.sentence_mappings` describes the
        arguments.

    Raises:
        TypeError: an array is not contiguous or of another type.
        ValueError: a number is out of range, or the documents' bounds fall.
        IndexError: a bound lies outside the lengths.
    """

def build_blocks_mapping(
    documents: npt.NDArray[np.int64],
    lengths: npt.NDArray[np.int32],
    title_lengths: npt.NDArray[np.int32],
    *,
    num_epochs: int,
    max_num_samples: int,
    max_seq_length: int,
    seed: int,
    use_one_sent_blocks: bool,
) -> npt.NDArray[np.uint32] | npt.NDArray[np.uint64]:
    """Shuffled blocks of sentences, as Megatron's function of this name has them.

    Returns:
        (blocks, 4): first sentence, end of sentences, document, number of the block in its epoch;
        dtype and errors as of `build_mapping`.
    """

def find_marked(texts: list[str], table: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Which texts hold a code point that the table marks.

    Args:
        texts: any strings.
        table: (0x110000,) 0 or 1 for each code point; those below 256 are 0.

    Returns:
        (found,) numbers of the texts, ascending.

    Raises:
        TypeError: a text is no string, or the table is not contiguous or of another type.
        ValueError: the table has another size or marks a code point below 256.
    """

def pack(
    ids: npt.NDArray[np.uint32],
    lengths: npt.NDArray[np.int64],
    *,
    bos: int,
    eod: int,
    dtype: npt.DTypeLike,
) -> npt.NDArray[np.uint16] | npt.NDArray[np.int32]:
    """Tokens as they stand in a .bin file; documents without a token stay empty.

    Args:
        ids: (tokens,) tokens of all documents.
        lengths: (documents,) tokens of each.
        bos: token put before each document that has one; -1: none.
        eod: token put after each document that has one; -1: none.
        dtype: uint16 or int32.

    Returns:
        (tokens with those added,) of `dtype`.

    Raises:
        TypeError: an array is not contiguous or of another type.
        ValueError: lengths are negative or do not add up, or `dtype` is another.
        IndexError: a token does not fit `dtype`.
    """

class Words:
    """Splits texts into words and remembers the tokens of each word.

    For tokenizers that give a text the tokens of its words, one after the other. Not for several
    threads at once.
    """

    def __init__(self, kinds: npt.NDArray[np.uint8], whole: list[str], *, capacity: int) -> None:
        """Make one that knows no word.

        Args:
            kinds: (0x110000,) of each code point: 0 if it is part of a word, 1 a space between
                words, which has no tokens, 2 a word of its own wherever it stands.
            whole: what stands between two spaces is one word if one of these occurs in it.
            capacity: bytes of words and tokens from which on all are forgotten before more come.

        Raises:
            ValueError: `kinds` has another size, or a text of `whole` is empty.
        """

    def split(self, texts: list[str]) -> list[str]:
        """Split texts, and say which words have no known tokens yet.

        Raises:
            UnicodeEncodeError: a text has a lone surrogate.
        """

    def finish(
        self, ids: npt.NDArray[np.uint32], lengths: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        """Take the tokens of the missing words of the latest texts.

        Args:
            ids: (tokens,) of these words, one after the other.
            lengths: (words,) tokens of each.

        Returns:
            (tokens,) of all of the latest texts, and (texts,) tokens of each.

        Raises:
            ValueError: these are not the tokens of as many words.
        """

def json_texts(
    lines: bytes | memoryview, key: str
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64], npt.NDArray[np.int64]] | None:
    """Read the texts that lines of JSON have under a key, by RFC 8259 and no more.

    Args:
        lines: whole lines, whose line feeds are not in a string.
        key: has no quotes, backslashes or control characters in it, or no line is plain.

    Returns:
        (bytes,) the texts one after the other in UTF-8, (lines,) where each of them ends, and
        (lines,) where each line ends, at its line feed or at the end of all. None if a line is not
        one object in valid UTF-8 with a single such key and text under it, is blank, or has
        something that parsers differ on: lone surrogates, numbers of many digits or with exponents,
        keys with escapes, more than 64 levels.
    """

class ByteLevel:
    """Byte-level BPE with the words of GPT-2's expression. Not for several threads at once."""

    def __init__(
        self,
        classes: npt.NDArray[np.uint8],
        bytes: npt.NDArray[np.uint32],
        merges: npt.NDArray[np.uint32],
        *,
        added: list[tuple[str, int]],
        add_prefix_space: bool,
    ) -> None:
        """Make one that knows no word.

        Args:
            classes: (0x110000,) of each code point: 1 a letter, 2 a digit, 3 white space, 0 else.
            bytes: (256,) tokens of single bytes.
            merges: (merges, 3) tokens of each pair, and what it becomes; the first rank lowest.
            added: texts that are a token each, found before anything else, and their tokens.
            add_prefix_space: put a space before what stands between added tokens and has none.

        Raises:
            ValueError: an array has another shape, ASCII is classified in another way, two merges
                are of the same pair, a number has more than 21 bits, or an added text is empty.
        """

    def encode(self, texts: list[str]) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        """Encode texts.

        Returns:
            (tokens,) of all texts one after the other, and (texts,) tokens of each.

        Raises:
            UnicodeEncodeError: a text has a lone surrogate.
        """

    def encode_utf8(
        self, utf8: npt.NDArray[np.uint8], ends: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        """The same of texts that stand one after the other.

        Args:
            utf8: (bytes,) valid UTF-8 in each text.
            ends: (texts,) where each ends, ascending.

        Raises:
            ValueError: the ends do not fit the bytes.
        """
