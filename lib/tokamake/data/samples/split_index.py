"""One set of a run: which of its files have something to give, and their arrays.

`index` asks for each set; orders come from `draw`, the arrays of a file from `file_index`.
"""

import logging
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tokamake.data.indexed.dataset import IndexedDataset
from tokamake.data.mixture.split_prefixes import SplitPrefixes
from tokamake.data.mixture.weights import Weighted
from tokamake.data.samples import array_file, dataset_index, draw, epochs
from tokamake.data.samples.dataset_index import DatasetIndex
from tokamake.errors import UserError
from tokamake.runtime.console import progress

_MOST_FILES = {"weighted": 32_766, "exact": 2**31 - 1, "corpora": 2**31 - 1}
"""Megatron numbers the files of a blend in 16 bits."""

_MOST_EPOCHS = 100_000
"""More is a slip, and would take all memory."""

_log = logging.getLogger(__name__)


class WeightedDataset(NamedTuple):
    """A file of a set."""

    line: Weighted
    dataset: IndexedDataset
    documents: range
    """Those that belong to the set; they hold a token or more."""

    @property
    def tokens(self) -> int:
        """Tokens of the set's documents."""
        first, last = self.documents.start, self.documents.stop
        return int(self.dataset.lengths[first:last].sum(dtype=np.int64))


class IndexSettings(NamedTuple):
    """What else decides the samples of a set; the fields are options of `index`."""

    sequence_length: int
    seed: int
    blend: draw.Blend
    within_corpus: draw.Within
    separate_last_epoch: bool | None
    drop_last_partial_sequence: bool

    def of(self, name: str) -> "IndexSettings":
        """Settings for one set: a training has use for whole samples only."""
        return self._replace(drop_last_partial_sequence=True) if name == "train" else self


def find_sources(
    sets: SplitPrefixes, data_root: Path, *, blend: draw.Blend, validate: bool
) -> dict[str, list[WeightedDataset]]:
    """Files of the training and, if there is to be one, of each validation set.

    Raises:
        UserError: a pair is missing or damaged, a set is empty, or there is none to validate on.
    """
    opened = {
        line.prefix: IndexedDataset(data_root / line.prefix)
        for name in sets.names
        for line in sets.lines(name)
    }
    # What is kept for tests is looked at too: better said now than after weeks of training.
    found = {name: list(_sources(sets, opened, name)) for name in sets.names if sets.is_used(name)}
    for name, sources in found.items():
        if not sources:
            raise UserError(
                f"{sets.origin(name)}: no file has a document for the {name} set; "
                "give it a larger share or more data"
            )
        if len(sources) > _MOST_FILES[blend]:
            raise UserError(
                f"{name}: {len(sources):,} files, {blend!r} numbers at most "
                f"{_MOST_FILES[blend]:,}; merge files or take blend exact or corpora"
            )
        if name != "train":
            _warn_of_overlap(found["train"], sources, name)
    validation = [name for name in found if name not in ("train", "test")]
    if validate and not validation:
        raise UserError(
            "split: nothing to validate on; give the second number a share, name a "
            "validation set, or set valid_samples to 0"
        )
    if blend == "corpora":
        found = {name: _grouped(sources) for name, sources in found.items()}
    return {name: found[name] for name in ["train", *(validation if validate else [])]}


def _sources(
    sets: SplitPrefixes, opened: dict[str, IndexedDataset], name: str
) -> Iterator[WeightedDataset]:
    """Files that have something to give to a set; the others are reported."""
    for line in sets.lines(name):
        dataset = opened[line.prefix]
        documents = sets.documents(name, line, len(dataset))
        if line.weight > 0 and dataset.lengths[documents.start : documents.stop].any():
            yield WeightedDataset(line, dataset, documents)
        elif name == "train" or sets.is_listed(name) or not line.part:  # else none was meant
            reason = "has no document for it" if line.weight > 0 else "has weight 0"
            _log.warning("%s: left out of the %s set: %s", line.prefix, name, reason)


def _warn_of_overlap(
    train: list[WeightedDataset], held_out: list[WeightedDataset], name: str
) -> None:
    trained = {source.line.prefix: source.documents for source in train}
    for source in held_out:
        theirs, ours = source.documents, trained.get(source.line.prefix, range(0))
        first, last = max(theirs.start, ours.start), min(theirs.stop, ours.stop)
        if first < last:
            _log.warning(
                "%s: documents %d to %d train and are in %s too, which will look too good",
                *(source.line.prefix, first, last - 1, name),
            )


