"""Corpora by name: a row of the table of corpora stands for its files, keys and format.

`tokenize`, `train_tokenizer` and `split` take such a name where a table is given.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path

from tokamake.config import Corpus, read_corpora
from tokamake.errors import UserError


def named(names: Sequence[str], table: Path) -> Corpus:
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
