"""The table of corpora: each row has the files, text keys, format and share of a corpus."""

import math
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, Field, PrivateAttr, model_validator

from tokamake import plugins
from tokamake.config.fields import Name, Settings
from tokamake.config.filters import Filters
from tokamake.config_files import read_table, validate
from tokamake.data.corpus.splits import FractionRange, parse_splits
from tokamake.data.readers import join_format, parse_format
from tokamake.data.urls.url_list import is_url_list
from tokamake.errors import UserError, choice
from tokamake.remote.addresses import is_remote

LIKE_NUMBER = re.compile(r"-\d{4,}(-of-\d{4,})?_")
"""Pattern that names of corpora must not contain; see `paths.corpus_of`."""
INDEXED = "indexed"
"""Format of corpora that are tokenized already."""


def _sets(text: str) -> str:
    try:
        parse_splits(text)
    except UserError as error:
        raise ValueError(str(error)) from None
    return text


def _text_key(keys: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.]*(,[A-Za-z0-9_.]+)*", keys):
        raise ValueError(
            "give keys of letters, digits, _ and dots, with commas between several; text around "
            "keys goes into the column template"
        )
    return keys


def _format(text: str) -> str:
    readers = plugins.names("data/readers")
    if (name := text.partition(":")[0]) not in ("", INDEXED, *readers):
        raise ValueError(f"unknown name; {choice(name, [*readers, INDEXED])}")
    if ":" not in text:
        return text
    try:
        return join_format(*parse_format(text))
    except UserError as error:
        raise ValueError(str(error).removeprefix("format: ")) from None


class ListedDataset(NamedTuple):
    """An existing indexed dataset that a weighting file lists."""

    prefix: str
    """Path without .bin and .idx, as the workflow reads it."""
    weight: float
    """Share of training samples, relative to all other datasets; above 0."""
    part: FractionRange | None
    """Documents to train on, as shares of all; None: the split decides."""
    where: str
    """File and line, for messages."""


