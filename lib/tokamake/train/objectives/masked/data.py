"""Settings and data of the objective masked."""

import math
from pathlib import Path
from typing import Any

from tokamake.config.architecture import Architecture
from tokamake.config.train_fields import TrainFields
from tokamake.errors import UserError
from tokamake.train.objectives._sentences import MaskingData


class Data(MaskingData):
    """Samples of [CLS] A [SEP] or [CLS] A [SEP] B [SEP]."""

    stacks, megatron_program = "encoder", "pretrain_bert"
    name, max_ngram, num_special = "masked", 3, 3
    unused = ("decoder_sequence_length",)

    def check_model(self, train: TrainFields, architecture: Architecture) -> None:
        """Check that samples have an order of sentences if the model has a head for it."""
        has_head = (architecture.model_extra or {}).get("sentence_order_head")
        has_order = train.masking.sentence_order
        if has_head not in (None, has_order):
            raise UserError(
                f"train.masking.sentence_order: {str(has_order).lower()}: the model has "
                f"{'a' if has_head else 'no'} head for the order of sentences; set it to "
                f"{str(has_head).lower()}, or choose a model with another sentence_order_head"
            )

    def labeled_share(self, train: TrainFields) -> float:
        """Masked tokens alone have labels; rows of labels have logits of all tokens."""
        return train.masking.probability

    def uniform_loss(self, train: TrainFields, architecture: Architecture) -> float:
        """Two losses: of the masked tokens, and of the order of sentences, yes or no."""
        has_order = train.masking.sentence_order
        return super().uniform_loss(train, architecture) + math.log(2) * has_order

    def sample_settings(self, train: TrainFields) -> dict[str, Any]:
        order = {"sentence_order": train.masking.sentence_order}
        return super().sample_settings(train) | order

    def open_samples(self, folder: Path, **options: Any) -> Any:
        from tokamake.train.objectives.masked.samples import MaskedSamples

        return MaskedSamples(folder, **options)
