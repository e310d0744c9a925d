"""Types of the C++ extension (lib/csrc): for the modules of `tokamake.data`, and for generation.

Arrays are contiguous and have the stated dtype, else TypeError is raised. Other bad input raises
ValueError or IndexError. No object is thread-safe, except LanguageModel.
"""

from collections.abc import Callable
from os import PathLike
from typing import TypeAlias

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
        lengths: (documents,) tokens of each document; may be unaligned.
        document_index: (epochs × documents,) reading order of the documents.
        sequence_length: tokens between the starts of neighboring samples.
        wide: return int64 even if int32 is enough.

    Returns:
        (samples + 1, 2) position in `document_index` and offset in that document: of the first
        token of each sample, and of the last label of the last sample. int32, or int64 if
        `document_index` has 2**31 entries or more.
    """

def map_file(path: str | PathLike[str]) -> npt.NDArray[np.uint8]:
    """Map a file into memory, read-only. Pages come from disk when they are read.

    Unlike `mmap` and `np.memmap`, this keeps no file descriptor open: many processes may open only
    1,024. An empty file gives an empty array.
    """

class Blender:
    """Draws from datasets by weight, like Megatron's `build_blending_indices`."""

    def __init__(self, weights: npt.NDArray[np.float64], *, widest: bool = True) -> None:
        """Start an endless order of datasets with (datasets,) shares with sum 1.

        `widest` uses the widest vectors of the processor, otherwise 128 bits; only the speed
        differs.
        """

    @staticmethod
    def exhaustive(sizes: npt.NDArray[np.int64], *, widest: bool = True) -> Blender:
        """Order all of (datasets,) samples, like `build_exhaustive_blending_indices`."""

    def draw(self, size: int) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.int64]]:
        """Draw samples: (size,) dataset numbers, and (size,) sample numbers in the datasets."""

