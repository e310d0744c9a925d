"""Samples of an index folder, whatever its objective is."""

from pathlib import Path
from typing import TYPE_CHECKING, cast

from tokamake.config.objective import DEFAULT, objective_data
from tokamake.data.samples.index_folder import read_index
from tokamake.data.samples.sentence_masking import KEY

if TYPE_CHECKING:
    from tokamake.data.samples.loader import Samples
    from tokamake.data.samples.sentence_samples import SentenceSamples


def open_samples(
    folder: Path, *, split: str, data_root: Path, verify: bool = True
) -> "Samples | SentenceSamples":
    """Open the samples of a split; for the arguments see `loader.SplitSamples`."""
    name = read_index(folder).get(KEY, {}).get("name", DEFAULT)
    opened = objective_data(name).open_samples(
        folder, split=split, data_root=data_root, verify=verify
    )
    return cast("Samples | SentenceSamples", opened)
