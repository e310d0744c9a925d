"""Encode texts to token ids as fast as possible, with the tokens of the reference tokenizer.

The reference tokenizer is the tokenizer's own package (`tokenizers` or `sentencepiece`). The
encoder prefers lib/csrc, then gigatoken, where they are exact, and compares samples with the
reference. The choice changes no token. `tokenize` makes one Encoder per run.
"""

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from itertools import chain
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokamake._csrc import Words
from tokamake.data.readers import Utf8
from tokamake.data.tokenizers import Tokenizer, failure
from tokamake.data.tokenizers import _byte_level as byte_level
from tokamake.data.tokenizers import _gigatoken as gigatoken
from tokamake.data.tokenizers._byte_level import ByteLevelEncoder
from tokamake.data.tokenizers._gigatoken import Gigatoken, in_parts, reuse_memory

# Lengths are in characters, except _WORD_CACHE_BYTES.
_FAST_THRESHOLD = 2_000_000  # from here on a fast encoder pays: loading takes 0.1 to 0.5 s
_REFERENCE_CHUNK = 4_000_000  # per call of the reference tokenizer, which needs much memory
_MAX_THREADS = 4  # one reader and one writer thread cannot feed more
_CACHE_LIMIT = 192_000_000  # per thread; then gigatoken's caches are dropped
_WORD_CACHE_BYTES = 64 << 20  # words whose tokens are cached
# Both encoders encode the first _FIRST_SAMPLE characters, then _SAMPLE characters around every
# _SAMPLE_STEP-th one. The reference is about 100 times slower: 1 in 4,000 costs a few percent.
_FIRST_SAMPLE = 100_000
_SAMPLE_STEP = 8_000_000
_SAMPLE = 2_000


class Encoded(NamedTuple):
    """Token ids of a list of texts."""

    ids: NDArray[np.uint32]
    """(tokens,) token ids of all texts, concatenated."""
    lengths: NDArray[np.int64]
    """(texts,) tokens of each text."""

    def text_ids(self, index: int) -> NDArray[np.uint32]:
        """Token ids of one text; slow in a loop, because it sums the lengths before it."""
        end = int(self.lengths[: index + 1].sum())
        return self.ids[end - int(self.lengths[index]) : end]


class Mismatch(Exception):
    """The fast encoder failed or differs from the reference: encode again with fast=False."""


