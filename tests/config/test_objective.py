"""Settings of objectives: which fit together, and what they mean for samples."""

import math
from typing import Any

import pytest
from pydantic import ValidationError

from tokamake.config.architecture import Architecture
from tokamake.config.objective import objective_data, sample_settings
from tokamake.config.root import Config
from tokamake.config.training import TrainSettings, without_added_defaults
from tokamake.train.objectives._sentences import max_masked


@pytest.mark.parametrize(
    ("train", "shape", "loss"),
    [
        ({}, {}, math.log(8)),
        ({"objective": "masked"}, {"family": "bert"}, math.log(8) + math.log(2)),
        (
            {"objective": "masked", "masking": {"sentence_order": False}},
            {"family": "bert", "sentence_order_head": False},
            math.log(8),
        ),
        ({"objective": "ict"}, {"family": "biencoder"}, 0.0),
    ],
)
def test_a_uniform_guess_has_the_losses_of_all_answers(
    train: dict[str, Any], shape: dict[str, Any], loss: float
) -> None:
    settings = make(**train)
    architecture = Architecture(vocab_size=8, **{**SIZES, **shape})
    assert objective_data(settings.objective).uniform_loss(settings, architecture) == loss


SIZES = {
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
}


def make(**train: Any) -> TrainSettings:
    return TrainSettings.model_validate(train)


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"masking": {"probability": 0.2}}, "masking.probability: 0.2: no effect on objective ca"),
        ({"masking": {"sentence_order": False}}, "masking.sentence_order: False: no effect on"),
        (
            {"objective": "masked", "masking": {"decoder_sequence_length": 128}},
            "masking.decoder_sequence_length: 128: no effect on objective masked; remove it",
        ),
        (
            {"objective": "span_corruption", "masking": {"sentence_order": False}},
            "masking.sentence_order: False: no effect on objective span_corruption; remove it",
        ),
        ({"objective": "masked", "reset_attention_mask": True}, "reset_attention_mask: True: no "),
        ({"objective": "masked", "eod_mask_loss": True}, "eod_mask_loss: True: no effect on obj"),
        (
            {"objective": "masked", "drop_last_partial_sequence": False},
            "drop_last_partial_sequence: False: no effect on objective masked, whose samples are",
        ),
        ({"objective": "masked", "fim": {"rate": 0.5}}, "fim.rate: 0.5: only models that predict"),
        (
            {"objective": "masked", "sequence_length": 4},
            "sequence_length: 4: too short for objective masked; give 5 or more",
        ),
        (
            {"objective": "masked", "masking": {"short_sequence_probability": 1e-12}},
            "masking.short_sequence_probability: 1e-12: too small; give 0, or 1e-9 or more",
        ),
        ({"pack_samples": True}, "pack_samples: true: no effect on objective causal"),
        (
            {"objective": "masked", "pack_samples": True, "log_corpus_losses": True},
            "pack_samples: true: log_corpus_losses needs a row for each sample; remove one of",
        ),
        (
            {
                **{"objective": "masked", "pack_samples": True},
                "parallel": {"pipeline_parallel_size": 2},
            },
            "pack_samples: true: a pipeline needs micro batches with equal numbers of rows",
        ),
        (
            {"ict": {"titles": ""}},
            "ict: no effect on objective causal; remove it, or set objective",
        ),
        (
            {"objective": "ict", "ict": {"topk": [1, 20]}},
            "ict.topk: 20: more than the 8 blocks of a global batch; give smaller numbers",
        ),
        (
            {"objective": "ict", "ict": {"topk": 9}},
            "ict.topk: 9: more than the 8 blocks of a global batch; give smaller numbers",
        ),
        (
            {"objective": "ict", "ict": {"titles": "text"}},
            "ict.titles: text: is the key of the text, too; name the key of the titles",
        ),
        ({"objective": "ict", "pack_samples": True}, "pack_samples: true: objective ict has a row"),
        (
            {"objective": "ict", "masking": {"probability": 0.2}},
            "masking.probability: 0.2: no effect on objective ict; remove it",
        ),
        ({"objective": "mlm"}, "unknown name; choose one of causal, ict, masked, retro, span_corr"),
    ],
)
def test_settings_that_do_not_fit_an_objective_are_refused(
    train: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError) as caught:
        make(**train)
    assert message in str(caught.value)


def test_samples_are_those_of_megatron_by_default() -> None:
    bert = sample_settings(make(objective="masked", sequence_length=512))
    assert bert == {
        **{"name": "masked", "target_tokens": 509, "probability": 0.15, "max_ngram": 3},
        **{"short_sequence_probability": 0.1, "sentence_order": True},
    }
    never_short = {"short_sequence_probability": 0.0}
    whole = make(objective="masked", sequence_length=512, masking=never_short)
    assert sample_settings(whole) == {**bert, **never_short}
    t5 = sample_settings(make(objective="span_corruption", sequence_length=512))
    assert t5 == {
        **{"name": "span_corruption", "target_tokens": 510, "probability": 0.15, "max_ngram": 10},
        **{"short_sequence_probability": 0.1, "decoder_sequence_length": 153},
    }
    stated = {"objective": "span_corruption", "masking": {"decoder_sequence_length": 128}}
    assert sample_settings(make(**stated))["decoder_sequence_length"] == 128


@pytest.mark.parametrize(
    ("target", "expected"), [(2, 0), (6, 0), (7, 1), (10, 1), (100, 15), (509, 76), (510, 76)]
)
def test_most_tokens_that_are_masked(target: int, expected: int) -> None:
    assert max_masked(0.15, target) == expected


def test_causal_runs_have_the_settings_of_earlier_versions() -> None:
    settings = without_added_defaults(make().model_dump(mode="json"))
    assert {"objective", "masking"}.isdisjoint(settings)
    masked = without_added_defaults(make(objective="masked").model_dump(mode="json"))
    assert masked["objective"] == "masked"
    assert "masking" not in masked


def test_sentences_have_no_order_of_seed_0() -> None:
    with pytest.raises(ValidationError, match="seed: 0: Megatron's order of sentences, which obj"):
        Config.model_validate({"seed": 0, "train": {"objective": "masked"}})
    Config.model_validate({"seed": 0})
