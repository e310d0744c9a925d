"""Filter `decontaminate`: drop or cut documents that contain texts of evaluation sets.

Rule `ngrams`: a document is contaminated if it shares 13 consecutive words with an item of a set,
as in GPT-3 (Brown et al., 2020, https://arxiv.org/abs/2005.14165, appendix C) and lm-eval. Items of
8 to 12 words count as a whole. The rule, and the cut, follow Megatron-LM's
tools/openwebtext/filter_ngrams.py, which also keeps n-grams of at least 10 documents. Rule `idf`: a
passage holds most of an item's 5-grams, weighted by IDF (`_idf_index.py`).
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, PrivateAttr, model_validator

from tokamake.data.filters import Document, DocumentFilter, Drop, out_of_bounds
from tokamake.data.filters._evaluation_sets import EvaluationSets, read_items
from tokamake.data.filters._idf_index import NORMAL_WORDS, IdfIndex
from tokamake.data.filters._words import word_characters
from tokamake.errors import UserError

if TYPE_CHECKING:
    from tokamake.config.tasks import TaskSettings

_SENTENCE_END = re.compile("[.!?。！？]")
_FIRST_WORD, _END_WORD, _BEGIN, _END, _SET = range(5)
"""Columns of `NgramIndex.find`."""


class Filter(DocumentFilter):
    """Drop or cut documents that share long sequences of words with evaluation sets."""

    bare_option = "files"

    files: EvaluationSets = Field(default_factory=dict)
    """Name of each evaluation set, with its files: arc: arc.jsonl, or a section with `path` and
    `fields`."""
    tasks: tuple[str, ...] | None = None
    """Names in `evaluate.tasks` of the config whose files are further sets. Without this option and
    `files`: all tasks."""
    action: Literal["drop", "cut"] = "drop"
    """Drop a contaminated document, or cut the shared text and its surroundings out of it."""
    rule: Literal["ngrams", "idf"] = "ngrams"
    """ngrams: a document shares `ngram_words` consecutive words with an item. idf: a passage holds
    most of an item's n-grams, weighted by how rare they are among the items."""
    ngram_words: Annotated[int, Field(ge=1)] | None = None
    """Number of words of an n-gram. null: 13, and 5 for rule idf."""
    min_words: Annotated[int, Field(ge=1)] = 8
    """Shorter texts of evaluation sets are ignored. With rule ngrams, texts shorter than
    `ngram_words` count as a whole."""
    score: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Rule idf: share of an item's n-grams, by their IDF, that contaminates. Items of 20 words or
    less need all, and items of less than 50 words a share between."""
    cut_characters: Annotated[int, Field(ge=0)] = 200
    """Characters to cut before and after the shared text, and on to the next sentence end."""
    max_piece_characters: Annotated[int, Field(ge=0)] = 200
    """Pieces with at most this number of characters between two cuts are removed too."""
    max_pieces: Annotated[int, Field(ge=1)] = 10
    """Documents that cuts divide into more pieces are dropped."""
    _index: Any = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _check_rule(self) -> "Filter":
        if self.rule == "idf" and self.min_words < self._num_words:
            raise ValueError(f"min_words: {self.min_words}: below ngram_words {self._num_words}")
        if self.rule == "ngrams" and self.min_words > self._num_words:
            raise ValueError(f"min_words: {self.min_words}: above ngram_words {self._num_words}")
        if self.rule == "ngrams" and "score" in self.model_fields_set:
            raise ValueError(f"score: {self.score:g}: no effect on rule ngrams; remove it")
        return self

    @property
    def _num_words(self) -> int:
        return self.ngram_words or (13 if self.rule == "ngrams" else 5)

    @property
    def input_files(self) -> tuple[Path, ...]:
        return tuple(path for each in self.files.values() for path in each.paths)

    @classmethod
    def with_tasks(
        cls, options: Mapping[str, Any], tasks: "Mapping[str, TaskSettings]"
    ) -> Mapping[str, Any]:
        """Return the options with the files of evaluation tasks as sets."""
        if "files" in options and options.get("tasks") is None:
            return options
        names = options.get("tasks")
        sets: dict[str, Any] = {}
        for name in tasks if names is None else names:
            sets |= _sets_of(name, tasks)
        further = {key: value for key, value in options.items() if key not in ("files", "tasks")}
        if not (sets := {**sets, **options.get("files", {})}):
            raise UserError("decontaminate: evaluate.tasks is empty; name evaluation sets in files")
        return {"files": sets, **further}

    def check_inputs(self) -> None:
        """Check the fields of the first item of each file."""
        for evaluation_set in self.files.values():
            for path in evaluation_set.paths:
                one = evaluation_set.model_copy(update={"path": (str(path),)})
                next(read_items(one), None)

    def setup(self) -> None:
        """Read the evaluation sets.

        Raises:
            UserError: no set is named, a file or a field is missing, or all texts of a set are
                shorter than `min_words`.
        """
        if not self.files or self.tasks is not None:
            raise UserError("tasks are known to the workflow only; name evaluation sets in files")
        index = self._new_index()
        for number, (name, evaluation_set) in enumerate(self.files.items()):
            added = [index.add(item, number) for item in read_items(evaluation_set)]
            if not any(added):
                raise UserError(
                    f"{', '.join(evaluation_set.path)}: {name} has no text of at least "
                    f"{self.min_words} words; fix fields, or lower min_words"
                )
        index.finish()
        self._index = index

    def _new_index(self) -> "_SharedNgrams | IdfIndex":
        if self.rule == "idf":
            return IdfIndex(ngram_words=self._num_words, min_words=self.min_words, score=self.score)
        return _SharedNgrams(longest=self._num_words, shortest=self.min_words)

    def apply(self, document: Document) -> Drop | None:
        """Search for texts of the sets. The number of a drop is the share of the document's words
        that are shared (ngrams), or the score (idf)."""
        shares, spans = self._index.overlaps(document.text)
        if not shares:
            return None
        names = [*self.files]
        for number, share in shares.items():
            document.metrics[f"overlap with {names[number]}"] = share
        worst = max(shares, key=shares.__getitem__)
        pieces = self._pieces(document.text, spans) if self.action == "cut" else []
        if self.action == "cut":
            quantity = f"number of pieces without texts of {names[worst]}"
            if drop := out_of_bounds(quantity, len(pieces), least=1, most=self.max_pieces):
                return drop
        else:
            return Drop(f"overlap with {names[worst]} {self._limit()}", shares[worst])
        document.text = "\n\n".join(pieces)
        return None

    def _limit(self) -> str:
        if self.rule == "ngrams":
            return "above 0"
        short = f" (items below {NORMAL_WORDS} words: up to 1)" if self.score < 1 else ""
        return f"at least {self.score:g}{short}"

    def _pieces(self, text: str, spans: Iterable[tuple[int, int]]) -> list[str]:
        """Return the pieces of a text that remain after cuts."""
        longest_first = sorted(spans, key=lambda span: (span[0], -span[1]))
        pieces = cut(text, longest_first, characters=self.cut_characters)
        return [piece for piece in pieces if len(piece) > self.max_piece_characters]


class _SharedNgrams:
    """Rule `ngrams`: all n-grams of the sets."""

    def __init__(self, *, longest: int, shortest: int) -> None:
        from tokamake._csrc import NgramIndex

        self._index = NgramIndex(word_characters(), longest=longest, shortest=shortest)

    def add(self, texts: Iterable[str], set: int) -> bool:
        """Add the texts of an item. False: all are shorter than `min_words`."""
        added = [self._index.add(text, set) for text in texts]
        return any(added)

    def finish(self) -> None:
        self._index.finish()

    def overlaps(self, text: str) -> tuple[dict[int, float], list[tuple[int, int]]]:
        """Number of each set that a text overlaps → share of its words; and the shared spans."""
        num_words, matches = self._index.find(text)
        shares = {
            number: _covered_words(matches[matches[:, _SET] == number]) / num_words
            for number in np.unique(matches[:, _SET]).tolist()
        }
        return shares, [*map(tuple, matches[:, [_BEGIN, _END]].tolist())]


def cut(text: str, spans: Iterable[tuple[int, int]], *, characters: int) -> list[str]:
    """Cut spans out of a text, with at least `characters` on both sides, in whole sentences.

    `spans` are sorted. The piece before a cut ends with a sentence; the cut ends with one, or at
    the end of the text.
    """
    ends = [match.start() for match in _SENTENCE_END.finditer(text)]
    pieces, start = [], 0
    for begin, end in spans:
        if begin < start:  # cut already
            continue
        before = bisect_right(ends, begin - characters) - 1
        if before >= 0 and ends[before] >= start:
            pieces.append(text[start : ends[before] + 1])
        after = bisect_left(ends, end + characters)
        start = ends[after] + 1 if after < len(ends) else len(text)
    return [*pieces, text[start:]]


def _covered_words(matches: npt.NDArray[np.int64]) -> int:
    """Count the words in n-grams, which may overlap; they are sorted by their first words."""
    first, end = matches[:, _FIRST_WORD], np.maximum.accumulate(matches[:, _END_WORD])
    before = np.concatenate([[0], end[:-1]])
    return int(np.maximum(end - np.maximum(first, before), 0).sum())


def _sets_of(name: str, tasks: "Mapping[str, TaskSettings]") -> dict[str, Any]:
    """Options of the evaluation sets that a task reads, by their names."""
    if name not in tasks:
        known = ", ".join(tasks) or "nothing"
        raise UserError(f"decontaminate: tasks: {name}: evaluate.tasks has {known}; fix the name")
    task = tasks[name]
    try:
        if (sets := task.evaluation_sets()) is not None:
            return {f"{name}/{each}": options for each, options in sets.items()}
    except UserError as error:
        raise UserError(f"decontaminate: task {name}: {error}") from None
    if not task.data or task.is_fetched:
        raise UserError(
            f"decontaminate: task {name} has no local files; list the other tasks in `tasks`, and "
            f"name local copies of the data of {name} in `files`"
        )
    return {name: {"path": [*task.data], "fields": [task.own.get("text_key", "text")]}}
