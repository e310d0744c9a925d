"""Embeddings: a folder of shards, which are read in the order of their names.

A shard is `NAME.npy` (fp16 vectors, (n, d)), `NAME.ids.npy` (int64 ids of passages, blocks or
queries, (n,)) and the manifest `NAME.json`. Shards are memory-mapped.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokamake.errors import UserError
from tokamake.retrieval.products import data_path, is_complete, new_product, read_product

Vectors = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

_KIND = "embeddings"
_REMEDY = "embed this shard again"
_VECTORS, _IDS = ".npy", ".ids.npy"


class EmbeddingShard(NamedTuple):
    """A shard that is open for reading."""

    manifest: Path
    facts: dict[str, Any]
    ids: Ids
    vectors: npt.NDArray[np.float16]


class EmbeddingWriter:
    """Appends vectors to a shard."""

    def __init__(self, file: IO[bytes], *, dimension: int, name: str) -> None:
        self._file, self._dimension, self._name = file, dimension, name
        self._ids: list[Ids] = []
        self._write_header(0)
        self._header_bytes = file.tell()

    def append(self, ids: npt.ArrayLike, vectors: npt.NDArray[np.floating[Any]]) -> None:
        """Append vectors (n, d), which are rounded to fp16, and their ids (n,).

        Raises:
            UserError: shapes do not fit, or a value is not finite in fp16.
        """
        numbers = np.asarray(ids, np.int64)
        if vectors.shape != (*numbers.shape, self._dimension) or numbers.ndim != 1:
            raise UserError(
                f"{self._name}: vectors of shape {vectors.shape} for ids of shape {numbers.shape}; "
                f"give (n, {self._dimension}) for (n,)"
            )
        with np.errstate(over="ignore"):
            rounded = vectors.astype("<f2")
        if not (finite := np.isfinite(rounded).all(axis=1)).all():
            first = numbers[~finite][0]
            raise UserError(
                f"{self._name}: the vector of id {first} is not finite in fp16 (at most 65,504); "
                "normalize the vectors"
            )
        self._ids.append(numbers)
        self._file.write(rounded.tobytes())

    def finish(self) -> Ids:
        """Write the final length into the header; return all ids."""
        ids = np.concatenate([np.empty(0, np.int64), *self._ids])
        check_unique(ids, self._name)
        self._file.seek(0)
        self._write_header(len(ids))
        # numpy reserves space for the digits of the length.
        assert self._file.tell() == self._header_bytes
        return ids

    def _write_header(self, length: int) -> None:
        shape = (length, self._dimension)
        header = {"descr": "<f2", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self._file, header)


@contextmanager
def new_shard(
    manifest: Path, *, dimension: int, made_from: dict[str, Any], request: str | None = None
) -> Iterator[EmbeddingWriter]:
    """Yield a writer of a shard; the shard appears whole at the end.

    Args:
        manifest: `FOLDER/NAME.json`.
        dimension: length of a vector.
        made_from: what made the vectors, for the manifest. `model` is the digest of the weights:
            searches refuse queries of another model.
        request: digest of everything that decides the shard, for `is_embedded`.
    """
    facts: dict[str, Any] = {"dimension": dimension, "made_from": made_from}
    if request is not None:
        facts["request"] = request
    with new_product(manifest, kind=_KIND, suffixes=(_IDS, _VECTORS), facts=facts) as product:
        with product.paths[_VECTORS].open("wb") as file:
            writer = EmbeddingWriter(file, dimension=dimension, name=str(manifest))
            yield writer
            ids = writer.finish()
        with product.paths[_IDS].open("wb") as file:
            np.save(file, ids)
        product.facts["num_vectors"] = len(ids)


def is_embedded(manifest: Path, *, request: str) -> bool:
    """Whether a shard exists whole, and was made from the inputs with the digest `request`."""
    return is_complete(manifest, _KIND, request=request)


@dataclass(frozen=True)
class Embeddings:
    """All shards of a folder."""

    folder: Path
    shards: list[EmbeddingShard]
    dimension: int

    @property
    def num_vectors(self) -> int:
        return sum(len(shard.ids) for shard in self.shards)

    @property
    def facts(self) -> dict[str, Any]:
        """Hashes of ids and vectors of each shard, and facts that made all shards."""
        shards = [[facts["hashes"][suffix] for suffix in (_IDS, _VECTORS)] for facts in self._facts]
        first = self._facts[0]["made_from"]
        shared = {
            key: value
            for key, value in first.items()
            if all(facts["made_from"].get(key) == value for facts in self._facts)
        }
        return {"shards": shards, "made_from": shared}

    @property
    def _facts(self) -> list[dict[str, Any]]:
        return [shard.facts for shard in self.shards]

    @cached_property
    def ids(self) -> Ids:
        """Ids of all vectors (n,); raises UserError if two shards have the same one."""
        ids = np.concatenate([shard.ids for shard in self.shards])
        check_unique(ids, str(self.folder))
        return ids

    def blocks(self, rows: int) -> Iterator[Vectors]:
        """Yield all vectors in order as fp32, `rows` at a time, whatever shards they lie in.

        The same blocks for the same vectors: how they are sharded changes no rounding.
        """
        for start in range(0, self.num_vectors, rows):
            yield self.take(np.arange(start, min(start + rows, self.num_vectors)))

    def take(self, positions: npt.NDArray[np.int64]) -> Vectors:
        """Vectors at sorted positions (k,) among all vectors: (k, d), fp32."""
        taken = np.empty((len(positions), self.dimension), np.float32)
        start = 0
        for shard in self.shards:
            first, last = np.searchsorted(positions, [start, start + len(shard.ids)])
            if last > first:
                taken[first:last] = shard.vectors[positions[first:last] - start]
            start += len(shard.ids)
        return taken


def open_embeddings(
    folder: Path, *, shards: Collection[str] = (), verify: bool = False
) -> Embeddings:
    """Open a folder of shards, and compare them with their manifests.

    Args:
        folder: the folder.
        shards: names of the shards to open; empty: all.
        verify: whether to hash all files; sizes are always compared.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: not a folder; give a folder of embeddings")
    names = sorted(shards) or _complete_shards(folder)
    opened = [_open_shard(folder / f"{name}.json", verify=verify) for name in names]
    if not any(len(shard.ids) for shard in opened):
        raise UserError(f"{folder}: no embeddings; embed passages, blocks or queries there")
    dimension = opened[0].facts["dimension"]
    for shard in opened:
        if shard.facts["dimension"] != dimension:
            raise UserError(
                f"{shard.manifest}: dimension {shard.facts['dimension']}, but "
                f"{opened[0].manifest.name} has {dimension}; embed all shards with one model"
            )
    for name in ("model", "tokenizer"):
        _check_same(opened, name)
    return Embeddings(folder, opened, dimension)


