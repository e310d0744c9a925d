"""Types of the C++ extension (lib/csrc): for the modules of `tokamake.data`, and for generation."""

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
    """Find the start of each sample, like Megatron's `build_sample_idx`.

    Args:
        lengths: (documents,) tokens of each document; contiguous, may be unaligned.
        document_index: (epochs × documents,) reading order of the documents.
        sequence_length: tokens between the starts of neighboring samples.
        num_epochs: epochs in `document_index`.
        tokens_per_epoch: tokens of one epoch.
        wide: return int64 even if int32 is enough.

    Returns:
        (samples + 1, 2) position in `document_index` and offset in that document: of the first
        token of each sample, and of the last label of the last sample. int32, or int64 if
        `document_index` has 2**31 entries or more.

    Raises:
        TypeError: an array is not contiguous or has another dtype.
        ValueError: a number is out of range, or the documents hold too few tokens.
        IndexError: `document_index` names a document without a length.
    """

def map_file(path: str | PathLike[str]) -> npt.NDArray[np.uint8]:
    """Map a file into memory, read-only. Pages come from disk when they are read.

    Unlike `mmap` and `np.memmap`, this keeps no file descriptor open: many processes may open only
    1,024. An empty file gives an empty array.

    Raises:
        OSError: the file cannot be opened or mapped, or is a directory.
    """

def build_blend_index(
    weights: npt.NDArray[np.float64], size: int
) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]:
    """Draw from datasets by weight, like Megatron's `build_blending_indices`.

    Args:
        weights: (datasets,) shares with sum 1; not normalized here.
        size: number of samples.

    Returns:
        (size,) dataset numbers and (size,) sample numbers in the datasets.

    Raises:
        TypeError: `weights` is not contiguous or has another dtype.
        ValueError: `size` is negative, a weight is negative or not finite, or the number of weights
            is 0 or above 32,767.
    """

def build_exhaustive_blend_index(
    sizes: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]:
    """Order all samples of all datasets, like Megatron's `build_exhaustive_blending_indices`.

    Args:
        sizes: (datasets,) samples of each.

    Returns:
        (samples,) dataset numbers and (samples,) sample numbers in the datasets.

    Raises:
        TypeError: `sizes` is not contiguous or has another dtype.
        ValueError: a size is below 1, or the number of sizes is 0 or above 32,767.
    """

class Blender:
    """The order of `build_blend_index` in blocks. Not thread-safe."""

    def __init__(self, weights: npt.NDArray[np.float64], *, widest: bool = True) -> None:
        """Start an endless order by weights.

        Args:
            weights: as for `build_blend_index`.
            widest: use the widest vectors of the processor, otherwise 128 bits; only the speed
                differs.
        """

    @staticmethod
    def exhaustive(sizes: npt.NDArray[np.int64], *, widest: bool = True) -> Blender:
        """Start the order of `build_exhaustive_blend_index`."""

    def draw(self, size: int) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]:
        """Draw the next `size` samples.

        Raises:
            ValueError: `size` is negative or larger than the number of remaining samples.
        """