class Encoder:
    """Encodes lists of texts; several threads may call it at once."""

    def __init__(self, tokenizer: Tokenizer, *, workers: int, fast: bool = True) -> None:
        """Create an encoder; fast encoders and caches are loaded at first use.

        The number of threads, `workers`, does not change the tokens. `fast` allows a fast encoder
        where it is exact.
        """
        os.environ["RAYON_NUM_THREADS"] = str(workers)  # `tokenizers` reads it once, at first use
        self._tokenizer = tokenizer
        self._workers = workers
        self._fast_class: type[ByteLevelEncoder | Gigatoken] = Gigatoken
        self._idle: list[ByteLevelEncoder | Gigatoken] = []
        self._is_loaded = False
        self._num_borrowed = 0
        self._cached_characters = 0  # characters since gigatoken's caches were empty
        self._words: Words | Literal[False] | None = None  # None: not yet created; False: no rules
        self._fallback_reason = None if fast else "it is turned off"  # None: not yet known
        self._num_characters = 0
        self._lock = threading.Lock()
        self._borrowing = threading.Condition()
        self._reference_lock = threading.Lock()

    @property
    def threads(self) -> int:
        """Number of caller threads that are useful.

        One for the reference tokenizer: it takes one list of texts at a time and has its own
        threads.
        """
        return 1 if self._fallback_reason else min(self._workers, _MAX_THREADS)

    @property
    def name(self) -> str:
        """Package and version that encoded most texts so far."""
        package = self._fast_class.package if self._is_loaded else self._tokenizer.package
        return f"{package} {version(package)}"

    @property
    def known_fallback_reason(self) -> str:
        """`fallback_reason`, or empty if there was too little text to look for a fast encoder."""
        return self._fallback_reason or ""

    @property
    def fallback_reason(self) -> str:
        """Why no fast encoder can be used, as a clause; empty if one can."""
        with self._lock:
            if self._fallback_reason is None:
                # Where both are exact, gigatoken is faster for all expressions but GPT-2's.
                reason = gigatoken.refusal(self._tokenizer)
                if reason or byte_level.is_fastest(self._tokenizer):
                    own_reason = byte_level.refusal(self._tokenizer)
                    if not own_reason:
                        self._fast_class, reason = ByteLevelEncoder, ""
                    elif self._tokenizer.package == "tokenizers":
                        reason = reason and own_reason
                if not reason:
                    reuse_memory()
                self._fallback_reason = reason
            return self._fallback_reason

    def reserve(self, texts: Sequence[str]) -> range:
        """Reserve the next positions in the stream of all texts, in `text_size` units.

        Call it in the order of the texts, then encode them in any order and thread.
        """
        start = self._num_characters
        self._num_characters += text_size(texts)
        if self._fallback_reason is None and self._num_characters >= _FAST_THRESHOLD:
            # Decide before threads start to encode: `reuse_memory` changes their allocator.
            _ = self.fallback_reason
        return range(start, self._num_characters)

    def __call__(self, texts: Sequence[str], position: range | None = None) -> Encoded:
        """Encode texts in order, and special tokens in a text as the reference encodes them.

        `position` is a stream position from `reserve`, of these texts or of the documents that they
        were made from; None: they come next. It decides which texts are checked. Mismatch: the fast
        encoder failed, or differs from the reference on a sample.
        """
        position = self.reserve(texts) if position is None else position
        if position.stop < _FAST_THRESHOLD or self.fallback_reason:
            return self._encode_by_reference(texts)
        with self._borrow(len(position)) as fast:
            if fast is None:
                return self._encode_by_reference(texts)
            if not isinstance(fast, ByteLevelEncoder):
                texts = list(texts)
            if position.start < _FAST_THRESHOLD:
                self._check(fast, _first_sample(texts))
            self._check(fast, _samples(texts, position))
            return self._encode(fast, texts)

    @contextmanager
    def _borrow(self, num_characters: int) -> Iterator[ByteLevelEncoder | Gigatoken | None]:
        """Lend a fast encoder to this thread, for this many characters; None if it cannot load."""
        with self._borrowing:
            self._cached_characters += num_characters if self._fast_class is Gigatoken else 0
            # Drop all caches at once: loading an encoder beside full caches peaks in memory.
            while self._cached_characters > _CACHE_LIMIT * self.threads and self._num_borrowed:
                self._borrowing.wait()
            if self._cached_characters > _CACHE_LIMIT * self.threads:
                self._idle.clear()
                self._cached_characters = num_characters
            self._num_borrowed += 1
            fast = self._idle.pop() if self._idle else None
        try:
            fast = fast or self._load()
            yield fast
        finally:
            with self._borrowing:
                self._num_borrowed -= 1
                if fast is not None:
                    self._idle.append(fast)
                self._borrowing.notify_all()

    def _load(self) -> ByteLevelEncoder | Gigatoken | None:
        try:
            with self._lock:  # one at a time: loading needs much memory for a moment
                fast = self._fast_class(self._tokenizer)
        except BaseException as error:  # a panic in Rust is no Exception
            self._fallback_reason = f"{self._fast_class.package} cannot load it ({failure(error)})"
            if self._is_loaded:
                # A shard has one encoder: its manifest names it. Encode the shard again.
                raise Mismatch(self._fallback_reason) from None
            return None
        self._is_loaded = True
        return fast

    def _encode_by_reference(self, texts: Sequence[str]) -> Encoded:
        texts = list(texts)
        with self._reference_lock:  # keeps its memory independent of the number of threads
            if self._words is None:
                rules = self._tokenizer.word_rules()
                self._words = Words(*rules, capacity=_WORD_CACHE_BYTES) if rules else False
            if self._words:
                new_words = self._words.split(texts)
                return Encoded(*self._words.finish(*self._encode_in_chunks(new_words)))
            return self._encode_in_chunks(texts)

    def _encode_in_chunks(self, texts: list[str]) -> Encoded:
        ids = [np.empty(0, np.uint32)]
        lengths = [np.empty(0, np.int64)]
        for chunk in in_parts(texts, _REFERENCE_CHUNK):
            rows = self._tokenizer.encode_batch(chunk, workers=self._workers)
            lengths.append(np.fromiter(map(len, rows), np.int64, len(rows)))
            flat = chain.from_iterable(rows)
            ids.append(np.fromiter(flat, np.uint32, int(lengths[-1].sum())))
            del rows, flat  # free the lists of ints before the next chunk is encoded
        return Encoded(np.concatenate(ids), np.concatenate(lengths))

    def _encode_by_fast(self, fast: ByteLevelEncoder | Gigatoken, texts: Sequence[str]) -> Encoded:
        try:
            if isinstance(fast, ByteLevelEncoder) and isinstance(texts, Utf8):
                return Encoded(*fast.encode_utf8(texts.data, texts.ends))
            return Encoded(*fast.encode(list(texts)))
        except BaseException as error:  # a panic in Rust is no Exception
            raise Mismatch(f"{self.name} failed ({failure(error)})") from None

    def _encode(self, fast: ByteLevelEncoder | Gigatoken, texts: Sequence[str]) -> Encoded:
        """Encode with the fast encoder, and with the reference where the fast one may differ."""
        unsafe = fast.unsafe(texts)
        if not len(unsafe):
            return self._encode_by_fast(fast, texts)
        safe_texts = list(texts)
        for index in unsafe:
            safe_texts[index] = ""
        reference = self._encode_by_reference([texts[index] for index in unsafe])
        return _replace_texts(
            self._encode_by_fast(fast, safe_texts), unsafe, replacements=reference
        )

    def _check(self, fast: ByteLevelEncoder | Gigatoken, samples: list[str]) -> None:
        """Raise Mismatch if the fast encoder and the reference differ on the samples."""
        unsafe = set(fast.unsafe(samples).tolist())
        samples = [text for index, text in enumerate(samples) if index not in unsafe]
        encoded, reference = self._encode_by_fast(fast, samples), self._encode_by_reference(samples)
        for index, text in enumerate(samples):
            if not np.array_equal(encoded.text_ids(index), reference.text_ids(index)):
                raise Mismatch(f"{self.name} differs on the text that begins {text[:80]!r}")


