"""Texts to token ids, as fast as can be, with the tokens of the tokenizer's own package.

By lib/csrc where it is exact, else by gigatoken where that is, else by their own package.
`tokenize` makes one Encoder a run and feeds it blocks of texts; what did the work changes no token.
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

_ENOUGH = 2_000_000  # characters from which on loading pays: it takes 0.1 to 0.5 s
_CHUNK = 4_000_000  # characters that a tokenizer's own package gets at once: it needs much memory
_THREADS = 4  # at once, at most: reading and writing, one thread more, keep up with no more
_RENEWAL = 192_000_000  # characters a thread after which gigatoken's caches are thrown away
_WORDS = 64 << 20  # bytes of words whose tokens are remembered
_FIRST = 100_000  # characters at the beginning that both encode
_STEP = 8_000_000  # then both encode the text around every so many characters: their own package
_WINDOW = 2_000  # needs a hundred times longer, so that one character in 4,000 is a few percent


class Encoded(NamedTuple):
    """Token ids of a list of texts."""

    ids: NDArray[np.uint32]
    """(tokens,) of all texts one after the other."""
    lengths: NDArray[np.int64]
    """(texts,) tokens of each."""

    def of(self, number: int) -> NDArray[np.uint32]:
        """Token ids of one text; slow if asked for many."""
        end = int(self.lengths[: number + 1].sum())
        return self.ids[end - int(self.lengths[number]) : end]


class Mismatch(Exception):
    """Other tokens came than from the tokenizer's own package: encode anew with fast=False."""


class Encoder:
    """Encodes blocks of texts; several threads may ask at once."""

    def __init__(self, tokenizer: Tokenizer, *, workers: int, fast: bool = True) -> None:
        """Make an encoder; what is slow to load is loaded when needed.

        Args:
            tokenizer: an opened tokenizer.
            workers: threads; what is encoded does not depend on it.
            fast: use more than the tokenizer's own package, where it is exact.
        """
        os.environ["RAYON_NUM_THREADS"] = str(workers)  # `tokenizers` reads it once, at first use
        self._tokenizer = tokenizer
        self._workers = workers
        self._fast: type[ByteLevelEncoder | Gigatoken] = Gigatoken
        self._free: list[ByteLevelEncoder | Gigatoken] = []
        self._loaded = False
        self._lent = 0
        self._remembered = 0  # characters since gigatoken's caches were empty
        self._words: Words | Literal[False] | None = None  # not asked for yet
        self._reason = None if fast else "it is turned off"
        self._characters = 0
        self._lock = threading.Lock()
        self._turn = threading.Condition()
        self._package_lock = threading.Lock()

    @property
    def threads(self) -> int:
        """How many callers are worth having, by what is known of the tokenizer so far.

        A tokenizer's own package takes one text list after the other, with threads of its own.
        """
        return 1 if self._reason else min(self._workers, _THREADS)

    @property
    def name(self) -> str:
        """Package and version that most texts so far were encoded by."""
        package = self._fast.package if self._loaded else self._tokenizer.package
        return f"{package} {version(package)}"

    @property
    def refused(self) -> str:
        """The same as `reason`, if there has been text enough to ask for it; else empty."""
        return self._reason or ""

    @property
    def reason(self) -> str:
        """Why only the tokenizer's own package can be used, in one clause; empty: more can."""
        with self._lock:
            if self._reason is None:
                if not byte_level.refusal(self._tokenizer):
                    self._fast, reason = ByteLevelEncoder, ""
                else:
                    reason = gigatoken.refusal(self._tokenizer)
                if not reason:
                    reuse_memory()
                self._reason = reason
            return self._reason

    def place(self, texts: Sequence[str]) -> range:
        """Where these texts, by their `extent`, stand in the stream of all: they come next."""
        before = self._characters
        self._characters += extent(texts)
        if self._reason is None and self._characters >= _ENOUGH:
            _ = self.reason  # before there are threads to encode, for it turns to their memory
        return range(before, self._characters)

    def __call__(self, texts: Sequence[str], place: range | None = None) -> Encoded:
        """Encode texts, in order; special tokens written in them become what their package makes.

        Args:
            texts: documents without lone surrogates.
            place: where they stand in the stream, from `place`, for what they were made from may
                be asked in its stead; without it, they come next. It decides which are samples.

        Raises:
            Mismatch: the fast one failed, or differs from the tokenizer's own package on a sample.
        """
        place = self.place(texts) if place is None else place
        if place.stop < _ENOUGH or self.reason:
            return self._by_package(texts)
        with self._borrowed(len(place)) as fast:
            if fast is None:
                return self._by_package(texts)
            if not isinstance(fast, ByteLevelEncoder):
                texts = list(texts)
            if place.start < _ENOUGH:
                self._check(fast, _beginning(texts))
            self._check(fast, _windows(texts, place))
            return self._by_both(fast, texts)

    @contextmanager
    def _borrowed(self, characters: int) -> Iterator[ByteLevelEncoder | Gigatoken | None]:
        """One for this thread and this many characters; None if it cannot be loaded."""
        with self._turn:
            self._remembered += characters if self._fast is Gigatoken else 0
            # Thrown away together, for while others are full is the worst time to load one.
            while self._remembered > _RENEWAL * self.threads and self._lent:
                self._turn.wait()
            if self._remembered > _RENEWAL * self.threads:
                self._free.clear()
                self._remembered = characters
            self._lent += 1
            fast = self._free.pop() if self._free else None
        try:
            fast = fast or self._load()
            yield fast
        finally:
            with self._turn:
                self._lent -= 1
                if fast is not None:
                    self._free.append(fast)
                self._turn.notify_all()

    def _load(self) -> ByteLevelEncoder | Gigatoken | None:
        try:
            with self._lock:  # one at a time, for it takes much memory for a moment
                fast = self._fast(self._tokenizer)
        except BaseException as error:
            self._reason = f"{self._fast.package} cannot load it ({failure(error)})"
            if self._loaded:  # what it has encoded is encoded anew, for a shard has one encoder
                raise Mismatch(self._reason) from None
            return None
        self._loaded = True
        return fast

    def _by_package(self, texts: Sequence[str]) -> Encoded:
        texts = list(texts)
        with self._package_lock:  # what it needs of memory does not grow with the threads here
            if self._words is None:
                rules = self._tokenizer.word_rules()
                self._words = Words(*rules, capacity=_WORDS) if rules else False
            if self._words:
                return Encoded(*self._words.finish(*self._in_parts(self._words.split(texts))))
            return self._in_parts(texts)

    def _in_parts(self, texts: list[str]) -> Encoded:
        ids = [np.empty(0, np.uint32)]
        lengths = [np.empty(0, np.int64)]
        for part in in_parts(texts, _CHUNK):
            rows = self._tokenizer.encode_batch(part, workers=self._workers)
            lengths.append(np.fromiter(map(len, rows), np.int64, len(rows)))
            flat = chain.from_iterable(rows)
            ids.append(np.fromiter(flat, np.uint32, int(lengths[-1].sum())))
            del rows, flat  # else they stay while the next part is encoded
        return Encoded(np.concatenate(ids), np.concatenate(lengths))

    def _by_fast(self, fast: ByteLevelEncoder | Gigatoken, texts: Sequence[str]) -> Encoded:
        try:
            if isinstance(fast, ByteLevelEncoder) and isinstance(texts, Utf8):
                return Encoded(*fast.encode_utf8(texts.data, texts.ends))
            return Encoded(*fast.encode(list(texts)))
        except BaseException as error:
            raise Mismatch(f"{self.name} failed ({failure(error)})") from None

    def _by_both(self, fast: ByteLevelEncoder | Gigatoken, texts: Sequence[str]) -> Encoded:
        """By the fast one, but for the texts that it may encode differently."""
        unsafe = fast.unsafe(texts)
        if not len(unsafe):
            return self._by_fast(fast, texts)
        rest = list(texts)
        for number in unsafe:
            rest[number] = ""
        aside = self._by_package([texts[number] for number in unsafe])
        return _replaced(self._by_fast(fast, rest), unsafe, aside)

    def _check(self, fast: ByteLevelEncoder | Gigatoken, samples: list[str]) -> None:
        """Compare both packages on some texts.

        Raises:
            Mismatch: they differ.
        """
        unsafe = set(fast.unsafe(samples).tolist())
        samples = [text for number, text in enumerate(samples) if number not in unsafe]
        ours, theirs = self._by_fast(fast, samples), self._by_package(samples)
        for number, text in enumerate(samples):
            if not np.array_equal(ours.of(number), theirs.of(number)):
                raise Mismatch(f"{self.name} differs on the text that begins {text[:80]!r}")