class ExactBlend:
    """Exact blend in integers; see `tokamake.data.samples.blend.ExactBlend`."""

    def __init__(self, counts: npt.NDArray[np.int64]) -> None:
        """Start a blend of (datasets,) sample counts with a sum up to 2**53."""

    def block(self, start: int, stop: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """Dataset numbers, and sample numbers in the datasets, of samples `start` to `stop`."""

def shuffle(
    values: npt.NDArray[np.int32] | npt.NDArray[np.uint32] | npt.NDArray[np.int64],
    key: npt.NDArray[np.uint32],
    position: int,
) -> int:
    """Shuffle up to 2**32 values in place, bit for bit like `numpy.random.RandomState.shuffle`.

    `key` (624,) of the generator's state changes in place; returns the new position in it.
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
    """Cut documents into shuffled samples of whole sentences, as megatron-core's `build_mapping`.

    A sample ends with the sentence that reaches its target length, unless only one sentence would
    remain. Documents with a sentence of more than 512 tokens are left out. Returns (samples, 3)
    first sentence, end of sentences and target tokens; uint64 if uint32 cannot count the sentences.

    Args:
        documents: (documents + 1,) bounds: document d has sentences documents[d] to
            documents[d + 1].
        lengths: (sentences,) tokens of each; may be unaligned, is not copied.
        max_num_samples: start no further epoch at this number of samples.
        max_seq_length: target tokens of a sample, 2 or more: the model's length minus 3 for BERT,
            minus 2 for T5.
        short_seq_prob: share of samples with a shorter target: 0, or 1e-9 to 1.
        seed: seed of the targets and of the order, 1 to 2**31 - 2.
        min_num_sent: minimum sentences of a sample: 2 if it is divided in two.
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
    """Cut documents into shuffled blocks of whole sentences, as `build_blocks_mapping` of
    megatron-core, for the inverse cloze task (ICT).

    A block ends with the sentence that reaches, together with the title, its target length (the
    model's length minus 3), if enough sentences remain for another block. Returns (blocks, 4) first
    sentence, end of sentences, document, and number of the block in its epoch.

    Args:
        title_lengths: (documents,) tokens of each document's title.
        use_one_sent_blocks: allow blocks of one sentence; otherwise a block has at least two.
    """

class RandomState:
    """Numbers of `numpy.random.RandomState(seed)`, bit for bit: what masking draws with."""

    def __init__(self, seed: int) -> None: ...
    def random(self) -> float: ...
    def randint(self, low: int, high: int) -> int: ...
    def geometric(self, p: float) -> int:
        """Number of trials until the first success, for `p` below 1/3."""

    def choice(self, cumulative: list[float]) -> int:
        """Place drawn with cumulative probabilities; the last is 1."""

    def permutation(self, values: list[int]) -> list[int]:
        """The values after `shuffle` of a list."""

class MaskedSampler:
    """Samples of BERT; `tokamake.train.objectives.masked.samples` describes them."""

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
            random: tokens that may take the place of masked ones.
            in_two: divide samples in two parts, and swap these in half of the samples.
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
        """

class MinHash:
    """Band keys of texts."""

    def __init__(
        self,
        characters: npt.NDArray[np.uint32],
        *,
        of_characters: bool,
        shingle: int,
        bands: int,
        rows: int,
        seed: int,
    ) -> None:
        """Prepare.

        Args:
            characters: (code points,) lower-case code point of each character of a word; 0 for
                characters between words; bit 31 marks characters that are words of their own.
            of_characters: whether shingles consist of characters, not of words.
            rows: minima that a key hashes.
        """

    def sign(self, texts: list[str]) -> npt.NDArray[np.uint64]:
        """(texts, bands) keys; 0 for texts without words."""

class NgramIndex:
    """N-grams of evaluation sets, known by their 64-bit hashes."""

    def __init__(self, characters: npt.NDArray[np.uint32], *, longest: int, shortest: int) -> None:
        """Start empty.

        Args:
            characters: as for `MinHash`.
            longest: words of an n-gram.
            shortest: words of the shortest text that is one n-gram if it has less than `longest`.
        """

    def add(self, text: str, set: int) -> bool:
        """Add the n-grams of a text of a set. False: the text is too short for any."""

    def finish(self) -> None:
        """Sort the n-grams: call it once, after the last `add`."""

    def __len__(self) -> int: ...
    def find(self, text: str) -> tuple[int, npt.NDArray[np.int64]]:
        """Words of the text, and (matches, 5): first word and end word, begin and end in code
        points, and set of each n-gram that a set has; sorted by first word, words and set."""

class WordWindows:
    """N-grams of texts, chosen by their hashes, so that texts with a long shared run choose the
    same ones (winnowing; Schleimer, Wilkerson and Aiken 2003)."""

    def __init__(self, characters: npt.NDArray[np.uint32], *, size: int, group: int) -> None:
        """Prepare to search.

        Args:
            characters: as for `MinHash`.
            size: words of an n-gram.
            group: consecutive n-grams of which one is chosen; 1: all.
        """

    def choose(self, text: str) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
        """(n-grams,) hashes and (n-grams, 2) first and end character, with punctuation after the
        last word. Texts of fewer than size + group - 1 words have none."""

def join_clusters(
    parents: npt.NDArray[np.uint32],
    first: npt.NDArray[np.uint32],
    second: npt.NDArray[np.uint32],
) -> None:
    """Join the clusters of documents first[i] and second[i] in place.

    A document's parent is itself, or a smaller document of its cluster.
    """

def resolve_clusters(parents: npt.NDArray[np.uint32]) -> None:
    """Let each document name the smallest document of its cluster."""

class SpanSampler:
    """Samples of T5; `tokamake.train.objectives.span_corruption.samples` describes them."""

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
        """Start with a vocabulary, as `MaskedSampler`.

        `stop_probability` (below 1/3) is for the geometric distribution of the number of words.
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
        """Write a sample, as `MaskedSampler.write`; the decoder has `decoder_length` (M) tokens.

        `row` (L + 2 M + 3,): tokens of the encoder, L, input and labels of the decoder, M each,
        number of tokens of encoder and decoder, whether tokens were dropped.
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
        dtype: uint16 or int32. IndexError: a token does not fit.
    """

def json_texts(
    lines: bytes | memoryview, key: str
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64], npt.NDArray[np.int64]] | None:
    """Read the texts under a key from whole lines of JSON. Accepts RFC 8259 without extensions.

    Returns:
        (bytes,) concatenated texts in UTF-8, (lines,) end of each text, and (lines,) end of each
        line, without its line feed. None if a line is blank, or is not one object in valid UTF-8
        with exactly one such key and a string as its value, or holds something that JSON parsers
        treat differently: lone surrogates, numbers with many digits or exponents, keys with
        escapes, more than 64 levels.
    """

