"""Masking of the samples of encoder objectives."""

from typing import Annotated

from pydantic import Field

from tokamake.config.fields import Settings


class MaskingSettings(Settings):
    """How samples of the objectives masked and span_corruption are masked: whole words, chosen by
    the seed and the number of the sample alone."""

    probability: Annotated[float, Field(gt=0, lt=1)] = 0.15
    """Share of the tokens of a sample to mask."""
    max_ngram: Annotated[int, Field(ge=1, le=1000)] | None = None
    """Most words that are masked as one. Empty: 3 for masked, where n words have a probability in
    proportion to 1 / n, and 10 for span_corruption, where it is geometric, with a mean of 4.5."""
    short_sequence_probability: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of the samples that are shorter than they could be."""
    sentence_order: bool = True
    """masked: divide each sample in two parts, and swap them in half of the samples, so that the
    model also learns the order of sentences. false: samples of one part."""
    decoder_sequence_length: Annotated[int, Field(ge=3)] | None = None
    """span_corruption: tokens of the decoder. Empty: enough for every sample. `index` refuses a
    number that is too small for a sample of the run."""
