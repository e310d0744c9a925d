"""Samples of the objective retro: tokens, and the tokens of their chunks' neighbors."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tokamake import files
from tokamake.data.samples.document_samples import DocumentSamples
from tokamake.data.samples.loader import PAD
from tokamake.data.samples.sentence_masking import KEY
from tokamake.errors import UserError
from tokamake.train.objectives.retro.chunks import (
    INDEX_NAME,
    REMEDY,
    ChunkDatabase,
    Numbers,
    open_numbers,
)

NEIGHBORS = ".npy"
"""Suffix of the file of neighbors of a dataset's samples."""


def neighbor_folder(index: Path) -> Path:
    """Folder of the neighbors of the samples of an index: `neighbors` beside it."""
    return index.parent / "neighbors"


def dataset_name(prefix: str) -> str:
    """Name of the files of a dataset's chunks and neighbors."""
    return Path(prefix).name


def neighbor_hashes(folder: Path, index: dict[str, Any]) -> dict[str, str]:
    """Hashes of the neighbors of the training samples of each dataset, and of the chunks' numbers.

    Args:
        folder: of the index.
        index: its index.json.
    """
    neighbors = neighbor_folder(folder)
    names = [dataset_name(each["prefix"]) for each in index["splits"]["train"]["files"]]
    manifests = [INDEX_NAME, *(f"train/{name}.json" for name in names)]
    return {
        name: str(files.read_sealed_json(neighbors / name, REMEDY)["hashes"][NEIGHBORS])
        for name in manifests
    }


def retro_record(
    sequence_length: int, *, chunk_length: int, neighbors: int, retrieved_chunks: int
) -> np.dtype[np.void]:
    """Fields of a sample of L tokens, with C = L / m chunks, k neighbors and r = chunks x m tokens.

    tokens: (L + 1,) tokens, `PAD` where a partial sample ends.
    neighbor_tokens: (C, k, r) tokens of each neighbor and of the chunks after it in its document.
    num_neighbor_tokens: (C, k) how many of them count; 0: no neighbor.
    """
    num_chunks = sequence_length // chunk_length
    return np.dtype(
        [
            ("tokens", np.int64, (sequence_length + 1,)),
            (
                "neighbor_tokens",
                np.int64,
                (num_chunks, neighbors, retrieved_chunks * chunk_length),
            ),
            ("num_neighbor_tokens", np.int64, (num_chunks, neighbors)),
        ]
    )


class ChunkedSamples(DocumentSamples):
    """Samples of a split, dataset by dataset, whose chunks have neighbors.

    A sample of a dataset is named by its place: how many were drawn from the dataset before.
    """

    def __init__(self, folder: Path, *, split: str, data_root: Path, verify: bool = True) -> None:
        super().__init__(folder, split=split, data_root=data_root, verify=verify)
        self._stated: dict[str, Any] = self._description.get(KEY, {})
        if self._stated.get("name") != "retro":
            raise UserError(
                f"{folder}: its samples have no neighbors; run `tokamake index` with --objective "
                "retro"
            )
        self.split, self.chunk_length = split, int(self._stated["chunk_length"])
        self.num_chunks = self.sequence_length // self.chunk_length

    def number(self, name: str) -> int | None:
        """Number of a dataset by its `dataset_name`; None: the split has no sample of it."""
        names = [dataset_name(each["prefix"]) for each in self._descriptions]
        return names.index(name) if name in names else None

    def prefix(self, number: int) -> str:
        """A dataset, relative to the data root."""
        return str(self._descriptions[number]["prefix"])

    def num_drawn(self, number: int) -> int:
        """Samples that are drawn from a dataset."""
        return int(self._descriptions[number]["drawn_samples"])

    def chunks(self, number: int, *, eod: int) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
        """Yield all chunks of a dataset's samples: number, and tokens without ends of documents."""
        for place in range(self.num_drawn(number)):
            tokens = self._assembled(number, place, sample=place)[: self.sequence_length]
            for chunk, row in enumerate(tokens.reshape(self.num_chunks, self.chunk_length)):
                yield place * self.num_chunks + chunk, row[(row != PAD) & (row != eod)]

    def documents(self, number: int, place: int) -> Numbers:
        """Documents of the dataset whose tokens a sample has, in order."""
        index = self._indexes[number]
        (first, _), (last, _) = self._bounds(index, place)
        return index.document[first : last + 1].astype(np.int64)

    def samples_digest(self, number: int) -> str:
        """Digest of everything that decides the samples of a dataset, and of nothing else."""
        index, prefix = self._indexes[number], self.prefix(number)
        shuffle = index.shuffle[: self.num_drawn(number)]
        hashes = [
            hashlib.sha256(np.ascontiguousarray(array).data).hexdigest()
            for array in (index.document, index.sample, shuffle)
        ]
        lengths = [self.sequence_length, self.chunk_length]
        return files.digest([self._description["pairs"][prefix], *lengths, *hashes])


