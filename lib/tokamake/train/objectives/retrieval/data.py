"""Settings of the objective of question files, and their rows before they are tokenized."""

from typing import Any, NamedTuple

from tokamake.config.architecture import Architecture
from tokamake.config.objective import ObjectiveData
from tokamake.errors import UserError


class RetrievalPassage(NamedTuple):
    """A passage that may answer a question."""

    title: str
    text: str


class RetrievalQuestion(NamedTuple):
    """A row of a question file."""

    text: str
    positives: tuple[RetrievalPassage, ...]
    """Passages that answer it, one or more."""
    negatives: tuple[RetrievalPassage, ...]
    """Passages that do not, such as the best ones of BM25."""


class Data(ObjectiveData):
    """A question, [CLS] question [SEP], and its passages, [CLS] title [SEP] text [SEP]."""

    stacks = ""
    has_padding = True
    has_epochs = True
    embeds = True

    def stack_lengths(self, train: Any) -> list[int]:
        return [train.sequence_length, train.sequence_length]

    def labeled_share(self, train: Any) -> float:  # noqa: ARG002
        """No token has logits."""
        return 0.0

    def finetuned_architecture(self, pretrained: Architecture, task: Any) -> Architecture:
        """The model as it is: a biencoder."""
        if not pretrained.has_towers:
            raise UserError(
                f"finetune.task: {task.name}: needs a biencoder, and the model is of family "
                f"{pretrained.family}; start from a run of objective ict, or from a BERT with the "
                "file of a biencoder in model.architecture, such as config/models/"
                "tiny-biencoder.yaml"
            )
        return pretrained