class ExactBlend:
    """Exact blend in integers; see `tokamake.data.samples.blend.ExactBlend`."""

    def __init__(self, counts: npt.NDArray[np.int64]) -> None:
        """Start a blend of (datasets,) sample counts.

        Raises:
            TypeError: `counts` is not contiguous or has another dtype.
            ValueError: a count is negative, there are none, or their sum is above 2**53.
        """

    def block(self, start: int, stop: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """Dataset numbers, and sample numbers in the datasets, of samples `start` to `stop`.

        Raises:
            IndexError: a bound is out of range.
        """

def shuffle(
    values: npt.NDArray[np.int32] | npt.NDArray[np.uint32] | npt.NDArray[np.int64],
    key: npt.NDArray[np.uint32],
    position: int,
) -> int:
    """Shuffle in place, bit for bit like `numpy.random.RandomState.shuffle`.

    Args:
        values: (values,) at most 2**32.
        key: (624,) key of the generator's state; changed in place.
        position: position of the generator's state in the key.

    Returns:
        The new position.

    Raises:
        TypeError: an array is not contiguous or has another dtype.
        ValueError: a shape or number is out of range, or an array is read-only.
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
    """Shuffled samples of whole sentences, like Megatron's function of this name.

    `tokamake.data.samples.sentence_mappings` describes the arguments.

    Returns:
        (samples, 3) first sentence, end of sentences, target tokens; uint64 if uint32 cannot count
        the sentences.

    Raises:
        TypeError: an array is not contiguous or has another dtype.
        ValueError: a number is out of range, or the documents' bounds decrease.
        IndexError: a bound is outside the lengths.
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
    """Shuffled blocks of whole sentences, like Megatron's function of this name.

    Returns:
        (blocks, 4) first sentence, end of sentences, document, number of the block in its epoch;
        dtype and errors as for `build_mapping`.
    """

class RandomState:
    """Numbers of `numpy.random.RandomState(seed)`, bit for bit: what masking draws with."""

    def __init__(self, seed: int) -> None:
        """Start with a seed of 0 to 2**32 - 1."""

    def random(self) -> float:
        """Number in [0, 1)."""

    def randint(self, low: int, high: int) -> int:
        """Integer from `low` to `high` - 1; the bounds differ by less than 2**32."""

    def geometric(self, p: float) -> int:
        """Number of trials until the first success, for `p` below 1/3."""

    def choice(self, cumulative: list[float]) -> int:
        """Place drawn with cumulative probabilities, whose last is 1."""

    def permutation(self, values: list[int]) -> list[int]:
        """The values after `shuffle` of a list."""

class MaskedSampler:
    """Samples of BERT; `tokamake.data.samples.masked` describes them. Not thread-safe."""

    def __init__(
        self,
        pieces: npt.NDArray[np.uint8],
        *,
        probability: float,
        max_ngram: int,
        cumulative: npt.NDArray[np.float64],
        pad: int,
        cls: int,
        sep: int,
        mask: int,
        random: list[int],
        in_two: bool,
    ) -> None:
        """Start with a vocabulary.

        Args:
            pieces: (vocabulary,) 0 begins a word, 1 continues one, 2 is a separator.
            probability: share of the tokens to mask.
            max_ngram: longest run of words that is masked at once.
            cumulative: (max_ngram,) cumulative probabilities of the number of words.
            pad: token of padding.
            cls: token that begins a sample.
            sep: token that ends each part of a sample.
            mask: token in the place of masked ones.
            random: tokens that may be in the place of masked ones.
            in_two: divide samples in two parts, which are swapped in half of them.

        Raises:
            ValueError: a number is out of range, or an array has another shape.
        """

    def write(
        self,
        tokens: npt.NDArray[np.int32],
        lengths: npt.NDArray[np.int32],
        *,
        target: int,
        seed: int,
        row: npt.NDArray[np.int64],
    ) -> None:
        """Write a sample.

        Args:
            tokens: (tokens,) concatenated sentences.
            lengths: (sentences,) tokens of each sentence.
            target: largest number of tokens, without special ones.
            seed: 0 to 2**32 - 1.
            row: (3 L + 3,) to write: tokens, types and labels, L each, number of tokens, whether
                the parts are swapped, whether tokens were dropped.

        Raises:
            ValueError: the sample does not fit the row, or has too few sentences.
            IndexError: a token is not in the vocabulary.
        """

class SpanSampler:
    """Samples of T5; `tokamake.data.samples.span_corruption` describes them. Not thread-safe."""

    def __init__(
        self,
        pieces: npt.NDArray[np.uint8],
        *,
        probability: float,
        max_ngram: int,
        stop_probability: float,
        pad: int,
        bos: int,
        eos: int,
        sentinels: list[int],
    ) -> None:
        """Start with a vocabulary.

        Args:
            pieces: as for `MaskedSampler`.
            probability: share of the tokens to mask.
            max_ngram: longest run of words that is masked at once.
            stop_probability: of the geometric distribution of the number of words, below 1/3.
            pad: token of padding.
            bos: token that begins the decoder's input.
            eos: token that ends the decoder's labels.
            sentinels: tokens in the place of spans.

        Raises:
            ValueError: a number is out of range, or an array has another shape.
        """

    def write(
        self,
        tokens: npt.NDArray[np.int32],
        *,
        target: int,
        seed: int,
        decoder_length: int,
        row: npt.NDArray[np.int64],
    ) -> None:
        """Write a sample.

        Args:
            tokens: (tokens,) concatenated sentences.
            target: tokens that are used.
            seed: 0 to 2**32 - 1.
            decoder_length: M, tokens of the decoder.
            row: (L + 2 M + 3,) to write: tokens of the encoder, L, input and labels of the decoder,
                M each, number of tokens of encoder and decoder, whether tokens were dropped.

        Raises:
            ValueError: the sample does not fit the row, or has more spans than sentinels.
            IndexError: a token is not in the vocabulary.
        """

    def sizes(
        self,
        tokens: npt.NDArray[np.integer],
        *,
        starts: npt.NDArray[np.int64],
        counts: npt.NDArray[np.int32],
        targets: npt.NDArray[np.int32],
        seed: int,
    ) -> npt.NDArray[np.int32]:
        """Measure samples without writing them.

        Args:
            tokens: (tokens,) of a dataset, uint16 or int32.
            starts: (samples,) first token of each sample.
            counts: (samples,) tokens of each sample that are used, at most its target.
            targets: (samples,) target of each sample.
            seed: of the first sample; the next ones have the next seeds, modulo 2**32.

        Returns:
            (samples, 2) tokens of the decoder, and spans.

        Raises:
            ValueError: the tokens have another dtype, or an array another shape.
            IndexError: a sample is outside the tokens, or a token outside the vocabulary.
        """

def find_marked(texts: list[str], table: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Find the texts that hold a marked code point.

    Args:
        texts: any strings.
        table: (0x110000,) 1 for each marked code point; those below 256 must be 0.

    Returns:
        Numbers of these texts, ascending.

    Raises:
        TypeError: a text is not a string, or the table is not contiguous or has another dtype.
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
    """Tokens of documents in the layout of a .bin file; empty documents stay empty.

    Args:
        ids: (tokens,) concatenated tokens of all documents.
        lengths: (documents,) tokens of each document.
        bos: token before each document that is not empty; -1: none.
        eod: token after each document that is not empty; -1: none.
        dtype: uint16 or int32.

    Returns:
        (tokens, bos and eod,) array of `dtype`.

    Raises:
        TypeError: an array is not contiguous or has another dtype.
        ValueError: a length is negative, the lengths do not add up, or `dtype` is not supported.
        IndexError: a token does not fit `dtype`.
    """

class Words:
    """Splits texts into words and caches the tokens of each word. Not thread-safe.

    For tokenizers whose tokens of a text are the concatenated tokens of its words.
    """

    def __init__(self, kinds: npt.NDArray[np.uint8], whole: list[str], *, capacity: int) -> None:
        """Start with an empty cache.

        Args:
            kinds: (0x110000,) kind of each code point: 0 part of a word, 1 space between words,
                without tokens, 2 always a word of its own.
            whole: text between two spaces is one word if it contains one of these.
            capacity: bytes of words and tokens; a larger cache is cleared.

        Raises:
            ValueError: `kinds` has another size, or a text of `whole` is empty.
        """

    def split(self, texts: list[str]) -> list[str]:
        """Split texts and return the words without cached tokens.

        Raises:
            UnicodeEncodeError: a text has a lone surrogate.
        """

    def finish(
        self, ids: npt.NDArray[np.uint32], lengths: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        """Add the tokens of the words from the last `split`.

        Args:
            ids: (tokens,) concatenated tokens of these words.
            lengths: (words,) tokens of each word.

        Returns:
            (tokens,) concatenated tokens of the texts from the last `split`, and (texts,) tokens of
            each text.

        Raises:
            ValueError: the number of words differs, or the lengths do not add up.
        """

def json_texts(
    lines: bytes | memoryview, key: str
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64], npt.NDArray[np.int64]] | None:
    """Read the texts under a key from lines of JSON. Accepts RFC 8259 without extensions.

    Args:
        lines: whole lines.
        key: key without quotes, backslashes or control characters; others give None.

    Returns:
        (bytes,) concatenated texts in UTF-8, (lines,) end of each text, and (lines,) end of each
        line, without its line feed. None if a line is blank, or is not one object in valid UTF-8
        with exactly one such key and a string as its value, or holds something that JSON parsers
        treat differently: lone surrogates, numbers with many digits or exponents, keys with
        escapes, more than 64 levels.
    """

class ByteLevel:
    """Byte-level BPE with GPT-2's pre-tokenization. Not thread-safe."""

    def __init__(
        self,
        classes: npt.NDArray[np.uint8],
        bytes: npt.NDArray[np.uint32],
        merges: npt.NDArray[np.uint32],
        *,
        added: list[tuple[str, int]],
        add_prefix_space: bool,
    ) -> None:
        """Start with an empty cache of words.

        Args:
            classes: (0x110000,) class of each code point: 1 letter, 2 digit, 3 white space,
                0 other.
            bytes: (256,) tokens of single bytes.
            merges: (merges, 3) left, right and merged token, in order of rank.
            added: added texts and their tokens; they are found before the text is split into words.
            add_prefix_space: start text between added tokens with a space.

        Raises:
            ValueError: an array has another shape, ASCII has other classes than in Unicode, two
                merges have the same pair, a number has more than 21 bits, or an added text is
                empty.
        """

    def encode(self, texts: list[str]) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        """Encode texts.

        Returns:
            (tokens,) concatenated tokens of all texts, and (texts,) tokens of each text.

        Raises:
            UnicodeEncodeError: a text has a lone surrogate.
        """

    def encode_utf8(
        self, utf8: npt.NDArray[np.uint8], ends: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        """Encode concatenated texts.

        Args:
            utf8: (bytes,) concatenated texts, each valid UTF-8.
            ends: (texts,) end of each text, ascending.

        Raises:
            ValueError: an end is out of range.
        """

def add_rms_norm(
    states: int, update: int, weight: int, eps: float, rows: int, width: int, normed: int
) -> None:
    """Add an update to token states, and write their RMS norms.

    Args:
        states: address of (rows, width) fp32.
        update: address of (rows, width) fp32; 0: nothing is added.
        weight: address of (width,) fp32.
        eps: added to the mean square.
        rows: number of tokens.
        width: of a state.
        normed: address of (rows, width) fp32 to write.
    """

def attend(
    projected: int,
    cosines: int,
    sines: int,
    keys: int,
    values: int,
    row_stride: int,
    group_stride: int,
    lengths: int,
    rows: int,
    heads: int,
    groups: int,
    width: int,
    mixed: int,
) -> None:
    """Let the next token of each row attend to itself and to those in a cache, which it joins.

    Args:
        projected: address of (rows, heads + 2 groups, width) fp32: queries, keys and values.
        cosines: address of (rows, width) fp32.
        sines: address of (rows, width) fp32.
        keys: address of the keys of the first row in the cache.
        values: address of the values of the first row in the cache.
        row_stride: numbers from a row of the cache to the next one.
        group_stride: numbers from a group of a row to the next one.
        lengths: address of (rows,) int64: tokens of each row before.
        rows: number of rows.
        heads: number of query heads.
        groups: number of key and value heads.
        width: of a head.
        mixed: address of (rows, heads, width) fp32 to write.
    """

def gate(projected: int, rows: int, width: int, gated: int) -> None:
    """Write silu(gate) × up.

    Args:
        projected: address of (rows, 2 width) fp32: gate, up.
        rows: number of tokens.
        width: of the result.
        gated: address of (rows, width) fp32 to write.
    """
