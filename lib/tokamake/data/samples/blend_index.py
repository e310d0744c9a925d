"""Index of the datasets that a split blends: their order and their sample indexes.

`index` calls it for each split. `draw` writes the order, `dataset_indexers` builds the arrays of a
dataset.
"""

import logging
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tokamake.config.objective import objective_data
from tokamake.data.indexed.dataset import IndexedDataset
from tokamake.data.mixture.split_prefixes import SplitPrefixes
from tokamake.data.samples.dataset_indexers import DatasetIndexer, WeightedDataset, count_documents
from tokamake.data.samples.draw import draw, draw_all
from tokamake.data.samples.index_folder import ARRAYS, write_arrays
from tokamake.data.samples.index_options import Blend, IndexSettings
from tokamake.errors import UserError
from tokamake.runtime.console import progress

_MAX_DATASETS = {"weighted": 32_766, "exact": 2**31 - 1, "corpora": 2**31 - 1}
"""Megatron numbers the datasets of a blend in 16 bits."""

_log = logging.getLogger(__name__)


def find_datasets(
    splits: SplitPrefixes,
    data_root: Path,
    *,
    blend: Blend,
    validate: bool,
    has_sentences: bool = False,
    companions: Mapping[str, str] | None = None,
) -> dict[str, list[WeightedDataset]]:
    """Datasets of the training split and, with `validate`, of each validation split.

    `companions` maps datasets to datasets that are read along with them.
    """
    opened = {
        line.prefix: IndexedDataset(data_root / line.prefix)
        for name in splits.names
        for line in splits.lines(name)
    }
    companion_of = {
        prefix: (IndexedDataset(data_root / companion), companion)
        for prefix, companion in (companions or {}).items()
    }
    # Check the test split too: an empty one must fail now, not after weeks of training.
    datasets_of = {
        name: [
            dataset._replace(companion=companion, companion_prefix=prefix)
            for dataset in _contributing(splits, opened, name=name, has_sentences=has_sentences)
            for companion, prefix in [companion_of.get(dataset.line.prefix, (None, ""))]
        ]
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
    splits: SplitPrefixes, opened: dict[str, IndexedDataset], *, name: str, has_sentences: bool
) -> Iterator[WeightedDataset]:
    """Datasets that contribute to a split. Warns about unused datasets."""
    for line in splits.lines(name):
        dataset = opened[line.prefix]
        num_documents = count_documents(dataset, has_sentences=has_sentences)
        documents = splits.documents(name, line, num_documents)
        weighted = WeightedDataset(line, dataset, documents, has_sentences=has_sentences)
        sequences = weighted.sequences
        if line.weight > 0 and dataset.lengths[sequences.start : sequences.stop].any():
            yield weighted
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
    pieces: npt.NDArray[np.uint8] | None = None,
) -> dict[str, Any]:
    """Write the arrays of a split and return their description for index.json.

    Without `num_samples`, `epochs_of` has the epochs of each corpus. `pieces` (vocabulary,) is the
    kind of each token, where whole words are masked.
    """
    folder.mkdir()
    if num_samples is None and settings.separate_last_epoch is None:
        # A mixed last epoch would repeat some documents and drop other documents.
        settings = settings._replace(separate_last_epoch=True)
    indexer: DatasetIndexer[Any] = objective_data(settings.objective_name).make_indexer(
        settings, epochs_of=epochs_of if num_samples is None else {}, pieces=pieces
    )
    counts: list[int] = []
    if num_samples is None:
        datasets, counts = _whole_epochs(datasets, indexer, epochs_of=epochs_of)
    corpora = [dataset.line.corpus for dataset in datasets]
    if num_samples is None:
        samples = draw_all(folder, counts, corpora=corpora, settings=settings)
    else:
        weights = [dataset.line.weight for dataset in datasets]
        samples = draw(folder, weights, corpora, num_samples=num_samples, settings=settings)
    descriptions = []
    with (folder / ARRAYS).open("wb") as stream:
        for number, dataset in enumerate(progress(datasets, label=folder.name, unit="datasets")):
            drawn = samples.drawn[number]
            # A small blend may draw more samples than Megatron requests. Megatron fails then.
            arrays = indexer.build(dataset, samples.requested[number])
            if arrays.num_samples < drawn:
                arrays = indexer.build(dataset, drawn)
            indexer.check(dataset, arrays, drawn=drawn, split=folder.name)
            description = _describe(
                dataset,
                num_epochs=indexer.num_epochs(dataset, arrays),
                num_samples=arrays.num_samples,
                drawn=drawn,
            )
            locations = write_arrays(stream, arrays._asdict())
            descriptions.append({**description, "arrays": locations})
    _warn_of_repetition(folder.name, descriptions)
    # The key "files" is part of the format of index.json.
    return {"requested_samples": num_samples, "samples": sum(samples.drawn), "files": descriptions}


def _warn_of_repetition(name: str, descriptions: list[dict[str, Any]]) -> None:
    repeated = [dataset for dataset in descriptions if dataset["epochs"] > 1]
    if name != "train" and repeated:
        _log.warning(
            "%s: %d of its %d datasets are too small: some of their samples are evaluated several "
            "times; use fewer samples or hold out more documents",
            *(name, len(repeated), len(descriptions)),
        )


def _whole_epochs(
    datasets: list[WeightedDataset], indexer: DatasetIndexer[Any], *, epochs_of: dict[str, Fraction]
) -> tuple[list[WeightedDataset], list[int]]:
    counts = [indexer.count(dataset, epochs_of[dataset.line.corpus]) for dataset in datasets]
    filled = [dataset for dataset, count in zip(datasets, counts, strict=True) if count]
    if not filled:
        raise UserError(
            "epochs: no dataset fills a sample; use more epochs or a shorter sequence_length"
        )
    return filled, [count for count in counts if count]


def _describe(
    dataset: WeightedDataset, *, num_epochs: int, num_samples: int, drawn: int
) -> dict[str, Any]:
    documents = dataset.documents
    return {
        "prefix": dataset.line.prefix,
        "corpus": dataset.line.corpus,
        "weight": dataset.line.weight,
        "documents": [documents.start, documents.stop],
        "tokens": dataset.tokens,
        "epochs": num_epochs,
        "num_samples": num_samples,
        "drawn_samples": drawn,
        **({"companion": dataset.companion_prefix} if dataset.companion else {}),
    }
