"""Samples of T5: equal to megatron-core's field by field."""

from pathlib import Path

import numpy as np
import pytest

from tests.support.sentence_data import SentenceData, build_index, megatron_datasets, without_loss
from tokamake.train.objectives.span_corruption.samples import SpanCorruptionSamples

BOS, EOS = 500, 501
SENTINELS = range(502, 602)


@pytest.mark.usefixtures("lone_rank")
@pytest.mark.parametrize(("length", "short"), [(128, 0.1), (40, 0.5)])
def test_samples_equal_megatrons(
    sentences: SentenceData, tmp_path: Path, length: int, short: float
) -> None:
    folder = build_index(
        sentences,
        tmp_path / "index",
        objective="span_corruption",
        sequence_length=length,
        masking={"short_sequence_probability": short},
    )
    settings = {"sequence_length": length, "short": short, "decoder_length": 60}
    references = megatron_datasets(sentences, tmp_path / "cache", **settings)
    for split, reference in zip(("train", "valid"), references, strict=False):
        ours = SpanCorruptionSamples(folder, split=split, data_root=sentences.root)
        assert len(ours) == len(reference)
        limit = ours.objective.decoder_sequence_length
        assert limit <= 60
        for sample in range(len(ours)):
            record, expected = ours[sample], reference[sample]
            np.testing.assert_array_equal(record["tokens"], expected["text_enc"])
            np.testing.assert_array_equal(record["decoder_tokens"], expected["text_dec"][:limit])
            labels = without_loss(expected["labels"])
            np.testing.assert_array_equal(record["labels"], labels[:limit])
            assert not expected["text_dec"][limit:].any()
            np.testing.assert_array_equal(
                np.arange(length) < record["num_tokens"], expected["enc_mask"]
            )
            assert record["num_decoder_tokens"] == expected["dec_mask"].sum()
            assert record["num_decoder_tokens"] == expected["loss_mask"].sum()
            assert record["is_truncated"] == expected["truncated"]


def test_the_decoder_restores_the_text(sentences: SentenceData, tmp_path: Path) -> None:
    folder = build_index(sentences, tmp_path / "index", objective="span_corruption")
    samples = SpanCorruptionSamples(folder, split="train", data_root=sentences.root)
    for sample in range(50):
        record, text = samples[sample], samples.sentences(sample)
        labels = record["labels"][: record["num_decoder_tokens"]].tolist()
        assert record["decoder_tokens"][0] == BOS
        assert labels[-1] == EOS
        assert record["decoder_tokens"][1 : len(labels)].tolist() == labels[:-1]
        spans: dict[int, list[int]] = {}
        for token in labels[:-1]:
            if token in SENTINELS:
                spans[token] = []
            else:
                spans[list(spans)[-1]].append(token)
        assert list(spans) == list(SENTINELS)[: len(spans)]
        restored = []
        for token in record["tokens"][: record["num_tokens"]].tolist():
            restored += spans.get(token, [token])
        assert restored == text.tokens[: text.target].tolist()