def _grouped(sources: list[WeightedDataset]) -> list[WeightedDataset]:
    """Files of one corpus behind each other, corpora in the order in which they first come."""
    places: dict[str, int] = {}
    for source in sources:
        places.setdefault(source.line.corpus, len(places))
    return sorted(sources, key=lambda source: places[source.line.corpus])


def write_set(
    folder: Path,
    *,
    sources: list[WeightedDataset],
    settings: IndexSettings,
    num_samples: int | None,
    stated: dict[str, Fraction],
) -> dict[str, Any]:
    """Write the arrays of a set, and describe them.

    Args:
        folder: to make.
        sources: its files.
        settings: of the set.
        num_samples: samples wanted; None: as many as the epochs give.
        stated: epochs of each corpus, where there is no number of samples.

    Raises:
        UserError: epochs hold no sample.
    """
    folder.mkdir()
    if num_samples is None and settings.separate_last_epoch is None:
        settings = settings._replace(separate_last_epoch=True)  # no document once more than another
    manner = draw.Manner(settings.blend, settings.within_corpus, settings.seed)
    if num_samples is None:
        sources, counts = _whole_epochs(sources, settings, stated)
        corpora = [source.line.corpus for source in sources]
        made = draw.draw_all(folder, counts, corpora, manner=manner)
    else:
        weights = [source.line.weight for source in sources]
        corpora = [source.line.corpus for source in sources]
        made = draw.draw(folder, weights, corpora, num_samples=num_samples, manner=manner)
    described = []
    with (folder / array_file.NAME).open("wb") as stream:
        for number, source in enumerate(progress(sources, label=folder.name, unit="files")):
            built = _build(source, made.wanted[number], made.drawn[number], settings)
            places = array_file.write_arrays(stream, built)
            described.append({**_describe(source, built, made.drawn[number]), "arrays": places})
    _warn_of_repetition(folder.name, described)
    return {"requested_samples": num_samples, "samples": made.samples, "files": described}


def _warn_of_repetition(name: str, described: list[dict[str, Any]]) -> None:
    """Say that a validation set is smaller than what is measured of it."""
    again = [file for file in described if file["epochs"] > 1]
    if name != "train" and again:
        _log.warning(
            "%s: %d of its %d files are too small: samples of them are measured several times; ask "
            "for fewer samples or hold out more",
            *(name, len(again), len(described)),
        )


def _whole_epochs(
    sources: list[WeightedDataset], settings: IndexSettings, stated: dict[str, Fraction]
) -> tuple[list[WeightedDataset], list[int]]:
    """Files that give a sample in the epochs of their corpora, and how many each gives."""
    found = []
    for source in sources:
        count = epochs.count_samples(
            stated[source.line.corpus],
            sequence_length=settings.sequence_length,
            tokens_per_epoch=source.tokens,
        )
        if count:
            found.append((source, count))
        else:
            _log.warning(
                "%s: left out of the training: its %d tokens fill no sample of %d",
                *(source.line.prefix, source.tokens, settings.sequence_length),
            )
    if not found:
        raise UserError("epochs: no file fills a sample; state more or shorten sequence_length")
    return [source for source, _ in found], [count for _, count in found]


def _build(
    source: WeightedDataset, wanted: int, drawn: int, settings: IndexSettings
) -> DatasetIndex:
    """Build what Megatron builds; more where that is less than drawn and Megatron gives up."""

    def build(num_samples: int) -> DatasetIndex:
        return dataset_index.build(
            source.dataset.lengths,
            source.documents,
            num_samples=num_samples,
            sequence_length=settings.sequence_length,
            seed=settings.seed,
            separate_last_epoch=settings.separate_last_epoch,
            drop_last_partial_sequence=settings.drop_last_partial_sequence,
        )

    tokens = source.tokens
    epochs_of = max(wanted, drawn) * settings.sequence_length // tokens
    if epochs_of > _MOST_EPOCHS:
        raise UserError(
            f"{source.line.prefix}: its {tokens:,} tokens would be seen {epochs_of:,} times; lower "
            "its weight or draw fewer samples"
        )
    built = build(wanted)
    return built if len(built.shuffle) >= drawn else build(drawn)


def _describe(source: WeightedDataset, built: DatasetIndex, drawn: int) -> dict[str, Any]:
    documents = source.documents
    return {
        "prefix": source.line.prefix,
        "corpus": source.line.corpus,
        "weight": source.line.weight,
        "documents": [documents.start, documents.stop],
        "tokens": source.tokens,
        "epochs": len(built.document) // len(documents),
        "num_samples": len(built.shuffle),
        "drawn_samples": drawn,
    }
