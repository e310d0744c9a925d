"""Settings and data that objectives of sentences share, and objectives that mask words."""

from pathlib import Path
from typing import Any

from tokamake.config.data import TokenizerSettings, TokenizeSettings
from tokamake.config.objective import IndexedObjective, ObjectiveData
from tokamake.config.train_fields import TrainFields
from tokamake.config.train_sections import MaskingSettings
from tokamake.errors import UserError

_SHORTEST_TARGET = 2
_OF_DOCUMENTS = {
    "reset_position_ids": False,
    "reset_attention_mask": False,
    "eod_mask_loss": False,
    "separate_last_epoch": None,
    "drop_last_partial_sequence": True,
}
"""Settings that only samples of concatenated documents have, with their defaults."""


class SentenceData(ObjectiveData):
    """Sentences of one document.

    Attributes:
        name: name of the objective.
        num_special: places that special tokens may take in a sample.
        unused: settings of `masking` that it does not use.
        word_use: why the tokenizer must be a WordPiece.
    """

    has_sentences = True
    has_padding = True
    name: str
    num_special: int
    unused: tuple[str, ...]
    word_use: str

    def check_settings(self, train: TrainFields) -> None:
        """Refuse settings about documents, and short samples."""
        defaults = MaskingSettings()
        for key in self.unused:
            if (value := getattr(train.masking, key)) != getattr(defaults, key):
                raise ValueError(
                    f"masking.{key}: {value}: no effect on objective {self.name}; remove it"
                )
        for key, default in _OF_DOCUMENTS.items():
            if getattr(train, key) != default:
                raise ValueError(
                    f"{key}: {getattr(train, key)}: no effect on objective {self.name}, whose "
                    "samples are sentences of one document; remove it"
                )
        if train.fim.rate:
            raise ValueError(
                f"fim.rate: {train.fim.rate:g}: only models that predict the next token fill "
                "in the middle; remove it"
            )
        shortest = self.num_special + _SHORTEST_TARGET
        if train.sequence_length < shortest:
            raise ValueError(
                f"sequence_length: {train.sequence_length}: too short for objective "
                f"{self.name}; give {shortest} or more"
            )

    def check_tokenize(self, tokenize: TokenizeSettings) -> None:
        """Refuse documents, and separators besides [SEP]."""
        if not tokenize.split_sentences:
            raise UserError(
                f"train.objective: {self.name}: needs sentences; set tokenize.split_sentences to "
                "true"
            )
        if tokenize.append_eod:
            raise UserError(
                f"tokenize.append_eod: true: samples of objective {self.name} have separators of "
                "their own; set it to false"
            )

    def check_tokenizer(self, tokenizer: TokenizerSettings) -> None:
        """Refuse tokenizers that do not mark words."""
        if tokenizer.kind != "wordpiece":
            raise UserError(
                f"tokenizer.kind: {tokenizer.kind}: objective {self.name} {self.word_use}; set it "
                "to wordpiece"
            )


class MaskingData(SentenceData):
    """Sentences of one document with masked words.

    Attributes:
        max_ngram: longest run of words that are masked as one, as in Megatron-LM.
    """

    masks = True
    max_ngram: int
    word_use = "masks whole words, which only a WordPiece tokenizer marks"

    def check_settings(self, train: TrainFields) -> None:
        """Also refuse packed samples where they cannot be, and a share that is too small."""
        super().check_settings(train)
        if train.pack_samples and train.parallel.pipeline_parallel_size > 1:
            raise ValueError(
                "pack_samples: true: a pipeline needs micro batches with equal numbers of rows; "
                "remove it, or set parallel.pipeline_parallel_size to 1"
            )
        if train.pack_samples and train.log_corpus_losses:
            raise ValueError(
                "pack_samples: true: log_corpus_losses needs a row for each sample; remove one of "
                "them"
            )
        # Megatron rounds 1 / short_sequence_probability to an int32.
        if 0 < train.masking.short_sequence_probability < 1e-9:
            raise ValueError(
                f"masking.short_sequence_probability: {train.masking.short_sequence_probability:g}:"
                " too small; give 0, or 1e-9 or more"
            )

    def sample_settings(self, train: TrainFields) -> dict[str, Any]:
        """Settings that these objectives have."""
        masking = train.masking
        return {
            "name": self.name,
            "target_tokens": train.sequence_length - self.num_special,
            "probability": masking.probability,
            "max_ngram": masking.max_ngram or self.max_ngram,
            "short_sequence_probability": masking.short_sequence_probability,
        }

    def indexed(self, train: TrainFields, tokenizer: Path | None) -> IndexedObjective:
        """Add special tokens, and the kind of each token."""
        from tokamake.data.samples.sentence_masking import make_masking, piece_kinds
        from tokamake.data.tokenizers import open_tokenizer

        if tokenizer is None:
            raise UserError(f"--tokenizer: missing; objective {self.name} needs it")
        opened = open_tokenizer(tokenizer)
        masking = make_masking(self.sample_settings(train), opened, path=tokenizer)
        return IndexedObjective(masking._asdict(), piece_kinds(opened, path=tokenizer), opened)

    def make_indexer(self, settings: Any, **options: Any) -> Any:
        from tokamake.data.samples.dataset_indexers import MaskingIndexer

        return MaskingIndexer(settings, **options)


def max_masked(probability: float, target: int) -> int:
    """Most tokens that are masked in a sample of `target` tokens."""
    return int(min(probability * target, max(1, round(probability * target))))
