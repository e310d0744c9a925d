"""The stage `index`: which tokens every training and validation sample holds, and in which order.

Reads a weighting file and the .idx files it names; writes the index folder that `loader` opens.
"""

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tokamake import files
from tokamake.data import pairs
from tokamake.data.mixture.weights import Weighted, find_root, read_weights
from tokamake.data.text import splits
from tokamake.errors import UserError
from tokamake.runtime import counted

if TYPE_CHECKING:
    from tokamake.data.pairs.indexed import IndexedDataset
    from tokamake.data.samples.file_index import FileIndex

VERSION = 1
_MOST_FILES = 32_766
_log = logging.getLogger(__name__)


class _Source(NamedTuple):
    entry: Weighted
    dataset: "IndexedDataset"
    documents: range


def index(
    *,
    weights: Path,
    data_root: Path | None = None,
    sequence_length: int,
    train_samples: int,
    valid_samples: int,
    split: str,
    seed: int,
    output: Path,
) -> None:
    """Build the sample indexes of every token file and blend them into one order.

    The arrays are those that megatron-core builds from the same files, weights and seed.

    Args:
        weights: Weighting file: lines of `weight prefix corpus`.
        data_root: Folder that the prefixes are relative to; without it TOKAMAKE_DATA_ROOT or the
            folder of the weighting file.
        sequence_length: Tokens that the model sees per sample; a sample holds one more.
        train_samples: Training samples of the whole run.
        valid_samples: Validation samples per measurement; 0 makes no validation index.
        split: Shares of each file's documents for training, validation and test: "949,50,1".
        seed: Seed of the shuffles.
        output: Folder to write: index.json, train/ and, with validation samples, valid/.

    Raises:
        UserError: a value is out of range, a file is missing or damaged, or a split is empty.
    """
    _check("sequence_length", sequence_length, 2, 2**31 - 2)
    _check("train_samples", train_samples, 1, 2**62 // sequence_length)
    _check("valid_samples", valid_samples, 0, 2**62 // sequence_length)
    _check("seed", seed, 0, 2**32 - 1)
    splits.shares(split)  # a slip in the text shows before files are hashed
    entries = read_weights(weights)
    data_root = find_root(weights, data_root)
    _check(f"{weights}: number of files", len(entries), 1, _MOST_FILES)
    datasets = _open(entries, data_root)
    if splits.shares(split)[2]:
        # Better said now than by the evaluation after weeks of training.
        _sources(entries, datasets, "test", split)
    requests = {"train": train_samples, "valid": valid_samples}
    with files.atomic_folder(output, also=requests) as folder:
        described: dict[str, Any] = {
            "version": VERSION,
            "sequence_length": sequence_length,
            "seed": seed,
            "split": split,
            "pairs": {entry.prefix: identity(data_root, entry.prefix) for entry in entries},
            "splits": {
                name: _write_split(
                    folder / name,
                    sources=_sources(entries, datasets, name, split),
                    num_samples=num_samples,
                    sequence_length=sequence_length,
                    seed=seed,
                )
                for name, num_samples in requests.items()
                if num_samples
            },
        }
        files.write_json(folder / "index.json", {**described, "digest": files.digest(described)})
    counts = (f"{made['samples']:,} {name}" for name, made in described["splits"].items())
    print(f"{output}: {' and '.join(counts)} samples from {counted(len(entries), 'file')}")


def identity(data_root: Path, prefix: str) -> dict[str, Any]:
    """What tells a pair from another: sizes in bytes and hashes.

    The hashes come from the pair's manifest; without one, the .idx file's is taken.

    Raises:
        UserError: a file of the pair is missing, or the manifest is broken.
    """
    pair = data_root / prefix
    paths = {"bin": pairs.bin_path(pair), "idx": pairs.idx_path(pair)}
    for path in paths.values():
        if not path.is_file():
            raise UserError(f"{path}: no such file; check the prefix and the data root")
    sizes = {kind: path.stat().st_size for kind, path in paths.items()}
    manifest = pairs.manifest_path(pair)
    known = files.read_json(manifest, "make the pair again") if manifest.is_file() else {}
    hashes = known.get("sha256") if isinstance(known, dict) else None
    return {"bytes": sizes, "sha256": hashes or {"idx": files.sha256(paths["idx"])}}


def array_path(folder: Path, number: int, name: str) -> Path:
    """Path of one array of one file: `name` is document, sample or shuffle."""
    return folder / f"{number:05d}-{name}_index.npy"


def _check(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise UserError(f"{name}: {value}: out of range; give {least} to {most}")


def _open(entries: list[Weighted], data_root: Path) -> list["IndexedDataset"]:
    from tokamake.data.pairs.indexed import IndexedDataset

    return [IndexedDataset(data_root / entry.prefix) for entry in entries]


def _sources(
    entries: list[Weighted], datasets: list["IndexedDataset"], name: str, split: str
) -> list[_Source]:
    """Files that have something to give to a split; the others are reported."""
    sources = []
    for entry, dataset in zip(entries, datasets, strict=True):
        documents = splits.document_ranges(split, len(dataset))[name]
        if entry.weight > 0 and dataset.lengths[documents.start : documents.stop].any():
            sources.append(_Source(entry, dataset, documents))
        else:
            reason = "has no document for it" if entry.weight > 0 else "has weight 0"
            _log.warning("%s: left out of the %s split: %s", entry.prefix, name, reason)
    if not sources:
        raise UserError(
            f"split: {split!r}: no file has a document for the {name} split; "
            "give it a larger share or more data"
        )
    return sources


def _write_split(
    folder: Path, *, sources: list[_Source], num_samples: int, sequence_length: int, seed: int
) -> dict[str, Any]:
    import numpy as np

    from tokamake.data.samples.blend import blend
    from tokamake.runtime import progress

    folder.mkdir()
    mixture = blend([source.entry.weight for source in sources], num_samples)
    np.save(folder / "dataset_index.npy", mixture.dataset_index)
    np.save(folder / "dataset_sample_index.npy", mixture.dataset_sample_index)
    described = []
    for number, source in enumerate(progress(sources, label=folder.name, unit="files")):
        built = _build(
            source,
            wanted=mixture.wanted[number],
            drawn=mixture.drawn[number],
            sequence_length=sequence_length,
            seed=seed,
        )
        for name, array in built._asdict().items():
            np.save(array_path(folder, number, name), array)
        described.append(_describe(source, built, mixture.drawn[number]))
    return {
        "requested_samples": num_samples,
        "samples": len(mixture.dataset_index),
        "files": described,
    }


def _build(
    source: _Source, *, wanted: int, drawn: int, sequence_length: int, seed: int
) -> "FileIndex":
    """Build what Megatron builds; more where that is less than drawn and Megatron gives up."""
    from tokamake.data.samples import file_index

    def build(num_samples: int) -> "FileIndex":
        return file_index.build(
            source.dataset.lengths,
            source.documents,
            num_samples=num_samples,
            sequence_length=sequence_length,
            seed=seed,
        )

    built = build(wanted)
    return built if len(built.shuffle) >= drawn else build(drawn)


def _describe(source: _Source, built: "FileIndex", drawn: int) -> dict[str, Any]:
    first, last = source.documents.start, source.documents.stop
    return {
        "prefix": source.entry.prefix,
        "corpus": source.entry.corpus,
        "weight": source.entry.weight,
        "documents": [first, last],
        "tokens": int(source.dataset.lengths[first:last].sum(dtype="int64")),
        "epochs": len(built.document) // (last - first),
        "num_samples": len(built.shuffle),
        "drawn_samples": drawn,
    }