def _complete_shards(folder: Path) -> list[str]:
    """Names of all shards of a folder, in order."""
    names = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    manifests = sorted(name for name in names if name.endswith(".json"))
    shards = [name.removesuffix(".json") for name in manifests]
    known = {f"{name}{end}" for name in shards for end in (_IDS, _VECTORS)}
    if unfinished := sorted(name for name in names - known if name.endswith(".npy")):
        raise UserError(f"{folder / unfinished[0]}: has no manifest; {_REMEDY}")
    return shards


def _check_same(shards: list[EmbeddingShard], name: str) -> None:
    """Refuse shards of several models or tokenizers; `name` is the one to compare."""
    values = [shard.facts["made_from"].get(name) for shard in shards]
    for shard, value in zip(shards, values, strict=True):
        if value != values[0]:
            raise UserError(
                f"{shard.manifest}: made with another {name} than {shards[0].manifest.name}; embed "
                "all shards with one model and its tokenizer"
            )


def _open_shard(manifest: Path, *, verify: bool) -> EmbeddingShard:
    facts = read_product(manifest, _KIND, remedy=_REMEDY, verify=verify)
    number, dimension = facts["num_vectors"], facts["dimension"]
    ids = map_array(data_path(manifest, _IDS), dtype="int64", shape=(number,))
    vectors = map_array(data_path(manifest, _VECTORS), dtype="float16", shape=(number, dimension))
    check_unique(ids, str(manifest))
    return EmbeddingShard(manifest, facts, ids, vectors)


def map_array(path: Path, *, dtype: str, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Memory-map a .npy file whose dtype and shape the manifest beside it states."""
    try:
        array: npt.NDArray[Any] = np.load(path, mmap_mode="r" if 0 not in shape else None)
    except ValueError as error:
        raise UserError(f"{path}: not a .npy file ({error}); write it again") from None
    if array.dtype != dtype or array.shape != shape:
        raise UserError(
            f"{path}: {array.dtype} of shape {array.shape}, its manifest says {dtype} of shape "
            f"{shape}; write it again"
        )
    return array


def check_unique(ids: Ids, name: str) -> None:
    """Refuse ids that occur twice."""
    ordered = np.sort(ids)
    if (repeated := ordered[1:][ordered[1:] == ordered[:-1]]).size:
        raise UserError(f"{name}: the id {repeated[0]} occurs twice; embed each passage once")
