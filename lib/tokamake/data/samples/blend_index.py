"""Index of the datasets that a split blends: their order and their sample indexes.

`index` calls it for each split. `draw` writes the order, `sample_index` builds the arrays of a
dataset, and `array_file` stores them.
"""

import logging
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tokamake.data.indexed.dataset import IndexedDataset
from tokamake.data.mixture.split_prefixes import SplitPrefixes
from tokamake.data.mixture.weights import WeightedPrefix
from tokamake.data.samples import array_file, draw, epochs, sample_index
from tokamake.data.samples.sample_index import DatasetIndex
from tokamake.errors import UserError
from tokamake.runtime.console import progress

_MAX_DATASETS = {"weighted": 32_766, "exact": 2**31 - 1, "corpora": 2**31 - 1}
"""Megatron numbers the datasets of a blend in 16 bits."""

_MAX_EPOCHS = 100_000
"""More is most likely a mistake in the weights, and would fill the memory."""

_log = logging.getLogger(__name__)


class WeightedDataset(NamedTuple):
    """A dataset of a split."""

    line: WeightedPrefix
    dataset: IndexedDataset
    documents: range
    """Sequences that belong to the split; they hold at least one token."""

    @property
    def tokens(self) -> int:
        """Tokens of the split's documents."""
        first, stop = self.documents.start, self.documents.stop
        return int(self.dataset.lengths[first:stop].sum(dtype=np.int64))


class IndexSettings(NamedTuple):
    """Settings that decide the samples of a split; the fields are options of `index`."""

    sequence_length: int
    seed: int
    blend: draw.Blend
    within_corpus: draw.Within
    separate_last_epoch: bool | None
    drop_last_partial_sequence: bool

    def of(self, name: str) -> "IndexSettings":
        """Settings of one split: training only takes whole samples."""
        return self._replace(drop_last_partial_sequence=True) if name == "train" else self


def find_datasets(
    splits: SplitPrefixes, data_root: Path, *, blend: draw.Blend, validate: bool
) -> dict[str, list[WeightedDataset]]:
    """Datasets of the training split and, with `validate`, of each validation split.

    Raises:
        UserError: a dataset is missing or damaged, a split is empty, or no split can validate.
    """
    opened = {
        line.prefix: IndexedDataset(data_root / line.prefix)
        for name in splits.names
        for line in splits.lines(name)
    }
    # Check the test split too: an empty one must fail now, not after weeks of training.
    datasets_of = {
        name: list(_contributing(splits, opened, name=name))
        for name in splits.names
        if splits.is_used(name)
    }
    for name, datasets in datasets_of.items():
        if not datasets:
            raise UserError(
                f"{splits.origin(name)}: no dataset has a document for the {name} split; "
                "give it a larger share or more data"
            )
        if len(datasets) > _MAX_DATASETS[blend]:
            raise UserError(
                f"{name}: {len(datasets):,} datasets; blend {blend!r} allows at most "
                f"{_MAX_DATASETS[blend]:,}; merge datasets or use blend exact or corpora"
            )
        if name != "train":
            _warn_of_overlap(datasets_of["train"], datasets, name=name)
    validation = [name for name in datasets_of if name not in ("train", "test")]
    if validate and not validation:
        raise UserError(
            "split: nothing to validate on; give the second number a share (datasets with "
            "a part for training have none), name a validation split, or set valid_samples to 0"
        )
    if blend == "corpora":
        datasets_of = {name: _grouped(datasets) for name, datasets in datasets_of.items()}
    return {name: datasets_of[name] for name in ["train", *(validation if validate else [])]}


def _contributing(
    splits: SplitPrefixes, opened: dict[str, IndexedDataset], *, name: str
) -> Iterator[WeightedDataset]:
    """Datasets that contribute to a split. Warns about the others."""
    for line in splits.lines(name):
        dataset = opened[line.prefix]
        documents = splits.documents(name, line, len(dataset))
        if line.weight > 0 and dataset.lengths[documents.start : documents.stop].any():
            yield WeightedDataset(line, dataset, documents)
        # A line with a part trains that part only: nothing of it in other splits is expected.
        elif name == "train" or splits.is_listed(name) or not line.part:
            reason = "has no document for it" if line.weight > 0 else "has weight 0"
            _log.warning("%s: left out of the %s split: %s", line.prefix, name, reason)


def _warn_of_overlap(
    train: list[WeightedDataset], held_out: list[WeightedDataset], *, name: str
) -> None:
    trained = {dataset.line.prefix: dataset.documents for dataset in train}
    for dataset in held_out:
        prefix, documents = dataset.line.prefix, dataset.documents
        in_train = trained.get(prefix, range(0))
        first, stop = max(documents.start, in_train.start), min(documents.stop, in_train.stop)
        if first < stop:
            _log.warning(
                "%s: documents %d to %d are in the train and %s splits; the loss on %s will look "
                "too good",
                *(prefix, first, stop - 1, name, name),
            )