class WordCounts:
    """Numbers of the words of texts."""

    def __init__(self, classes: npt.NDArray[np.uint8], transitions: npt.NDArray[np.uint16]) -> None:
        """Start without words.

        Args:
            classes: of code points, and transitions: an `Automaton` of `data.tokenizers._patterns`
                whose matches, and the text between them, are words.
        """

    def add(self, texts: list[str]) -> None:
        """Count the words of texts."""

    def counts(self) -> list[tuple[bytes, int]]:
        """Each word and its number."""

    def merges(
        self,
        bytes: npt.NDArray[np.uint32],
        *,
        known: list[tuple[bytes, int]],
        num_tokens: int,
        vocab_size: int,
    ) -> npt.NDArray[np.uint32]:
        """Train byte-level BPE; the words are gone then.

        Args:
            bytes: (256,) tokens of single bytes.
            known: further texts that have a token.
            num_tokens: number of all tokens so far.
            vocab_size: number of tokens with those of merges.

        Returns:
            (merges, 3) left, right and merged token, in order; fewer if all pairs are merged.
        """

def model_spans(definition: bytes) -> tuple[tuple[int, int], tuple[int, int], int] | None:
    """Begin and end of a BPE's vocabulary and merges in its tokenizer.json, and the highest id.

    None: its model has no such object and array.
    """

class Vocabulary:
    """Vocabulary of a model, and the merges of a BPE."""

    def __init__(self, vocab: bytes, merges: bytes) -> None:
        """Parse the JSON of both, as in a tokenizer.json."""

    def id(self, text: str) -> int | None:
        """Token of a text; None if there is none."""

    def merges(self) -> npt.NDArray[np.uint32]:
        """(merges, 3) left, right and merged token, in order of rank."""

    def characters(self) -> list[tuple[bytes, int]]:
        """Single characters, in UTF-8, and their tokens."""

    def byte_words(self, alphabet: list[int]) -> list[tuple[bytes, int]]:
        """Words of bytes and their tokens; `alphabet` has a character for each of 256 bytes."""

    def joints(self) -> npt.NDArray[np.uint8]:
        """(65536,) whether some merged token has the second of two bytes right after the first.

        A space counts as U+2581. Bytes within a character have joints.
        """

class WordModel:
    """Encodes words. Several encoders may share a model."""

class BytePairs(WordModel):
    """Byte pair encoding of bytes, or of characters."""

    def __init__(
        self,
        bytes: npt.NDArray[np.uint32],
        merges: npt.NDArray[np.uint32],
        *,
        characters: list[tuple[bytes, int]] = ...,
        shares_ranks: bool = False,
        whole: list[tuple[bytes, int]] = ...,
    ) -> None:
        """Build tables of the merges.

        Args:
            bytes: (256,) tokens of single bytes.
            merges: (merges, 3) left, right and merged token, in order of rank.
            characters: tokens of characters, in UTF-8; `bytes` are for all others. Spaces count as
                U+2581. Empty: all text is bytes.
            shares_ranks: adjacent merges to the same token have the same rank.
            whole: words that have a token, whatever the merges.
        """

