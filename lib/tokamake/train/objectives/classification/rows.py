"""Rows of a task: its files tokenized, and micro batches of them.

A row is [CLS] A [SEP], or [CLS] A [SEP] B [SEP]; a row that is too long loses tokens at its
end. A choice has such a sequence for each option.
Shape suffixes: B rows of a micro batch, O options of a row (1 unless the task is a choice), L
tokens.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokamake import plugins
from tokamake.config.finetune import FOLDER, FinetuneTask
from tokamake.data.corpus.raw_files import expand
from tokamake.data.tokenizers import Tokenizer, open_tokenizer
from tokamake.errors import UserError
from tokamake.runtime.cores import file_workers
from tokamake.train.objectives._encoder_rows import encoder_arrays
from tokamake.train.objectives._tasks import MULTIPLE
from tokamake.train.objectives.classification.data import Example

NO_CLASS = -100
"""Label of rows that only fill up a batch; in a regression, that is NaN."""
_NUM_AT_ONCE = 8192
"""Examples that are tokenized together."""
_SPECIAL = ("[CLS]", "[SEP]", "[PAD]")


class TaskRows(NamedTuple):
    """A micro batch of labeled rows. The loss of a step is the mean over its rows with a label."""

    tokens: npt.NDArray[np.int64]
    """(B × O, L) tokens, padding last."""
    types: npt.NDArray[np.int64]
    """(B × O, L) type of each token: 0 in the first text, 1 in the second one."""
    padding_mask: npt.NDArray[np.bool_]
    """(B × O, L) True for tokens, False for padding."""
    labels: npt.NDArray[Any]
    """(B,) int64 class or option, `NO_CLASS` without; or float32 number, NaN without."""
    num_labels: int
    """Rows with a label in the whole step, on all ranks."""

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Keyword arguments of `Model.forward`."""
        return encoder_arrays(self.types, self.padding_mask)


class SpecialTokens(NamedTuple):
    """Ids of the tokens of a row that stand for no text."""

    cls: int
    sep: int
    pad: int


def special_tokens(tokenizer: Tokenizer, path: Path) -> SpecialTokens:
    """Look up [CLS], [SEP] and [PAD]; `path` is the tokenizer's, for messages."""
    definition = json.loads(tokenizer.definition()) if tokenizer.package == "tokenizers" else {}
    vocabulary = definition.get("model", {}).get("vocab", {})
    known = dict(vocabulary) if isinstance(vocabulary, dict) else {}
    known |= {token["content"]: token["id"] for token in definition.get("added_tokens", ())}
    if missing := [text for text in _SPECIAL if text not in known]:
        raise UserError(
            f"tokenizer {path}: has no {', '.join(missing)}; give the tokenizer of a BERT"
        )
    return SpecialTokens(*(known[text] for text in _SPECIAL))


class RowLimits(NamedTuple):
    """Most tokens of a row."""

    sequence_length: int
    """Limit of both texts together, special tokens included."""
    first_tokens: int
    """Limit of the first text."""


