"""`index` refuses decoders and sentinels that are too few for a sample."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.sentence_data import SentenceData, build_index
from tokamake.data.corpus.extend_tokenizer import extend_tokenizer
from tokamake.errors import UserError
from tokamake.train.objectives.span_corruption.samples import SpanCorruptionSamples


def build(data: SentenceData, folder: Path, **changes: Any) -> SpanCorruptionSamples:
    output = build_index(data, folder / "index", objective="span_corruption", **changes)
    return SpanCorruptionSamples(output, split="train", data_root=data.root)


def test_a_decoder_that_is_too_short_is_refused_with_the_length_that_is_enough(
    sentences: SentenceData, tmp_path: Path
) -> None:
    (tmp_path / "worst").mkdir()
    samples = build(sentences, tmp_path / "worst")
    # 15 % of 62 tokens are 9: each a span of its own in the worst case.
    assert samples.objective.decoder_sequence_length == 1 + 2 * 9
    # Of the samples of docs, which `index` looks at first.
    lengths = {
        int(samples._dataset_sample_index[sample]): int(samples[sample]["num_decoder_tokens"])
        for sample in range(len(samples))
        if samples.corpus_of(sample) == "docs"
    }
    needed = max(lengths.values())
    first = min(number for number, length in lengths.items() if length == needed)
    with pytest.raises(UserError) as caught:
        build(sentences, tmp_path, masking={"decoder_sequence_length": needed - 1})
    assert str(caught.value) == (
        f"train.masking.decoder_sequence_length: {needed - 1}: sample {first} of docs needs "
        f"{needed}; give {needed} or more (19 is enough for every sample), or a lower "
        "train.masking.probability"
    )
    assert not (tmp_path / "index").exists()


def test_a_decoder_that_is_long_enough_for_all_samples_is_enough(
    sentences: SentenceData, tmp_path: Path
) -> None:
    options = {"valid_samples": 0, "train_samples": 60}
    (tmp_path / "worst").mkdir()
    worst = build(sentences, tmp_path / "worst", **options)
    needed = max(int(worst[sample]["num_decoder_tokens"]) for sample in range(len(worst)))
    exact = build(sentences, tmp_path, masking={"decoder_sequence_length": needed}, **options)
    assert len(exact) == len(worst)
    for sample in range(len(exact)):
        length = int(worst[sample]["num_decoder_tokens"])
        assert exact[sample]["num_decoder_tokens"] == length
        assert (exact[sample]["labels"] == worst[sample]["labels"][:needed]).all()


def test_too_few_sentinels_are_refused(sentences: SentenceData, tmp_path: Path) -> None:
    few = tmp_path / "few"
    extend_tokenizer(tokenizer=sentences.tokenizer, sentinels=2, output=few)
    with pytest.raises(UserError, match=r"^tokenizer: has 2 sentinels: sample \d+ of docs needs"):
        build(sentences, tmp_path, tokenizer=few)
    build(sentences, tmp_path, tokenizer=few, masking={"probability": 0.03})