class WordPieces(WordModel):
    """WordPiece: the longest piece at each place of a word."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        prefix: str,
        unknown: int,
        longest: int,
        kinds: npt.NDArray[np.uint8],
    ) -> None:
        """Build a trie of the pieces.

        Args:
            vocabulary: pieces and their tokens.
            prefix: begins the pieces that do not begin a word.
            unknown: token of a word that is no sequence of pieces.
            longest: characters of the longest word; longer ones are unknown.
            kinds: (0x110000,) kind of each code point: 0 part of a word, 1 space between words, 2
                a word of its own.
        """

class Unigram(WordModel):
    """Unigram language model: the pieces of a word with the highest sum of scores."""

    def __init__(
        self,
        pieces: list[tuple[bytes, float]],
        *,
        unknown: int | None = None,
        bytes: npt.NDArray[np.uint32] = ...,
        marks: str = "",
        spaces: npt.NDArray[np.uint8] = ...,
    ) -> None:
        """Build a trie of the pieces.

        Args:
            pieces: pieces in UTF-8, or bytes, with their scores. The place of a piece is its token.
            unknown: token of unknown text; None if all bytes are pieces.
            bytes: (256,) tokens of the bytes of unknown text, in place of `unknown`; may be empty.
            marks: "" for pieces of bytes; "spaces" writes U+2581 in place of each space; "words"
                writes it before each word between spaces. Each U+2581 begins a word.
            spaces: (0x110000,) whether a character is a space, for "words".
        """

_Map: TypeAlias = tuple[npt.NDArray[np.uint32], list[str], npt.NDArray[np.uint8]]

class TextEncoder:
    """Encodes texts word by word."""

    def __init__(
        self,
        model: WordModel,
        *,
        splits: list[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint16], bool, bool]] = ...,
        joints: npt.NDArray[np.uint8] = ...,
        added: list[tuple[str, int, int]] = ...,
        later: list[tuple[str, int, int]] = ...,
        letters: npt.NDArray[np.uint8] = ...,
        before: _Map | None = None,
        marks: npt.NDArray[np.uint8] = ...,
        after: _Map | None = None,
        prefix: str = "",
        normalizes_words: bool = False,
        strips_left: bool = False,
        strips_right: bool = False,
        strips_normalized: bool = False,
    ) -> None:
        """Start with an empty cache of words.

        Args:
            splits: an expression each, as an `Automaton` of `data.tokenizers._patterns`, and
                whether its matches and the text between them are words. Classes are of code
                points, or of 256 bytes. Each split gets the words of the one before.
            joints: (65536,) whether a word can go on from a byte to the next one, in place of
                `splits`.
            added: added texts, their tokens, and flags: 1 and 2 take white space before and after
                the text along, 4 finds it as a whole word only. They are found before the text is
                normalized.
            later: further ones that are found in normalized text.
            letters: (0x110000,) whether a character belongs to a word, for flag 4.
            before: texts of single characters, a `Map` of `data.tokenizers._normalization`.
            marks: (0x110000,) 1: a character is normalized next, with the one before; 2: with the
                next one, too, or with its word, if `normalizes_words`. May be empty.
            after: texts of single characters of the result.
            prefix: when a space begins the text between added tokens: "" (never), "always",
                "unless space" or "unless mark" (a space or U+2581) begins it already, or "first
                unless mark", for text that begins a document. "document": before the whole text.
            normalizes_words: words are split and looked up as they are in the text, and normalized
                only for the model.
            strips_left: white space before the text between added tokens is removed first.
            strips_right: likewise after it.
            strips_normalized: white space after the normalized text is removed.
        """

    def encode(
        self, texts: list[str], normalize: Callable[[str], str]
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        """(tokens,) concatenated tokens of all texts, and (texts,) tokens of each text.

        `normalize` gets marked characters, each time with the one before, or the whole word.
        ValueError if a result has more than 12 times the bytes of these characters.
        """

    def encode_utf8(
        self,
        utf8: npt.NDArray[np.uint8],
        ends: npt.NDArray[np.int64],
        normalize: Callable[[str], str],
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        """`encode` of (bytes,) concatenated texts in valid UTF-8, with the (texts,) end of each."""

class WordStatistics:
    """Counts of the words of a text, of its symbols and of the lines of str.splitlines."""

    words: int
    plain_words: int
    """Words that are not only punctuation."""
    plain_characters: int
    """Characters of the plain words."""
    alphabetic_words: int
    """Words with a letter."""
    stop_words: int
    """Different stop words that occur."""
    hashes: int
    ellipses: int
    lines: int
    bullet_lines: int
    ellipsis_lines: int

class LineStatistics:
    """Counts of the lines of a text that are not blank; line feeds end lines."""

    characters: int
    """Characters of the text without line feeds."""
    words: int
    line_feeds: int
    lines: int
    ended_lines: int
    """Lines whose last character ends a sentence."""
    short_lines: int
    duplicate_characters: int
    """Characters of lines that an earlier line equals."""

class Repetition:
    """Counts of repeated paragraphs, lines and n-grams of words."""

    characters: int
    paragraphs: int
    duplicate_paragraphs: int
    duplicate_paragraph_characters: int
    lines: int
    duplicate_lines: int
    duplicate_line_characters: int
    top: list[int]
    """Characters of all copies of the most frequent 2-, 3- and 4-gram."""
    repeated: list[int]
    """Characters of 5- to 10-grams that occurred before."""

class C4Rules:
    """Rules of C4 about lines."""

    def __init__(
        self,
        *,
        max_word_characters: int,
        min_words: int,
        end_marks: bool,
        citations: bool,
        lorem_ipsum: bool,
        javascript: bool,
        curly_bracket: bool,
        policy: list[str],
    ) -> None:
        """A negative `max_word_characters` allows any; `policy` has lower-case phrases."""

class C4Lines:
    """Lines of a text that the rules of C4 keep, and the number of dropped lines by rule."""

    text: str
    sentences: int
    refused: str
    """"lorem ipsum" or "{" if the text has it, else empty."""
    long_words: int
    no_end_mark: int
    few_words: int
    javascript: int
    policy: int

class TextStatistics:
    """Statistics of texts, for filters. docs/reference/quality-filters.md defines words.

    Methods take linear time, and release the global interpreter lock except `split_words` and
    `sentences`.
    """

    def __init__(self, flags: npt.NDArray[np.uint8]) -> None:
        """(0x110000,) flags of each code point, as in lib/csrc/word_splitting.hpp."""

    def split_words(self, text: str) -> list[str]: ...
    def sentences(self, line: str) -> int: ...
    def words(self, text: str, stop_words: list[str]) -> WordStatistics: ...
    def lines(self, text: str, *, short_characters: int) -> LineStatistics: ...
    def repetition(self, text: str) -> Repetition: ...
    def c4_lines(self, text: str, rules: C4Rules) -> C4Lines: ...

class LanguageModel:
    """A model of fastText that scores the language of a text, such as lid.176.ftz.

    Any number of threads may use it. `scores` takes linear time, needs memory for the longest
    word only, and releases the global interpreter lock.
    """

    def __init__(self, file: bytes) -> None:
        """ValueError: not the model's format, or too short."""

    @property
    def labels(self) -> list[str]:
        """Languages, without __label__."""

    def scores(self, text: str) -> npt.NDArray[np.float64]:
        """(labels,) probabilities of the whole text; below 1e-5 they are 0."""

