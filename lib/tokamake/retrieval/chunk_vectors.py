"""Vectors of the chunks of the documents of a training split, from embeddings of whole datasets."""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tokamake.data.samples.index_folder import read_index
from tokamake.data.samples.sentence_masking import KEY
from tokamake.errors import UserError
from tokamake.retrieval.chunk_tables import ChunkTable, open_table
from tokamake.retrieval.embeddings import Embeddings, Ids, Vectors, open_embeddings
from tokamake.retrieval.products import read_product
from tokamake.train.objectives.retro.chunks import Numbers
from tokamake.train.objectives.retro.samples import dataset_name

SAME = ("model", "tokenizer", "sequence_length", "decoded_by")
"""Facts that vectors of chunks, and of the chunks of samples, share."""


class TrainedDataset(NamedTuple):
    """A dataset of a training split."""

    prefix: str
    identity: dict[str, Any]
    documents: range
    """Documents of the split."""
    table: ChunkTable
    first_document: int
    """Its first document among the documents of all datasets."""
    first_chunk: int
    """Its first chunk among all chunks."""


def trained_datasets(index: Path, chunks: Path) -> list[TrainedDataset]:
    """Datasets of the training split of an index, with their tables.

    Args:
        index: folder of `index`, with samples of objective retro.
        chunks: folder of the tables, a NAME.json for each dataset.
    """
    description = read_index(index)
    stated = description.get(KEY, {})
    if stated.get("name") != "retro":
        raise UserError(
            f"{index}: its samples have no neighbors; run `tokamake index` with --objective retro"
        )
    datasets: list[TrainedDataset] = []
    first_document = first_chunk = 0
    for entry in description["splits"]["train"]["files"]:
        prefix, name = entry["prefix"], dataset_name(entry["prefix"])
        if other := [each.prefix for each in datasets if dataset_name(each.prefix) == name]:
            raise UserError(
                f"{index}: datasets {other[0]} and {prefix}: chunks and neighbors of both would "
                f"be {name}.json; merge them, or rename one"
            )
        measured = description["pairs"][prefix]
        table = open_table(chunks / f"{name}.json", dataset=measured, name=prefix)
        if table.chunk_length != stated["chunk_length"]:
            raise UserError(
                f"{table.manifest}: chunks of {table.chunk_length} tokens, the samples of {index} "
                f"have chunks of {stated['chunk_length']}; give the folder of such chunks"
            )
        datasets.append(
            TrainedDataset(
                prefix, measured, range(*entry["documents"]), table, first_document, first_chunk
            )
        )
        first_document += len(table.first_chunks) - 1
        first_chunk += table.num_chunks
    if len({each.table.eod for each in datasets}) > 1:
        raise UserError(f"{chunks}: made with several tokenizers; run `tokamake chunk-documents`")
    return datasets


def all_first_chunks(datasets: list[TrainedDataset]) -> Numbers:
    """(documents + 1,) number of the first chunk of each document of all datasets, and the end."""
    starts = [each.table.first_chunks[:-1] + each.first_chunk for each in datasets]
    end = datasets[-1].first_chunk + datasets[-1].table.num_chunks
    return np.concatenate([*starts, np.array([end])])


class _Part(NamedTuple):
    """Vectors of a dataset that are in the split: a range of its embeddings."""

    embeddings: Embeddings
    positions: range
    first_chunk: int


class ChunkVectors:
    """Vectors of the chunks of a training split, in order; ids are numbers among all chunks."""

    def __init__(self, datasets: list[TrainedDataset], folder: Path) -> None:
        """Open the embeddings of each dataset, a folder of `folder` with its name.

        Documents of other splits are left out: what a model is measured on is no neighbor.
        """
        self._parts: list[_Part] = []
        self._shards: list[list[Any]] = []
        shared: dict[str, Any] = {}
        for dataset in datasets:
            path = folder / dataset_name(dataset.prefix)
            if not has_vectors(path):
                continue
            embeddings = open_embeddings(path)
            self._check(embeddings, dataset, shared=shared)
            bounds = dataset.table.first_chunks[[dataset.documents.start, dataset.documents.stop]]
            first, stop = np.searchsorted(embeddings.ids, bounds).tolist()
            self._parts.append(_Part(embeddings, range(first, stop), dataset.first_chunk))
            self._shards.append([embeddings.facts["shards"], first, stop])
        self.num_vectors = sum(len(part.positions) for part in self._parts)
        if not self.num_vectors:
            raise UserError(f"{folder}: no chunk of the training split has a text; add documents")
        self.dimension = self._parts[0].embeddings.dimension
        self.facts = {"shards": self._shards, "made_from": shared}

    @staticmethod
    def _check(embeddings: Embeddings, dataset: TrainedDataset, *, shared: dict[str, Any]) -> None:
        """Refuse vectors of other chunks, or of another model than the earlier ones."""
        made_from = embeddings.facts["made_from"]
        if made_from.get("chunks") != dataset.table.request:
            raise UserError(
                f"{embeddings.folder}: vectors of other chunks than {dataset.table.manifest}; run "
                "`tokamake embed-chunks` again"
            )
        for name in SAME:
            if shared.setdefault(name, made_from.get(name)) != made_from.get(name):
                raise UserError(
                    f"{embeddings.folder}: made with another {name} than earlier datasets; embed "
                    "all datasets with one model"
                )

    @cached_property
    def ids(self) -> Ids:
        """(n,) numbers of the chunks among all chunks."""
        ids = [
            part.embeddings.ids[part.positions.start : part.positions.stop] + part.first_chunk
            for part in self._parts
        ]
        return np.concatenate(ids)

    def blocks(self, rows: int, /) -> Iterator[Vectors]:
        """Yield all vectors in order as fp32, `rows` at a time."""
        for start in range(0, self.num_vectors, rows):
            yield self.take(np.arange(start, min(start + rows, self.num_vectors)))

    def take(self, positions: Numbers, /) -> Vectors:
        """Vectors at sorted positions (k,): (k, d), fp32."""
        taken, start = [], 0
        for part in self._parts:
            first, last = np.searchsorted(positions, [start, start + len(part.positions)])
            if last > first:
                own = positions[first:last] - start + part.positions.start
                taken.append(part.embeddings.take(own))
            start += len(part.positions)
        return np.concatenate(taken)


def has_vectors(folder: Path) -> bool:
    """Whether a folder of shards has a vector; a dataset without text has none."""
    manifests = sorted(folder.glob("*.json")) if folder.is_dir() else []
    if not manifests:
        raise UserError(f"{folder}: no embeddings; run `tokamake embed-chunks`, or its rule")
    remedy = "embed this shard again"
    return any(read_product(each, "embeddings", remedy=remedy)["num_vectors"] for each in manifests)
