"""Checks of a run against its objective, and the settings that decide its samples."""

from typing import Any

from tokamake.config.masking import MaskingSettings
from tokamake.config.train_fields import TrainFields

_MAX_NGRAM = {"masked": 3, "span_corruption": 10}
"""Longest run of words of BERT and T5, as in Megatron-LM."""
SPECIAL_TOKENS = {"masked": 3, "span_corruption": 2}
"""Places that special tokens may take in a sample: [CLS] and two [SEP]; Megatron-LM also leaves two
places of the encoder of T5 free."""
_SHORTEST_TARGET = 2
_OF_CAUSAL = {
    "reset_position_ids": False,
    "reset_attention_mask": False,
    "eod_mask_loss": False,
    "separate_last_epoch": None,
    "drop_last_partial_sequence": True,
}
"""Settings that only samples of concatenated documents have, with their defaults."""


def max_masked(probability: float, target: int) -> int:
    """Most tokens that are masked in a sample of `target` tokens."""
    return int(min(probability * target, max(1, round(probability * target))))


def sample_settings(train: TrainFields) -> dict[str, Any]:
    """Settings that decide the samples of an encoder objective, without empty ones."""
    masking, name = train.masking, train.objective
    target = train.sequence_length - SPECIAL_TOKENS[name]
    settings: dict[str, Any] = {
        "name": name,
        "target_tokens": target,
        "probability": masking.probability,
        "max_ngram": masking.max_ngram or _MAX_NGRAM[name],
        "short_sequence_probability": masking.short_sequence_probability,
    }
    if name == "masked":
        return settings | {"sentence_order": masking.sentence_order}
    # The decoder's first token, and the worst case: each masked token is a span of its own.
    longest = 1 + 2 * max_masked(masking.probability, target)
    return settings | {"decoder_sequence_length": masking.decoder_sequence_length or longest}


def check_objective(train: TrainFields) -> None:
    """Check that the settings of a run fit its objective."""
    name, masking = train.objective, train.masking
    defaults = MaskingSettings()
    if name == "causal":
        if train.pack_samples:
            raise ValueError(
                "pack_samples: true: no effect on objective causal, whose samples have no padding; "
                "remove it"
            )
        for key, value in masking:
            if value != getattr(defaults, key):
                raise ValueError(
                    f"masking.{key}: {value}: no effect on objective causal; remove it, or set "
                    "objective to masked or span_corruption"
                )
        return
    other = {"masked": "decoder_sequence_length", "span_corruption": "sentence_order"}[name]
    if getattr(masking, other) != getattr(defaults, other):
        raise ValueError(
            f"masking.{other}: {getattr(masking, other)}: no effect on objective {name}; remove it"
        )
    for key, default in _OF_CAUSAL.items():
        if getattr(train, key) != default:
            raise ValueError(
                f"{key}: {getattr(train, key)}: no effect on objective {name}, whose samples are "
                "sentences of one document; remove it"
            )
    if train.fim.rate:
        raise ValueError(
            f"fim.rate: {train.fim.rate:g}: only objective causal fills in the middle; remove it"
        )
    if train.pack_samples and train.parallel.pipeline_parallel_size > 1:
        raise ValueError(
            "pack_samples: true: a pipeline needs micro batches with equal numbers of rows; remove "
            "it, or set parallel.pipeline_parallel_size to 1"
        )
    if train.pack_samples and train.log_corpus_losses:
        raise ValueError(
            "pack_samples: true: log_corpus_losses needs a row for each sample; remove one of them"
        )
    _check_sizes(train)


def _check_sizes(train: TrainFields) -> None:
    shortest = SPECIAL_TOKENS[train.objective] + _SHORTEST_TARGET
    if train.sequence_length < shortest:
        raise ValueError(
            f"sequence_length: {train.sequence_length}: too short for objective "
            f"{train.objective}; give {shortest} or more"
        )
    # Megatron rounds 1 / short_sequence_probability to an int32.
    if 0 < train.masking.short_sequence_probability < 1e-9:
        raise ValueError(
            f"masking.short_sequence_probability: {train.masking.short_sequence_probability:g}: "
            "too small; give 0, or 1e-9 or more"
        )
