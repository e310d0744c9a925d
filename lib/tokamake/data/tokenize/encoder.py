"""Encode texts to token ids as fast as possible, with the tokens of the reference tokenizer.

The reference tokenizer is the tokenizer's own package (`tokenizers` or `sentencepiece`). The
encoder uses lib/csrc where it is exact, and compares samples with the reference. The choice changes
no token. `tokenize` makes one Encoder per run.
"""

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokamake.data.readers import Utf8
from tokamake.data.tokenizers import Tokenizer, failure
from tokamake.data.tokenizers import _fast_encoder as fast_encoder
from tokamake.data.tokenizers._fast_encoder import FastEncoder
from tokamake.runtime.cores import set_malloc_options

# Lengths are in characters.
_FAST_THRESHOLD = 2_000_000  # from here on a fast encoder pays for the time it takes to load
_PART_TEXTS = 1 << 16  # per call of the reference tokenizer: each text takes some memory
_REFERENCE_CHUNK = 4_000_000  # per call of the reference tokenizer, which needs much memory
_MAX_THREADS = 4  # one reader and one writer thread cannot feed more
# Both encoders encode the first _FIRST_SAMPLE characters, then _SAMPLE characters around every
# _SAMPLE_STEP-th one. The reference is at most about 100 times slower: 1 in 4,000 costs at most a
# few percent.
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

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        workers: int,
        fast: bool = True,
        reason: str = "it is turned off",
    ) -> None:
        """Create an encoder; fast encoders and caches are loaded at first use.

        The number of threads, `workers`, does not change the tokens. `fast` allows a fast encoder
        where it is exact; `reason` says why it is not allowed.
        """
        os.environ["RAYON_NUM_THREADS"] = str(workers)  # `tokenizers` reads it once, at first use
        self._tokenizer = tokenizer
        self._workers = workers
        self._idle: list[FastEncoder] = []
        self._is_loaded = False
        self._fallback_reason = None if fast else reason  # None: not yet known
        self._num_characters = 0
        self._num_samples = 0
        self._seconds = 0.0
        self._lock = threading.Lock()
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
        package = FastEncoder.package if self._is_loaded else self._tokenizer.package
        return f"{package} {version(package)}"

    def explain(self, text_bytes: int) -> list[str]:
        """Lines that say which encoder was used for so many bytes, and how fast it was.

        They also say why the fast encoder was not used.
        """
        reason = self._fallback_reason
        if self._is_loaded:
            checked = f"{self._tokenizer.package} {version(self._tokenizer.package)}"
            why = f"the fast encoder; equal to {checked} on {self._num_samples:,} samples"
        elif reason:
            why = f"not the fast encoder: {reason}"
        else:
            why = (
                f"not the fast encoder: below {_FAST_THRESHOLD:,} characters it does not save time"
            )
        speed = text_bytes / max(self._seconds, 1e-9) / 1e6
        per = "on each thread" if self._is_loaded else f"on {self._workers} threads together"
        return [f"encoder: {self.name}, {why}", f"speed: {speed:,.1f} MB/s of text {per}"]

    @property
    def known_fallback_reason(self) -> str:
        """`fallback_reason`, or empty if there was too little text to look for a fast encoder."""
        return self._fallback_reason or ""

    @property
    def fallback_reason(self) -> str:
        """Why no fast encoder can be used, as a clause; empty if one can."""
        with self._lock:
            if self._fallback_reason is None:
                self._fallback_reason = fast_encoder.refusal(self._tokenizer)
                if not self._fallback_reason:
                    _reuse_memory()
            return self._fallback_reason

    def reserve(self, texts: Sequence[str]) -> range:
        """Reserve the next positions in the stream of all texts, in `text_size` units.

        Call it in the order of the texts, then encode them in any order and thread.
        """
        start = self._num_characters
        self._num_characters += text_size(texts)
        if self._fallback_reason is None and self._num_characters >= _FAST_THRESHOLD:
            # Decide before threads start to encode: `_reuse_memory` changes their allocator.
            _ = self.fallback_reason
        return range(start, self._num_characters)

    def __call__(self, texts: Sequence[str], position: range | None = None) -> Encoded:
        """Encode texts in order, and special tokens in a text as the reference encodes them.

        `position` is a stream position from `reserve`, of these texts or of the documents that they
        were made from; None: they come next. It decides which texts are checked. Mismatch: the fast
        encoder failed, or differs from the reference on a sample.
        """
        position = self.reserve(texts) if position is None else position
        started = time.perf_counter()
        encoded = self._encode(texts, position)
        with self._lock:
            self._seconds += time.perf_counter() - started
        return encoded

    def _encode(self, texts: Sequence[str], position: range) -> Encoded:
        if position.stop < _FAST_THRESHOLD or self.fallback_reason:
            return self._encode_by_reference(texts)
        with self._borrow() as fast:
            if fast is None:
                return self._encode_by_reference(texts)
            if position.start < _FAST_THRESHOLD:
                self._check(fast, _first_sample(texts))
            self._check(fast, _samples(texts, position))
            return self._encode_by_fast(fast, texts)

    @contextmanager
    def _borrow(self) -> Iterator[FastEncoder | None]:
        """Lend a fast encoder to this thread; None if it cannot be loaded."""
        try:
            fast = self._idle.pop()
        except IndexError:
            loaded = self._load()
            if loaded is None:
                yield None
                return
            fast = loaded
        try:
            yield fast
        finally:
            self._idle.append(fast)

    def _load(self) -> FastEncoder | None:
        try:
            with self._lock:  # one at a time: loading needs much memory for a moment
                fast = FastEncoder(self._tokenizer)
        except Exception as error:
            self._fallback_reason = f"{FastEncoder.package} cannot load it ({failure(error)})"
            if self._is_loaded:
                # A shard has one encoder: its manifest names it. Encode the shard again.
                raise Mismatch(self._fallback_reason) from None
            return None
        self._is_loaded = True
        return fast

    def _encode_by_reference(self, texts: Sequence[str]) -> Encoded:
        with self._reference_lock:  # keeps its memory independent of the number of threads
            return self._encode_in_chunks(list(texts))

    def _encode_in_chunks(self, texts: list[str]) -> Encoded:
        ids = [np.empty(0, np.uint32)]
        lengths = [np.empty(0, np.int64)]
        for chunk in _in_parts(texts):
            rows = self._tokenizer.encode_batch(chunk, workers=self._workers)
            lengths.append(np.fromiter(map(len, rows), np.int64, len(rows)))
            flat = chain.from_iterable(rows)
            ids.append(np.fromiter(flat, np.uint32, int(lengths[-1].sum())))
            del rows, flat  # free the lists of ints before the next chunk is encoded
        return Encoded(np.concatenate(ids), np.concatenate(lengths))

    def _encode_by_fast(self, fast: FastEncoder, texts: Sequence[str]) -> Encoded:
        try:
            if isinstance(texts, Utf8):
                return Encoded(*fast.encode_utf8(texts.data, texts.ends))
            return Encoded(*fast.encode(list(texts)))
        except Exception as error:
            raise Mismatch(f"{self.name} failed ({failure(error)})") from None

    def _check(self, fast: FastEncoder, samples: list[str]) -> None:
        """Raise Mismatch if the fast encoder and the reference differ on the samples."""
        encoded, reference = self._encode_by_fast(fast, samples), self._encode_by_reference(samples)
        for index, text in enumerate(samples):
            if not np.array_equal(encoded.text_ids(index), reference.text_ids(index)):
                raise Mismatch(f"{self.name} differs on the text that begins {text[:80]!r}")
        with self._lock:
            self._num_samples += len(samples)


def _in_parts(texts: list[str]) -> Iterator[list[str]]:
    """Split a list into nonempty parts of at least _REFERENCE_CHUNK, or of _PART_TEXTS texts."""
    start = size = 0
    for index, text in enumerate(texts):
        size += len(text)
        is_full = size >= _REFERENCE_CHUNK or index + 1 - start == _PART_TEXTS
        if is_full or index + 1 == len(texts):
            yield texts[start : index + 1]
            start, size = index + 1, 0


def _reuse_memory() -> None:
    """Make this process keep the memory that it frees, in one pool for all threads.

    The buffers of each batch then use the same pages. To get new pages from the kernel takes a
    tenth of the total time. Threads that already run keep their own pools. Allocation in many
    threads at once becomes slower.
    """
    # Unlike `keep_freed_memory`, for one large process: buffers above 32 MB go back to the kernel.
    set_malloc_options(arena_max=1, mmap_threshold=1 << 25, trim_threshold=1 << 28)


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
