"""How many samples each file of a set gives, and in which order the set takes them.

Files and their weights come from `index`; orders come from `blend` and are written to the set's
folder.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from tokamake.data.samples.blend import CorpusBlend, ExactBlend, requested
from tokamake.data.samples.order_files import write_blend, write_exhaustive, write_order

Blend = Literal["weighted", "exact", "corpora"]
"""weighted: file by file as Megatron draws; exact: each file's count is true to its weight in
integers, and its samples are spread evenly; corpora: so between corpora, inside one as `Within`."""

Within = Literal["concatenated", "shuffled", "blended"]
"""Files of a corpus: one after the other, all samples shuffled, or blended by their weights."""


class Manner(NamedTuple):
    """How a set is ordered."""

    blend: Blend
    within_corpus: Within
    """Of use where corpora are blended."""
    seed: int
    """Of the shuffle inside corpora."""


class Drawn(NamedTuple):
    """What a set draws."""

    wanted: list[int]
    """Samples that each file is indexed for at least."""
    drawn: list[int]
    """Samples that the set takes from each."""
    samples: int
    """Sum of them."""


def draw(
    folder: Path,
    weights: Sequence[float],
    corpora: Sequence[str],
    *,
    num_samples: int,
    manner: Manner,
) -> Drawn:
    """Write the order of at least `num_samples` samples: dataset_index and dataset_sample_index.

    Args:
        folder: of the set.
        weights: of the files, above 0; only their proportions count.
        corpora: of the files; those of one corpus follow each other if corpora are blended.
        num_samples: samples wanted.
        manner: how.
    """
    if manner.blend == "weighted":
        return Drawn(*write_blend(folder, list(weights), num_samples))
    if manner.blend == "exact":
        counts = requested(list(weights), num_samples)
        write_order(folder, ExactBlend(counts))
        return Drawn(counts, counts, sum(counts))
    groups: dict[str, list[float]] = {}
    for weight, corpus in zip(weights, corpora, strict=True):
        groups.setdefault(corpus, []).append(weight)
    of_corpora = requested([sum(group) for group in groups.values()], num_samples)
    nested = [requested(group, n) for group, n in zip(groups.values(), of_corpora, strict=True)]
    return _corpora(folder, nested, manner)


def draw_all(
    folder: Path,
    counts: Sequence[int],
    corpora: Sequence[str],
    *,
    manner: Manner,
) -> Drawn:
    """Write an order of all that some files give; the other arguments are those of `draw`.

    Args:
        counts: samples of each file, above 0.
    """
    if manner.blend == "corpora":
        groups: dict[str, list[int]] = {}
        for count, corpus in zip(counts, corpora, strict=True):
            groups.setdefault(corpus, []).append(count)
        return _corpora(folder, list(groups.values()), manner)
    if manner.blend == "exact":
        write_order(folder, ExactBlend(list(counts)))
    else:
        write_exhaustive(folder, list(counts))
    return Drawn(list(counts), list(counts), sum(counts))


def _corpora(folder: Path, nested: list[list[int]], manner: Manner) -> Drawn:
    within = manner.within_corpus
    order = CorpusBlend(nested, within=within, seed=manner.seed if within == "shuffled" else None)
    write_order(folder, order)
    counts = [count for group in nested for count in group]
    return Drawn(counts, counts, sum(counts))