class Corpus(Settings):
    """One row of corpora.tsv, or the lines of a weighting file that name one corpus."""

    corpus: Name
    """Name of the corpus; merged datasets are named <corpus>-<number>."""
    files: str
    """Glob patterns of raw files, relative to the working directory, separated by spaces; quote a
    pattern that contains a space. Also addresses: hf://datasets/ORG/NAME@REVISION with or without a
    path or pattern behind it, https addresses of files, and urls:PATH for the pages of a list of
    URLs. With the format indexed: prefixes of indexed datasets, folders of them, or patterns."""
    format: Annotated[str, AfterValidator(_format)] = ""
    """Format of the files, a file in lib/tokamake/data/readers; empty: detected for each file.
    A format may have settings: warc: {extractor: trafilatura}.
    indexed: the corpus is tokenized already, as indexed datasets (.bin, .idx)."""
    text_key: Annotated[str, AfterValidator(_text_key)] = "text"
    """Key or column that holds the text; several, separated by commas, give one dataset each.
    With the format indexed, several keys pair datasets by their names: text,title pairs
    X_text_sentence with X_title_document."""
    template: str = ""
    """Joins several keys to one text: {title}\\n\\n{text}; text_key names the dataset."""
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Share of training samples, relative to the other corpora."""
    epochs: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Number of passes over the corpus, instead of a weight; may be a fraction."""
    temperature: Annotated[float, Field(ge=0.01, allow_inf_nan=False)] | None = None
    """Instead of a weight: the share is proportional to tokens ** (1 / temperature)."""

    filters: Filters | None = None
    """Filters of the documents instead of tokenize.filters: length: {min_characters: 200}, regex:
    {drop: lorem ipsum}; [] for none."""
    keep_copies: bool = False
    """true: tokenize.deduplicate, near_duplicates and repeats leave the corpus as it is, and do not
    compare other corpora with it."""
    sets: Annotated[str, AfterValidator(_sets)] = ""
    """Sets that use the corpus, instead of train.split: train, test, and any other name for a
    validation split; each uses all documents or a part: train=0:0.95 valid=0.95:1."""

    _where: str = PrivateAttr("")
    _listed: tuple[ListedDataset, ...] = PrivateAttr(())

    @property
    def where(self) -> str:
        """Table and line of the row, for messages; without a table, its name."""
        return self._where or f'corpus "{self.corpus}"'

    @property
    def listed(self) -> tuple[ListedDataset, ...]:
        """Its datasets, if it is from a weighting file; else empty."""
        return self._listed

    @property
    def is_split(self) -> bool:
        """Whether `train.split` divides documents of the corpus."""
        return not self.sets and not (self.listed and all(line.part for line in self.listed))

    @property
    def parts(self) -> dict[str, FractionRange]:
        """Map each split to its part of the corpus; empty: train.split decides."""
        return parse_splits(self.sets)

    @property
    def is_indexed(self) -> bool:
        return self.format == INDEXED

    @property
    def has_pairs(self) -> bool:
        """Whether it has an existing dataset for each of several text keys."""
        return self.is_indexed and "," in self.text_key

    @property
    def trains(self) -> bool:
        return not self.sets or "train" in self.parts

    @model_validator(mode="after")
    def _check_name(self) -> "Corpus":
        if LIKE_NUMBER.search(self.corpus):
            raise ValueError(
                f"corpus: {self.corpus!r}: a number of four digits before an underscore would "
                "be taken for the number of a merged dataset; rename it"
            )
        return self

    @model_validator(mode="after")
    def _check_indexed(self) -> "Corpus":
        of_text = ("text_key", "template", "filters", "keep_copies")
        given = [name for name in of_text if name in self.model_fields_set]
        if self.has_pairs:
            given.remove("text_key")
        if self.is_indexed and (given := [name for name in given if getattr(self, name)]):
            raise ValueError(
                f"{given[0]}: {getattr(self, given[0])!r}: no effect on a corpus that is tokenized "
                "already (format indexed); empty the column"
            )
        return self

    @model_validator(mode="after")
    def _check_share(self) -> "Corpus":
        columns = [name for name in _SHARE_COLUMNS if getattr(self, name) is not None]
        if not columns and self.trains:
            raise ValueError("no weight, epochs or temperature; give one of these columns a number")
        # A weight is allowed: it is the share in the held-out splits.
        if not self.trains and set(columns) - {"weight"}:
            raise ValueError(
                f"sets: {self.sets!r}: not used for training, so {columns[0]} has no effect; add "
                f"train or empty the column"
            )
        if len(columns) > 1:
            raise ValueError(f"has {' and '.join(columns)}; keep one of them and empty the rest")
        return self


_SHARE_COLUMNS = ("weight", "epochs", "temperature")
"""A corpus for training fills exactly one of these columns."""


def listed_corpus(name: str, datasets: Sequence[ListedDataset]) -> Corpus:
    """Make a corpus of datasets that a weighting file lists; its weight is their sum."""
    values = {
        "corpus": name,
        "files": shlex.join(sorted(dataset.prefix for dataset in datasets)),
        "format": INDEXED,
        "weight": math.fsum(dataset.weight for dataset in datasets),
    }
    corpus = validate(Corpus, values, datasets[0].where)
    corpus._where = datasets[0].where
    corpus._listed = tuple(datasets)
    return corpus


def read_corpora(path: Path, *, temperature: float | None = None) -> list[Corpus]:
    """Read corpora.tsv: tab-separated with a header; `#` opens a comment line.

    `temperature` applies to rows that state no weight, epochs or temperature.
    """
    table, corpora = read_table(path, setting="corpora", row="corpus"), []
    for column in table.columns:
        if column not in Corpus.model_fields:
            raise UserError(
                f"{path}:{table.header}: {column}: no such column; choose among "
                f"{', '.join(Corpus.model_fields)}, separated by one tab each"
            )
    for number, cells in table.rows.items():
        if temperature is not None and not cells.keys() & set(_SHARE_COLUMNS):
            cells["temperature"] = str(temperature)
        corpus = validate(Corpus, cells, f"{path}:{number}")
        corpus._where = f"{path}:{number}"
        corpora.append(corpus)
    check_rows(corpora)
    return corpora


