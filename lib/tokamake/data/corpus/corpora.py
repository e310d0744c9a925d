"""The table of corpora, and corpora by name: a row stands for its files, keys, format and share.

The workflow and `weigh` read the whole table; `tokenize`, `train_tokenizer` and `split` take the
name of a row where a table is given.
"""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from tokamake.config.fields import Name, Settings, plug_in
from tokamake.data.corpus.splits import Part, parse_sets
from tokamake.errors import UserError
from tokamake.validation import read_table, validate


def _sets(text: str) -> str:
    try:
        parse_sets(text)
    except UserError as error:
        raise ValueError(str(error)) from None
    return text


class Corpus(Settings):
    """One row of corpora.tsv."""

    corpus: Name
    """Name of the corpus; merged files are called <corpus>-<number>."""
    files: str
    """Glob patterns of raw files, relative to the folder you run in, separated by spaces; one that
    has a space in it stands in quotes."""
    format: Annotated[str, plug_in("data/readers", optional=True)] = ""
    """Format of the files, a file name in lib/tokamake/data/readers; empty: told from each file."""
    text_key: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.]*(,[A-Za-z0-9_.]+)*$")] = (
        "text"
    )
    """Key or column that holds the text; several, with commas, are tokenized each for itself."""
    template: str = ""
    """Joins several keys to one text, as in {title}\\n\\n{text}; the pair is named by text_key."""
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Share of training samples, relative to the other corpora."""
    epochs: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """How often the training sees the corpus, instead of a weight; may be a fraction."""
    temperature: Annotated[float, Field(ge=0.01, allow_inf_nan=False)] | None = None
    """Instead of a weight: the share is in proportion to tokens ** (1 / temperature)."""

    sets: Annotated[str, AfterValidator(_sets)] = ""
    """Sets that the corpus is part of, instead of what train.split makes of it: train, test, and
    any other name for a validation set, each all of it or a part: train=0:0.95 valid=0.95:1."""

    @property
    def parts(self) -> dict[str, Part]:
        """Parts of the corpus by the sets that they belong to; empty: train.split decides."""
        return parse_sets(self.sets)

    @property
    def trains(self) -> bool:
        """Whether the training sees documents of the corpus."""
        return not self.sets or "train" in self.parts

    @model_validator(mode="after")
    def _states_one(self) -> "Corpus":
        stated = [name for name in _STATED if getattr(self, name) is not None]
        if not stated and self.trains:
            raise ValueError("no weight, epochs or temperature; give one of these columns a number")
        if not self.trains and set(stated) - {"weight"}:
            raise ValueError(
                f"sets: {self.sets!r}: does not train, so {stated[0]} mean nothing; add train or "
                f"empty the column"
            )
        if len(stated) > 1:
            raise ValueError(f"states {' and '.join(stated)}; leave one of them and empty the rest")
        return self


_STATED = ("weight", "epochs", "temperature")
"""Columns of which each corpus that trains fills one."""


def read_corpora(path: Path, *, temperature: float | None = None) -> list[Corpus]:
    """Read corpora.tsv: tab-separated with a header; `#` opens a comment line.

    Args:
        path: table.
        temperature: what rows get that state no weight, epochs or temperature.

    Raises:
        UserError: the table or a row is wrong, or it has both weights and temperatures.
    """
    table, corpora = read_table(path, setting="corpora", row="corpus"), []
    for column in table.columns:
        if column not in Corpus.model_fields:
            raise UserError(
                f"{path}:{table.header}: {column}: no such column; choose among "
                f"{', '.join(Corpus.model_fields)}, separated by one tab each"
            )
    for number, cells in table.rows.items():
        if temperature is not None and not cells.keys() & set(_STATED):
            cells["temperature"] = str(temperature)
        corpora.append(validate(Corpus, cells, f"{path}:{number}"))
    _refuse_mixture(path, dict(zip(table.rows, corpora, strict=True)))
    seen = [corpus.corpus for corpus in corpora]
    for name in seen:
        if seen.count(name) > 1:
            raise UserError(
                f'{path}: corpus "{name}" stands in several rows; give each its own name'
            )
    return corpora


_OF_THE_DATA = ("files", "format", "text_key", "template")
"""Columns that decide what tokens a corpus has."""


def merge_tables(tables: Mapping[Path, Sequence[Corpus]]) -> dict[str, Corpus]:
    """Corpora by name of the tables of several runs, which share what is made of a corpus.

    Raises:
        UserError: a corpus is of other files in another table, or the tables name other sets.
    """
    merged: dict[str, Corpus] = {}
    source: dict[str, Path] = {}
    for path, corpora in tables.items():
        for corpus in corpora:
            known = merged.setdefault(corpus.corpus, corpus)
            first = source.setdefault(corpus.corpus, path)
            for column in _OF_THE_DATA:
                if getattr(corpus, column) != getattr(known, column):
                    raise UserError(
                        f'{path}: corpus "{corpus.corpus}": {column} is '
                        f"{getattr(corpus, column)!r}, and {getattr(known, column)!r} in {first}; "
                        "give one of the two another name"
                    )
    sets = {path: {name for row in rows for name in row.parts} for path, rows in tables.items()}
    for path, names in sets.items():
        first = next(iter(sets))
        if names != sets[first]:
            raise UserError(
                f"{path}: sets are {_listed(names)}, and {_listed(sets[first])} in {first}; runs "
                "of one table are measured on the same sets, so name the same"
            )
    return merged


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def _refuse_mixture(path: Path, rows: dict[int, Corpus]) -> None:
    """Weights and temperatures are not on one scale; `rows` are numbered by their lines."""
    weighted = [number for number, row in rows.items() if row.weight is not None]
    for number, row in rows.items():
        if weighted and row.temperature is not None:
            raise UserError(
                f"{path}:{number}: temperature {row.temperature:g}, but line {weighted[0]} has a "
                "weight; give all rows weights or all temperatures, or epochs to some"
            )


def find_corpus(names: Sequence[str], table: Path) -> Corpus:
    """Find the row that the only one of `names` names.

    Raises:
        UserError: there is no such row, or not one name.
    """
    rows = {row.corpus: row for row in read_corpora(table)}
    if len(names) != 1 or names[0] not in rows:
        raise UserError(
            f"{table}: {' '.join(map(str, names))!r} is no corpus; name one of {', '.join(rows)}"
        )
    return rows[names[0]]


def patterns(corpus: Corpus) -> tuple[str, ...]:
    """Patterns of a corpus' files.

    Raises:
        UserError: a quote is not closed.
    """
    try:
        return tuple(shlex.split(corpus.files))
    except ValueError as error:
        raise UserError(
            f'corpus "{corpus.corpus}": {corpus.files}: {str(error).lower()}; '
            "fix the files column of the corpora table"
        ) from None