class RetroSamples(ChunkedSamples):
    """Samples of one split, as arrays without dimensions with the fields of `retro_record`."""

    def __init__(self, folder: Path, *, split: str, data_root: Path, verify: bool = True) -> None:
        super().__init__(folder, split=split, data_root=data_root, verify=verify)
        neighbors = neighbor_folder(folder)
        self._chunks = ChunkDatabase(neighbors / INDEX_NAME, data_root=data_root)
        self._num_neighbors = int(self._stated["neighbors"])
        self._width = int(self._stated["retrieved_chunks"]) * self.chunk_length
        self._record = retro_record(
            self.sequence_length,
            chunk_length=self.chunk_length,
            neighbors=self._num_neighbors,
            retrieved_chunks=int(self._stated["retrieved_chunks"]),
        )
        if verify:
            self._check_chunks(neighbors / INDEX_NAME)
        self._neighbors = [
            self._open_neighbors(
                neighbors / split / f"{dataset_name(self.prefix(number))}.json",
                number,
                verify=verify,
            )
            for number in range(len(self.prefixes))
        ]

    def _check_chunks(self, manifest: Path) -> None:
        """Refuse chunks of other datasets, or of another length, than the index has."""
        if self._chunks.chunk_length != self.chunk_length:
            raise UserError(
                f"{manifest}: chunks of {self._chunks.chunk_length} tokens, the samples have "
                f"chunks of {self.chunk_length}; {REMEDY}"
            )
        for dataset in self._chunks.datasets:
            if self._description["pairs"].get(dataset.prefix) != dataset.identity:
                raise UserError(
                    f"{manifest}: has chunks of another {dataset.prefix} than the index of the "
                    f"samples; {REMEDY}"
                )

    def _open_neighbors(self, manifest: Path, number: int, *, verify: bool) -> Numbers:
        """(samples, C, k) chunks, the most similar ones first."""
        facts = files.read_sealed_json(manifest, REMEDY)
        if facts.get("chunks") != self._chunks.request:
            raise UserError(f"{manifest}: neighbors among other chunks than {INDEX_NAME}; {REMEDY}")
        if verify and facts.get("samples") != self.samples_digest(number):
            raise UserError(
                f"{manifest}: neighbors of other samples than the {self.split} split of "
                f"{self._folder.parent} has of {self.prefix(number)}; {REMEDY}"
            )
        shape = (self.num_drawn(number), self.num_chunks, int(facts["num_kept"]))
        if shape[-1] < self._num_neighbors:
            raise UserError(
                f"{manifest}: {shape[-1]} neighbors of each chunk, the samples need "
                f"{self._num_neighbors}; {REMEDY}"
            )
        path = manifest.with_name(manifest.name.removesuffix(".json") + NEIGHBORS)
        return open_numbers(path, shape=shape, remedy=REMEDY)[..., : self._num_neighbors]

    def __getitem__(self, sample: int) -> npt.NDArray[Any]:
        row = np.zeros((), self._record)
        row["tokens"] = super().__getitem__(sample)
        number, place = self._dataset_number(sample), int(self._dataset_sample_index[sample])
        chunks = np.ascontiguousarray(self._neighbors[number][place])
        tokens, counts = self._chunks.read(chunks.ravel(), width=self._width)
        row["neighbor_tokens"] = tokens.reshape(*chunks.shape, self._width)
        row["num_neighbor_tokens"] = counts.reshape(chunks.shape)
        return row
