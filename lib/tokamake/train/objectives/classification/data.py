"""Settings of the objective of tasks: `finetune` reads their rows from files, not from an index."""

from typing import NamedTuple

from tokamake.config.objective import ObjectiveData


class Data(ObjectiveData):
    """Padded rows of an encoder with the head of a task."""

    stacks = ""
    has_padding = True
    has_epochs = True


class Example(NamedTuple):
    """A labeled text, a pair of texts, or a question with its options, before it is tokenized."""

    firsts: tuple[str, ...]
    """First text: one, or one for each option of a choice."""
    second: str | None
    """Second text, the same for all options; None: there is none."""
    label: str | None
    """Label as the file has it; None: the file has no labels, as test sets of GLUE."""
    where: str
    """File and line, for messages."""
