"""Settings of the objective of tasks: `finetune` reads their rows from files, not from an index."""

from tokamake.config.objective import ObjectiveData


class Data(ObjectiveData):
    """Padded rows of an encoder with the head of a task."""

    stacks = ""
    has_padding = True