def _replaced(all_of: Encoded, numbers: NDArray[np.int64], by: Encoded) -> Encoded:
    """Put the tokens of `by` in the places of the texts with these numbers."""
    ends = np.cumsum(all_of.lengths)
    new_ends = np.cumsum(by.lengths)
    parts = []
    position = 0
    for number, new_end, length in zip(numbers, new_ends, by.lengths, strict=True):
        parts.append(all_of.ids[position : ends[number] - all_of.lengths[number]])
        parts.append(by.ids[new_end - length : new_end])
        position = ends[number]
    parts.append(all_of.ids[position:])
    lengths = all_of.lengths.copy()
    lengths[numbers] = by.lengths
    return Encoded(np.concatenate(parts), lengths)


def extent(texts: Sequence[str]) -> int:
    """Characters of texts; of those at hand in UTF-8, their bytes."""
    return texts.data.size if isinstance(texts, Utf8) else sum(map(len, texts))


def _beginning(texts: Sequence[str]) -> list[str]:
    """The first texts, _FIRST characters of them."""
    samples = []
    room = _FIRST
    for text in texts:
        samples.append(text[:room])
        room -= len(text)
        if room <= 0:
            break
    return samples


def _windows(texts: Sequence[str], place: range) -> list[str]:
    """Text around every _STEP-th character of the whole stream, wherever blocks begin and end."""
    utf8 = texts if isinstance(texts, Utf8) else None
    sizes = np.fromiter(map(len, texts), np.int64, len(texts)) if utf8 is None else utf8.sizes
    ends = np.cumsum(sizes) + place.start
    points = np.arange((place.start // _STEP + 1) * _STEP, ends[-1] if len(ends) else 0, _STEP)
    samples = []
    for point, number in zip(points, np.searchsorted(ends, points, side="right"), strict=True):
        inside = int(point - (ends[number] - sizes[number]))
        first = max(0, inside - _WINDOW // 2)
        window = slice(first, first + _WINDOW)
        samples.append(texts[number][window] if utf8 is None else utf8.window(number, window))
    return samples
