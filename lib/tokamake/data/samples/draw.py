"""Draw the samples of a split: how many come from each dataset, and in which order."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from tokamake.data.samples.blend import CorpusBlend, ExactBlend, apportion
from tokamake.data.samples.order_files import write_blend, write_exhaustive, write_order

Blend = Literal["weighted", "exact", "corpora"]
"""weighted: Megatron's order by weight. exact: each dataset has exactly its share of the samples,
spread evenly. corpora: the same between corpora; inside a corpus see `Within`."""

Within = Literal["concatenated", "shuffled", "blended"]
"""Datasets of a corpus: one after the other, all samples shuffled, or blended by their weights."""


class DrawSettings(NamedTuple):
    """Settings of the order of a split."""

    blend: Blend
    within_corpus: Within
    """Only for `corpora`."""
    seed: int


class DrawnSamples(NamedTuple):
    """Sample counts of a split."""

    requested: list[int]
    """Samples that the index of each dataset must hold."""
    drawn: list[int]
    samples: int


def draw(
    folder: Path,
    weights: Sequence[float],
    corpora: Sequence[str],
    *,
    num_samples: int,
    settings: DrawSettings,
) -> DrawnSamples:
    """Write an order of at least `num_samples` samples: dataset_index and dataset_sample_index.

    Only ratios of `weights` count. For `corpora`, datasets of a corpus must be neighbors.
    """
    if settings.blend == "weighted":
        return DrawnSamples(*write_blend(folder, list(weights), num_samples=num_samples))
    if settings.blend == "exact":
        counts = apportion(list(weights), num_samples)
        write_order(folder, ExactBlend(counts))
        return DrawnSamples(counts, counts, sum(counts))
    groups: dict[str, list[float]] = {}
    for weight, corpus in zip(weights, corpora, strict=True):
        groups.setdefault(corpus, []).append(weight)
    totals = apportion([sum(group) for group in groups.values()], num_samples)
    nested = [apportion(group, total) for group, total in zip(groups.values(), totals, strict=True)]
    return _draw_corpora(folder, nested, settings=settings)


def draw_all(
    folder: Path, counts: Sequence[int], *, corpora: Sequence[str], settings: DrawSettings
) -> DrawnSamples:
    """Write an order of all samples of some datasets."""
    if settings.blend == "corpora":
        groups: dict[str, list[int]] = {}
        for count, corpus in zip(counts, corpora, strict=True):
            groups.setdefault(corpus, []).append(count)
        return _draw_corpora(folder, list(groups.values()), settings=settings)
    if settings.blend == "exact":
        write_order(folder, ExactBlend(list(counts)))
    else:
        write_exhaustive(folder, list(counts))
    return DrawnSamples(list(counts), list(counts), sum(counts))


def _draw_corpora(folder: Path, nested: list[list[int]], *, settings: DrawSettings) -> DrawnSamples:
    within = settings.within_corpus
    seed = settings.seed if within == "shuffled" else None
    write_order(folder, CorpusBlend(nested, within=within, seed=seed))
    counts = [count for group in nested for count in group]
    return DrawnSamples(counts, counts, sum(counts))