class LabeledRows:
    """All rows of some files, in the order of the files.

    Attributes:
        labels: (rows,) int64 class or option of each row, `NO_CLASS` without; or float32 numbers,
            NaN without.
        num_options: options of a row; 1 unless the task is a choice.
        num_cut: sequences whose end was cut.
        first_unlabeled: file and line of the first row without a label; None: all have one.
    """

    def __init__(
        self,
        examples: Iterable[Example],
        task: FinetuneTask,
        *,
        tokenizer: Tokenizer,
        special: SpecialTokens,
        limits: RowLimits,
    ) -> None:
        self._special, self.num_cut = special, 0
        tokens: list[npt.NDArray[np.int32]] = []
        num_first: list[int] = []
        labels: list[float] = []
        label_of = _LabelReader(task)
        self.first_unlabeled: str | None = None
        for chunk in _chunks(examples):
            unlabeled = (example.where for example in chunk if example.label is None)
            self.first_unlabeled = self.first_unlabeled or next(unlabeled, None)
            labels += map(label_of, chunk)
            for first, second in _encoded(chunk, tokenizer, most_first=limits.first_tokens):
                row, is_cut = _joined(first, second, special=special, length=limits.sequence_length)
                tokens.append(np.array(row, np.int32))
                num_first.append(min(len(first) + 2, len(row)))
                self.num_cut += is_cut
        self._tokens, self._num_first = tokens, np.array(num_first, np.int64)
        is_number = task.head == "regression"
        self.labels: npt.NDArray[Any] = np.array(labels, np.float32 if is_number else np.int64)
        self.num_options = len(task.labels) if task.head == "choice" else 1

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def num_labeled(self) -> int:
        """Number of rows that have a label."""
        has_label = self.labels != NO_CLASS
        return int(np.sum(has_label & ~np.isnan(self.labels)))

    @property
    def digest(self) -> str:
        """sha256 of tokens and labels."""
        digest = hashlib.sha256(self.labels.tobytes())
        for tokens in self._tokens:
            digest.update(len(tokens).to_bytes(4, "little") + tokens.tobytes())
        return digest.hexdigest()

    @property
    def by_length(self) -> npt.NDArray[np.int64]:
        """(rows,) numbers of the rows, longest sequences first."""
        lengths = np.array([len(tokens) for tokens in self._tokens])
        return np.argsort(-lengths.reshape(len(self), -1).max(-1), kind="stable")

    def micro_batch(
        self,
        numbers: npt.NDArray[np.int64],
        size: int,
        *,
        num_labels: int,
        multiple: int = MULTIPLE,
        epoch: tuple[int, int] | None = None,  # noqa: ARG002
    ) -> TaskRows:
        """Make a micro batch, padded to its longest sequence.

        Args:
            size: rows of the batch; it is filled up with rows that have no label.
            num_labels: rows with a label in the whole step, on all ranks.
        """
        filled = [*numbers.tolist(), *[-1] * (size - len(numbers))]
        options = range(self.num_options)
        empty = np.array([self._special.cls], np.int32)
        sequences, num_first = [], []
        for number in filled:
            for option in options:
                place = number * self.num_options + option
                sequences.append(self._tokens[place] if number >= 0 else empty)
                num_first.append(self._num_first[place] if number >= 0 else 1)
        longest = max(map(len, sequences))
        length = -(-longest // multiple) * multiple
        tokens = np.full((len(sequences), length), self._special.pad, np.int64)
        for row, sequence in enumerate(sequences):
            tokens[row, : len(sequence)] = sequence
        lengths = np.array([len(sequence) for sequence in sequences])[:, None]
        places = np.arange(length)
        mask = places < lengths
        types = ((places >= np.array(num_first)[:, None]) & mask).astype(np.int64)
        nothing = NO_CLASS if self.labels.dtype == np.int64 else np.nan
        labels = np.array(
            [self.labels[number] if number >= 0 else nothing for number in filled],
            self.labels.dtype,
        )
        return TaskRows(tokens, types, mask, labels, num_labels)


class _LabelReader:
    """Turns labels of files into numbers."""

    def __init__(self, task: FinetuneTask) -> None:
        self._task = task
        self._numbers = {text: number for number, text in enumerate(task.labels)}

    def __call__(self, example: Example) -> float:
        label, where = example.label, example.where
        if self._task.head == "regression":
            try:
                return float(label) if label is not None else np.nan
            except ValueError:
                raise UserError(f"{where}: label {label!r}: not a number; fix it") from None
        if label is None:
            return NO_CLASS
        if label not in self._numbers:
            raise UserError(
                f"{where}: label {label!r}: {self._task.name} has "
                f"{', '.join(self._task.labels)}; fix it"
            )
        return self._numbers[label]


def read_rows(
    files: Iterable[str], task: FinetuneTask, *, tokenizer: Path, sequence_length: int
) -> LabeledRows:
    """Read and tokenize files, folders or patterns of a task."""
    opened = open_tokenizer(tokenizer)
    paths = expand([*files])
    read = plugins.load(FOLDER, task.name).read
    examples = (example for path in paths for example in read(path, task.own))
    rows = LabeledRows(
        examples,
        task,
        tokenizer=opened,
        special=special_tokens(opened, tokenizer),
        limits=RowLimits(
            sequence_length, task.own.get("max_question_tokens", max(1, sequence_length - 2))
        ),
    )
    if not len(rows):
        raise UserError(f"{', '.join(files)}: no rows; name other files")
    return rows


def _chunks(examples: Iterable[Example]) -> Iterator[list[Example]]:
    remaining = iter(examples)
    while chunk := [*islice(remaining, _NUM_AT_ONCE)]:
        yield chunk


def _encoded(
    examples: Sequence[Example], tokenizer: Tokenizer, *, most_first: int
) -> Iterator[tuple[list[int], list[int] | None]]:
    """Tokens of the first and the second text of each sequence, without special ones."""
    firsts = [text for example in examples for text in example.firsts]
    seconds = [example.second for example in examples if example.second is not None]
    workers = file_workers()
    encoded = iter(tokenizer.encode_batch(firsts, workers=workers))
    encoded_second = iter(tokenizer.encode_batch(seconds, workers=workers) if seconds else ())
    for example in examples:
        second = None if example.second is None else next(encoded_second)
        for _ in example.firsts:
            yield next(encoded)[:most_first], second


def _joined(
    first: list[int], second: list[int] | None, *, special: SpecialTokens, length: int
) -> tuple[list[int], bool]:
    """Tokens of a sequence, and whether its end was cut."""
    row = [special.cls, *first]
    if second is not None:
        row += [special.sep, *second]
    return [*row[: length - 1], special.sep], len(row) > length - 1
