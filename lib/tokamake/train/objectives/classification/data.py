"""Settings of the objective of tasks: `finetune` reads their rows from files, not from an index."""

from typing import Any, NamedTuple

from tokamake import plugins
from tokamake.config.architecture import Architecture
from tokamake.config.objective import ObjectiveData
from tokamake.errors import UserError

_FAMILIES = "models/*/model"


class Data(ObjectiveData):
    """Padded rows of an encoder with the head of a task."""

    stacks = ""
    has_padding = True
    has_epochs = True

    def finetuned_architecture(self, pretrained: Architecture, task: Any) -> Architecture:
        """The model with the head of the task."""
        if "task_head" not in (pretrained.model_extra or {}):
            families = [
                name
                for name in plugins.names(_FAMILIES)
                if "task_head" in plugins.constant(_FAMILIES, name, "SETTINGS")
            ]
            raise UserError(
                f"finetune.task: {task.name}: family {pretrained.family} has no head for tasks, "
                f"only {', '.join(families)}; start from such a model"
            )
        values = {**pretrained.model_dump(), "sentence_order_head": False}
        return Architecture.model_validate({**values, **task.architecture_fields})


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