def _replace_texts(
    encoded: Encoded, indices: NDArray[np.int64], *, replacements: Encoded
) -> Encoded:
    ends = np.cumsum(encoded.lengths)
    new_ends = np.cumsum(replacements.lengths)
    parts = []
    position = 0
    for index, new_end, length in zip(indices, new_ends, replacements.lengths, strict=True):
        parts.append(encoded.ids[position : ends[index] - encoded.lengths[index]])
        parts.append(replacements.ids[new_end - length : new_end])
        position = ends[index]
    parts.append(encoded.ids[position:])
    lengths = encoded.lengths.copy()
    lengths[indices] = replacements.lengths
    return Encoded(np.concatenate(parts), lengths)


def text_size(texts: Sequence[str]) -> int:
    """Characters of the texts; bytes, if they are UTF-8 that is not decoded."""
    return texts.data.size if isinstance(texts, Utf8) else sum(map(len, texts))


def _first_sample(texts: Sequence[str]) -> list[str]:
    samples = []
    num_left = _FIRST_SAMPLE
    for text in texts:
        samples.append(text[:num_left])
        num_left -= len(text)
        if num_left <= 0:
            break
    return samples


def _samples(texts: Sequence[str], position: range) -> list[str]:
    """Return the text around every _SAMPLE_STEP-th character of the stream.

    Steps count from the beginning of the stream, so samples do not depend on the batches.
    """
    utf8 = texts if isinstance(texts, Utf8) else None
    sizes = np.fromiter(map(len, texts), np.int64, len(texts)) if utf8 is None else utf8.sizes
    ends = np.cumsum(sizes) + position.start
    first_point = (position.start // _SAMPLE_STEP + 1) * _SAMPLE_STEP
    points = np.arange(first_point, ends[-1] if len(ends) else 0, _SAMPLE_STEP)
    samples = []
    for point, index in zip(points, np.searchsorted(ends, points, side="right"), strict=True):
        offset = int(point - (ends[index] - sizes[index]))
        start = max(0, offset - _SAMPLE // 2)
        window = slice(start, start + _SAMPLE)
        samples.append(texts[index][window] if utf8 is None else utf8.window(index, window))
    return samples