# Tensors come in as addresses of contiguous fp32 (lengths: int64); decode.hpp has their shapes.
def add_rms_norm(
    states: int, update: int, weight: int, eps: float, rows: int, width: int, normed: int
) -> None: ...
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
) -> None: ...
def gate(projected: int, rows: int, width: int, gated: int) -> None: ...

class WikitextElements:
    """Names of elements of wikitext, such as <ref>, in lower case."""

    def __init__(
        self, *, dropped: set[str], literal: set[str], breaking: set[str], inlined: set[str]
    ) -> None:
        """Elements that go with their content; whose content is no wikitext; whose tags end a line;
        and whose tags go, while the content stays."""

    def remove(self, text: str, literal: Callable[[str, str], str]) -> str:
        """Remove comments, tags and dropped elements.

        `literal` takes the name and the content of an element whose content is no wikitext, and
        returns its replacement.
        """

def without_templates(
    text: str, is_shown: Callable[[str], bool], shown: Callable[[str], str]
) -> str:
    """Remove {{templates}} and {{{parameters}}}. A mark stays: \\x04, or \\x03 for open braces.

    `is_shown` takes up to 40 characters of a template before its first "|". If it is true, the
    result of `shown` for the whole template stays, unless that is longer than 2,000 characters.
    """

def without_tables(text: str) -> str:
    """Remove tables, {| to |}; of one that has no end, only the lines to the next blank line."""

def without_links(text: str, is_dropped: Callable[[str], bool]) -> str:
    """Replace [[links]] by their labels.

    Links to a namespace for which `is_dropped` is true go, with what they enclose.
    """

def clean_lines(text: str, has_word: Callable[[str], bool]) -> str:
    """Clean lines of wikitext; drop blank ones at the ends, and headings without text below them.

    `has_word` tells whether an item of a list, without ASCII letters and digits, has a word.
    """
