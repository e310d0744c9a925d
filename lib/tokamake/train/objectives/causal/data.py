"""Settings and data of the objective causal: documents, concatenated and cut."""

from pathlib import Path
from typing import Any

from tokamake.config.data import TokenizeSettings
from tokamake.config.objective import ObjectiveData, masking_objectives, sentence_objectives
from tokamake.config.train_fields import TrainFields
from tokamake.config.train_sections import MaskingSettings
from tokamake.errors import UserError


class Data(ObjectiveData):
    """Documents; each sample is full."""

    name, generates, continues_prompts = "causal", True, True

    def check_settings(self, train: TrainFields) -> None:
        """Refuse settings about padding and masking."""
        if train.pack_samples:
            raise ValueError(
                f"pack_samples: true: no effect on objective {self.name}, whose samples have no "
                "padding; remove it"
            )
        defaults = MaskingSettings()
        for key, value in train.masking:
            if value != getattr(defaults, key):
                raise ValueError(
                    f"masking.{key}: {value}: no effect on objective {self.name}; remove it, or "
                    f"set objective to {masking_objectives()}"
                )

    def check_tokenize(self, tokenize: TokenizeSettings) -> None:
        """Refuse sentences."""
        if tokenize.split_sentences:
            raise UserError(
                f"tokenize.split_sentences: true: objective {self.name} would be trained on "
                f"shuffled sentences; set train.objective to {sentence_objectives()}, or "
                "split_sentences to false"
            )

    def make_indexer(self, settings: Any, **_: Any) -> Any:
        from tokamake.data.samples.dataset_indexers import DocumentIndexer

        return DocumentIndexer(settings)

    def open_samples(self, folder: Path, **options: Any) -> Any:
        from tokamake.data.samples.document_samples import DocumentSamples

        return DocumentSamples(folder, **options)
