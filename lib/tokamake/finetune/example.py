"""A row of a task as text, before it is tokenized."""

from typing import NamedTuple


class Example(NamedTuple):
    """A labeled text, a pair of texts, or a question with its options."""

    firsts: tuple[str, ...]
    """First text: one, or one for each option of a choice."""
    second: str | None
    """Second text, the same for all options; None: there is none."""
    label: str | None
    """Label as the file has it; None: the file has no labels, as test sets of GLUE."""
    where: str
    """File and line, for messages."""
