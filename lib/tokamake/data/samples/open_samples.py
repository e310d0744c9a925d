"""Samples of an index folder, whatever its objective is."""

from pathlib import Path

from tokamake.data.samples.index_folder import read_index
from tokamake.data.samples.loader import Samples
from tokamake.data.samples.masked import MaskedSamples
from tokamake.data.samples.objective import KEY
from tokamake.data.samples.sentence_samples import SentenceSamples
from tokamake.data.samples.span_corruption import SpanCorruptionSamples

_CLASSES: dict[str, type[SentenceSamples]] = {
    "masked": MaskedSamples,
    "span_corruption": SpanCorruptionSamples,
}


def open_samples(
    folder: Path, *, split: str, data_root: Path, verify: bool = True
) -> Samples | SentenceSamples:
    """Open the samples of a split; for the arguments see `loader.SplitSamples`."""
    objective = read_index(folder).get(KEY)
    kind = _CLASSES[objective["name"]] if objective else Samples
    return kind(folder, split=split, data_root=data_root, verify=verify)