def _grouped(datasets: list[WeightedDataset]) -> list[WeightedDataset]:
    """Make datasets of a corpus neighbors; corpora stay in order of first appearance."""
    positions: dict[str, int] = {}
    for dataset in datasets:
        positions.setdefault(dataset.line.corpus, len(positions))
    return sorted(datasets, key=lambda dataset: positions[dataset.line.corpus])


def write_split(
    folder: Path,
    *,
    datasets: list[WeightedDataset],
    settings: IndexSettings,
    num_samples: int | None,
    epochs_of: dict[str, Fraction],
) -> dict[str, Any]:
    """Write the arrays of a split and return their description for index.json.

    Args:
        folder: folder to create.
        datasets: datasets of the split.
        settings: settings of the split.
        num_samples: requested samples; None: as many as the epochs give.
        epochs_of: epochs of each corpus, if `num_samples` is None.

    Raises:
        UserError: the epochs hold no sample.
    """
    folder.mkdir()
    if num_samples is None and settings.separate_last_epoch is None:
        # A mixed last epoch would repeat some documents while it drops others.
        settings = settings._replace(separate_last_epoch=True)
    order = draw.DrawSettings(settings.blend, settings.within_corpus, settings.seed)
    if num_samples is None:
        datasets, counts = _whole_epochs(datasets, settings, epochs_of=epochs_of)
        corpora = [dataset.line.corpus for dataset in datasets]
        samples = draw.draw_all(folder, counts, corpora=corpora, settings=order)
    else:
        weights = [dataset.line.weight for dataset in datasets]
        corpora = [dataset.line.corpus for dataset in datasets]
        samples = draw.draw(folder, weights, corpora, num_samples=num_samples, settings=order)
    descriptions = []
    with (folder / array_file.NAME).open("wb") as stream:
        for number, dataset in enumerate(progress(datasets, label=folder.name, unit="datasets")):
            drawn = samples.drawn[number]
            arrays = _build(dataset, samples.requested[number], drawn=drawn, settings=settings)
            locations = array_file.write_arrays(stream, arrays)
            descriptions.append({**_describe(dataset, arrays, drawn=drawn), "arrays": locations})
    _warn_of_repetition(folder.name, descriptions)
    # The key "files" is part of the format of index.json.
    return {"requested_samples": num_samples, "samples": samples.samples, "files": descriptions}


def _warn_of_repetition(name: str, descriptions: list[dict[str, Any]]) -> None:
    repeated = [dataset for dataset in descriptions if dataset["epochs"] > 1]
    if name != "train" and repeated:
        _log.warning(
            "%s: %d of its %d datasets are too small: some of their samples are evaluated several "
            "times; use fewer samples or hold out more documents",
            *(name, len(repeated), len(descriptions)),
        )


def _whole_epochs(
    datasets: list[WeightedDataset], settings: IndexSettings, *, epochs_of: dict[str, Fraction]
) -> tuple[list[WeightedDataset], list[int]]:
    """Datasets that fill a sample in the epochs of their corpus, and the samples of each."""
    filled, counts = [], []
    for dataset in datasets:
        count = epochs.count_samples(
            epochs_of[dataset.line.corpus],
            sequence_length=settings.sequence_length,
            tokens_per_epoch=dataset.tokens,
        )
        if count:
            filled.append(dataset)
            counts.append(count)
        else:
            _log.warning(
                "%s: left out of the train split: its %d tokens do not fill a sample of %d",
                *(dataset.line.prefix, dataset.tokens, settings.sequence_length),
            )
    if not filled:
        raise UserError(
            "epochs: no dataset fills a sample; use more epochs or a shorter sequence_length"
        )
    return filled, counts


def _build(
    dataset: WeightedDataset, requested: int, *, drawn: int, settings: IndexSettings
) -> DatasetIndex:
    """Build the same index as Megatron, or a larger one if more samples are drawn.

    A small blend may draw more samples than Megatron requests. Megatron fails in this case.
    """

    def build(num_samples: int) -> DatasetIndex:
        return sample_index.build(
            dataset.dataset.lengths,
            dataset.documents,
            num_samples=num_samples,
            sequence_length=settings.sequence_length,
            seed=settings.seed,
            separate_last_epoch=settings.separate_last_epoch,
            drop_last_partial_sequence=settings.drop_last_partial_sequence,
        )

    tokens = dataset.tokens
    num_epochs = max(requested, drawn) * settings.sequence_length // tokens
    if num_epochs > _MAX_EPOCHS:
        raise UserError(
            f"{dataset.line.prefix}: its {tokens:,} tokens would be seen {num_epochs:,} times; "
            "lower its weight or draw fewer samples"
        )
    arrays = build(requested)
    return arrays if len(arrays.shuffle) >= drawn else build(drawn)


def _describe(dataset: WeightedDataset, arrays: DatasetIndex, *, drawn: int) -> dict[str, Any]:
    documents = dataset.documents
    return {
        "prefix": dataset.line.prefix,
        "corpus": dataset.line.corpus,
        "weight": dataset.line.weight,
        "documents": [documents.start, documents.stop],
        "tokens": dataset.tokens,
        "epochs": len(arrays.document) // len(documents),
        "num_samples": len(arrays.shuffle),
        "drawn_samples": drawn,
    }
