"""Questions of files with their passages, tokenized, and micro batches of them.

Shape suffixes: B questions of a micro batch, C passages of a question: a positive, then negatives;
P most positives of a question, L tokens.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokamake import plugins
from tokamake.config.finetune import FOLDER, FinetuneTask
from tokamake.data.corpus.raw_files import expand
from tokamake.data.samples.sentence_masking import special_tokens
from tokamake.data.tokenizers import Tokenizer, open_tokenizer
from tokamake.errors import UserError
from tokamake.runtime.cores import file_workers
from tokamake.train.objectives._tasks import MULTIPLE
from tokamake.train.objectives.ict.blocks import with_special_tokens
from tokamake.train.objectives.retrieval.data import RetrievalPassage, RetrievalQuestion

NO_PASSAGE = 0
"""Number in place of a passage that a question lacks; passages count from 1."""
_NUM_AT_ONCE = 2048
"""Questions that are tokenized together."""
_NUM_SPECIAL = 3
_SHORTEST = _NUM_SPECIAL + 2

Tokens = npt.NDArray[np.int64]


class QuestionBatch(NamedTuple):
    """A micro batch of questions with their passages."""

    tokens: Tokens
    """(B, L) tokens of questions, padding last."""
    is_padding: npt.NDArray[np.bool_]
    """(B, L) True for padding."""
    passages: Tokens
    """(B × C, L) tokens."""
    is_passage_padding: npt.NDArray[np.bool_]
    labels: npt.NDArray[np.int64]
    """(B, C + P) numbers of the passages, and of all positives of the question; `NO_PASSAGE` where
    it has fewer. Rows that fill up the batch have none."""
    num_labels: int
    """Questions of the whole step, on all ranks."""

    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """Keyword arguments of `Model.forward`."""
        return {
            "document_ids": self.is_padding.astype(np.int64),
            "block_tokens": self.passages,
            "block_document_ids": self.is_passage_padding.astype(np.int64),
        }


class QuestionRows:
    """All questions of some files, in the order of the files; see `RowsOfFiles`.

    Equal passages have one number. Rows with the same question share their positives.

    Attributes:
        num_passages: C.
    """

    num_options = 1
    first_unlabeled = None

    def __init__(
        self,
        questions: Iterable[RetrievalQuestion],
        task: FinetuneTask,
        *,
        tokenizer: Tokenizer,
        special: Mapping[str, int],
        sequence_length: int,
    ) -> None:
        self._special, self._length = special, sequence_length
        self._tokenizer, self.num_cut = tokenizer, 0
        self.num_passages = 1 + task.own["hard_negatives"]
        self._draws_positive = task.own["positive"] == "drawn"
        self._questions: list[npt.NDArray[np.int32]] = []
        self._passages: list[npt.NDArray[np.int32]] = []
        self._own: list[npt.NDArray[np.int64]] = []
        """Positives of each row, in the order of the file."""
        self._negatives: list[npt.NDArray[np.int64]] = []
        numbers: dict[bytes, int] = {}
        texts: list[str] = []
        remaining = iter(questions)
        while chunk := [*islice(remaining, _NUM_AT_ONCE)]:
            texts += [question.text for question in chunk]
            self._add(chunk, numbers)
        of_text: dict[str, set[int]] = defaultdict(set)
        for text, own in zip(texts, self._own, strict=True):
            of_text[text] |= {*own.tolist()}
        most = max(map(len, of_text.values()), default=0)
        self._positives = np.full((len(texts), most), NO_PASSAGE, np.int64)
        for row, text in zip(self._positives, texts, strict=True):
            row[: len(of_text[text])] = sorted(of_text[text])

    def _add(self, questions: list[RetrievalQuestion], numbers: dict[bytes, int]) -> None:
        new: list[RetrievalPassage] = []

        def number_of(passage: RetrievalPassage) -> int:
            key = hashlib.blake2b("\0".join(passage).encode(), digest_size=16).digest()
            if key not in numbers:
                numbers[key] = len(numbers) + 1
                new.append(passage)
            return numbers[key]

        for question in questions:
            for kept, passages in (
                (self._own, question.positives),
                (self._negatives, question.negatives),
            ):
                kept.append(np.array([number_of(passage) for passage in passages], np.int64))
        encoded = self._encoded([question.text for question in questions])
        self._questions += [self._framed(tokens, None) for tokens in encoded]
        titles = self._encoded([passage.title for passage in new])
        texts = self._encoded([passage.text for passage in new])
        self._passages += [self._framed(*each) for each in zip(texts, titles, strict=True)]

    def _encoded(self, texts: list[str]) -> list[list[int]]:
        if not texts:
            return []
        return [*self._tokenizer.encode_batch(texts, workers=file_workers())]

    def _framed(self, text: list[int], title: list[int] | None) -> npt.NDArray[np.int32]:
        head = None if title is None else np.array(title[: (self._length - _NUM_SPECIAL) // 2])
        row = with_special_tokens(np.array(text), head, tokens=self._special, length=self._length)
        whole = len(text) + 2 + (0 if title is None else len(title) + 1)
        self.num_cut += whole > len(row)
        return row.astype(np.int32)

    def __len__(self) -> int:
        return len(self._questions)

    @property
    def num_labeled(self) -> int:
        """Number of rows: each has a positive."""
        return len(self)

    @property
    def num_short(self) -> int:
        """Rows with fewer negatives than a sample has."""
        return sum(len(each) + 1 < self.num_passages for each in self._negatives)

    @property
    def digest(self) -> str:
        """sha256 of tokens, positives and negatives."""
        digest = hashlib.sha256()
        for arrays in (self._questions, self._passages, self._own, self._negatives):
            for array in arrays:
                digest.update(len(array).to_bytes(4, "little") + array.tobytes())
        return digest.hexdigest()

    @property
    def by_length(self) -> npt.NDArray[np.int64]:
        """(N,) numbers of the rows, longest texts first."""
        lengths = np.array([0, *map(len, self._passages)])
        longest = lengths[self.labels[:, : self.num_passages]].max(1)
        return np.argsort(-longest, kind="stable")

    @property
    def labels(self) -> npt.NDArray[np.int64]:
        """(N, C + P) as in `QuestionBatch`, without draws."""
        return np.stack([self._label(number, None) for number in range(len(self))])

    def _label(self, number: int, epoch: tuple[int, int] | None) -> npt.NDArray[np.int64]:
        """(C + P,) numbers of passages; see `QuestionBatch`."""
        own, negatives = self._own[number], self._negatives[number]
        place = 0
        if epoch is not None:
            # A generator for each row: its draws depend on no other row, and on no rank.
            generator = np.random.default_rng((*epoch, number))
            negatives = negatives[generator.permutation(len(negatives))]
            place = int(generator.integers(len(own))) if self._draws_positive else 0
        label = np.full(self.num_passages + self._positives.shape[1], NO_PASSAGE, np.int64)
        label[0] = own[place]
        chosen = negatives[: self.num_passages - 1]
        label[1 : 1 + len(chosen)] = chosen
        label[self.num_passages :] = self._positives[number]
        return label

    def micro_batch(
        self,
        numbers: npt.NDArray[np.int64],
        size: int,
        *,
        num_labels: int,
        multiple: int = MULTIPLE,
        epoch: tuple[int, int] | None = None,
    ) -> QuestionBatch:
        """Make a micro batch; see `RowsOfFiles`."""
        labels = np.full((size, self.num_passages + self._positives.shape[1]), NO_PASSAGE, np.int64)
        for row, number in enumerate(numbers.tolist()):
            labels[row] = self._label(number, epoch)
        empty = np.array([self._special["cls"]], np.int32)
        questions = [self._questions[number] for number in numbers.tolist()]
        questions += [empty] * (size - len(questions))
        passages = [
            empty if number == NO_PASSAGE else self._passages[number - 1]
            for number in labels[:, : self.num_passages].flatten().tolist()
        ]
        padded = [self._padded(texts, multiple) for texts in (questions, passages)]
        return QuestionBatch(*padded[0], *padded[1], labels, num_labels)

    def _padded(
        self, texts: list[npt.NDArray[np.int32]], multiple: int
    ) -> tuple[Tokens, npt.NDArray[np.bool_]]:
        lengths = np.array([*map(len, texts)])
        width = -(-int(lengths.max()) // multiple) * multiple
        is_padding = np.arange(width) >= lengths[:, None]
        tokens = np.full((len(texts), width), self._special["pad"], np.int64)
        tokens[~is_padding] = np.concatenate(texts)
        return tokens, is_padding


def read_rows(
    files: Iterable[str], task: FinetuneTask, *, tokenizer: Path, sequence_length: int
) -> QuestionRows:
    """Read and tokenize files, folders or patterns of questions."""
    if sequence_length < _SHORTEST:
        raise UserError(
            f"train.sequence_length: {sequence_length}: too small for [CLS], title, [SEP], text "
            f"and [SEP]; give {_SHORTEST} or more"
        )
    opened = open_tokenizer(tokenizer)
    rows = QuestionRows(
        _questions(expand([*files]), task),
        task,
        tokenizer=opened,
        special=special_tokens(opened, ("pad", "cls", "sep"), path=tokenizer),
        sequence_length=sequence_length,
    )
    if not len(rows):
        raise UserError(
            f"{', '.join(files)}: no question with a positive passage; name other files"
        )
    return rows


def _questions(paths: Iterable[Path], task: FinetuneTask) -> Iterator[RetrievalQuestion]:
    """Questions that have a positive passage; DPR leaves out other ones, too."""
    read = plugins.load(FOLDER, task.name).read
    for path in paths:
        num_without = 0
        for question in read(path, task.own):
            if question.positives:
                yield question
            num_without += not question.positives
        if num_without:
            print(f"{path}: {num_without:,} questions without a positive left out", flush=True)