def check_rows(corpora: Iterable[Corpus]) -> None:
    """Check that the rows of a run have different names, and shares on one scale."""
    first_rows: dict[str, Corpus] = {}
    weighted: Corpus | None = None
    for corpus in corpora:
        first = first_rows.setdefault(corpus.corpus, corpus)
        if first is not corpus:
            raise UserError(
                f'{corpus.where}: corpus "{corpus.corpus}" is in {_place(first, corpus)}, too; '
                "give each row its own name"
            )
        weighted = weighted or (corpus if corpus.weight is not None else None)
    for corpus in first_rows.values():
        if weighted and corpus.temperature is not None:
            raise UserError(
                f"{corpus.where}: temperature {corpus.temperature:g}, but "
                f"{_place(weighted, corpus)} has a weight; give all rows weights or all "
                "temperatures, or epochs to some"
            )


def _place(row: Corpus, other: Corpus) -> str:
    is_same = _table(row.where) == _table(other.where)
    return f"line {row.where.rpartition(':')[2]}" if is_same else row.where


_DATA_COLUMNS = ("files", "format", "text_key", "template", "filters", "keep_copies")
"""Columns that decide the tokens of a corpus."""


def merge_tables(tables: Iterable[Sequence[Corpus]]) -> dict[str, Corpus]:
    """Merge the corpora of several runs; runs share the shards of a corpus."""
    merged: dict[str, Corpus] = {}
    splits: dict[frozenset[str], str] = {}
    for corpora in tables:
        for corpus in corpora:
            first = merged.setdefault(corpus.corpus, corpus)
            for column in _DATA_COLUMNS:
                if getattr(corpus, column) != getattr(first, column):
                    raise _different(corpus, first, column=column)
        splits.setdefault(frozenset(n for row in corpora for n in row.parts), corpora[0].where)
    if len(splits) > 1:
        (first_names, first_where), (names, where), *_ = splits.items()
        raise UserError(
            f"{_table(where)}: splits are {_join_names(names)}, but {_join_names(first_names)} in "
            f"{_table(first_where)}; runs are compared on the same splits, so use the same names"
        )
    return merged


def _different(corpus: Corpus, first: Corpus, *, column: str) -> UserError:
    values = [repr(getattr(row, column)) for row in (corpus, first)]
    if column == "files" and (corpus.listed or first.listed):
        values = ["another list of datasets", "other datasets"]  # lists have thousands of names
    return UserError(
        f'{_table(corpus.where)}: corpus "{corpus.corpus}": {column} is {values[0]}, but '
        f"{values[1]} in {_table(first.where)}; give one of the two another name"
    )


def _table(where: str) -> str:
    return where.rpartition(":")[0] or where


def _join_names(names: frozenset[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def find_corpus(names: Sequence[str], table: Path) -> Corpus:
    """Find the row of a table that the single name in `names` names."""
    rows = {row.corpus: row for row in read_corpora(table)}
    if len(names) != 1 or names[0] not in rows:
        raise UserError(
            f"{table}: {' '.join(map(str, names))!r} is not a corpus; name one of {', '.join(rows)}"
        )
    refuse_addresses(rows[names[0]])
    return rows[names[0]]


def refuse_addresses(corpus: Corpus) -> None:
    """Check that the files of a corpus are on disk, for commands outside the workflow."""
    if lists := [pattern for pattern in patterns(corpus) if is_url_list(pattern)]:
        raise UserError(
            f"{corpus.where}: files: {lists[0]}: a list of URLs, which only the workflow fetches; "
            "name the WARC files that it has made, below results/raw/urls"
        )
    if addresses := [pattern for pattern in patterns(corpus) if is_remote(pattern)]:
        raise UserError(
            f"{corpus.where}: files: {addresses[0]}: an address, which only the workflow "
            "downloads; download it with `tokamake fetch`, and name the files that this prints"
        )


def patterns(corpus: Corpus) -> tuple[str, ...]:
    """Split the `files` column of a corpus into patterns; UserError if a quote is not closed."""
    if re.fullmatch(r"[\w./*-]+", corpus.files):  # splitting takes long for 20,000 corpora
        return (corpus.files,)
    try:
        return tuple(shlex.split(corpus.files))
    except ValueError as error:
        raise UserError(
            f"{corpus.where}: files: {corpus.files}: {str(error).lower()}; close the quote"
        ) from None
