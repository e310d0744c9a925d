"""Hugging Face's folder: config.json and safetensors or `pytorch_model.bin`, whole or in shards.

What model types there are, and how their tensors differ from ours, families say: `HFFormat`.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from tokamake import files
from tokamake.checkpoint import model_tensors as checkpoint_tensors
from tokamake.checkpoint.format_files import hugging_face_files
from tokamake.checkpoint.hf import hf_folder, safetensors_files
from tokamake.checkpoint.tensors import dtypes
from tokamake.checkpoint.tensors.checkpoint import Checkpoint, Target
from tokamake.checkpoint.tensors.chunks import ChunkReader, OpenFiles
from tokamake.checkpoint.tensors.dtypes import Dtype
from tokamake.checkpoint.tensors.extents import Chunk, Extent, PlannedTensor, TensorSource
from tokamake.checkpoint.tensors.replicas import same_bits
from tokamake.checkpoint.torch_files import pickle_reader, torch_archive
from tokamake.checkpoint.torch_files.pickle_reader import Located
from tokamake.config.architecture import Architecture
from tokamake.errors import UserError
from tokamake.models.common.hf_format import HFFormat

TITLE = "Hugging Face"
IN_ROOT = False

_REMEDY = "fetch or export the checkpoint again"
_SAFE, _PICKLED = "model.safetensors", "pytorch_model.bin"
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_OF_TOKENIZER = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*"),
    *("vocab.*", "merges.txt", "*.model"),
)
"""Patterns of what lies beside the weights and belongs to the tokenizer."""


class _Stored(NamedTuple):
    """A tensor of a model type, whichever file it is in."""

    shape: tuple[int, ...]
    blocks: tuple[Chunk, ...]


def find(path: Path) -> Path | None:
    """The folder itself, if it has config.json and weights."""
    return path if hugging_face_files(path) else None


def opened(path: Path) -> Checkpoint:
    """Open a folder; no tensor is read but a stored copy of a tied output layer.

    Raises:
        UserError: a file is missing, damaged or could hold a program, the model is none that we can
            train, or a tensor is missing, unknown or of the wrong shape; the message names it.
    """
    architecture, stored = hf_folder.read_config(path)
    found, wanted = _find_tensors(path, stored), _stored(architecture, stored)
    head = found.pop(_HEAD, None) if architecture.tie_word_embeddings else None
    checkpoint_tensors.check_names(found, wanted, str(path))
    for name, (shape, _) in wanted.items():
        _check(name, found[name], shape)
    regions = [replace(found[name], blocks=each.blocks) for name, each in wanted.items()]
    if head:
        blocks = wanted[stored.name(_EMBEDDING)].blocks
        regions.append(replace(head, blocks=blocks, is_copy=True))
    shapes = checkpoint_tensors.shapes(architecture)
    source = TensorSource(regions, {f"model.{name}": shape for name, shape in shapes.items()})
    if head and not _same(head, found[stored.name(_EMBEDDING)]):
        raise hf_folder.not_tied(stored.name(_EMBEDDING), str(head.file))
    config = files.read_json(path / "config.json", _REMEDY)
    notes = {key: config[key] for key in ("model_type", "eos_token_id") if key in config}
    found_files = {file for each in _OF_TOKENIZER for file in path.glob(each) if file.is_file()}
    tokenizer = (*sorted(found_files),)
    return Checkpoint("hf", path, architecture, source, tokenizer=tokenizer, notes=notes)


def _find_tensors(path: Path, stored: HFFormat) -> dict[str, Extent]:
    """Tensors in the files by their full names, those left out that hold no weights."""
    found = _locate(path, re.compile(stored.ignored))
    return {hf_folder.with_prefix(name, found, stored): found[name] for name in found}


def _locate(path: Path, ignored: re.Pattern[str]) -> dict[str, Extent]:
    for name in (_SAFE, _PICKLED):
        if (path / name).is_file():
            return _read(path / name, ignored)
        index = path / f"{name}.index.json"
        if index.is_file():
            break
    else:
        raise UserError(f"{path}: neither {_SAFE} nor {_PICKLED} nor an index of these; {_REMEDY}")
    file_of = hf_folder.read_index(index)
    read = {file: _read(file, ignored) for file in sorted(set(file_of.values()))}
    kept = {name: file for name, file in file_of.items() if not ignored.fullmatch(name)}
    for name, file in kept.items():
        if name not in read[file]:
            raise UserError(f"{file}: tensor {name} is missing; {_REMEDY}")
    return {name: read[file][name] for name, file in kept.items()}


def _read(file: Path, ignored: re.Pattern[str]) -> dict[str, Extent]:
    if file.suffix == ".safetensors":
        regions = safetensors_files.read(file, _REMEDY)
        return {name: each for name, each in regions.items() if not ignored.fullmatch(name)}
    found = pickle_reader.read(file, _REMEDY)
    if not isinstance(found, Mapping):
        raise UserError(f"{file}: holds no tensors by name; {_REMEDY}")
    kept = {str(name): each for name, each in found.items() if not ignored.fullmatch(str(name))}
    for name, each in kept.items():
        if not isinstance(each, Located):
            raise UserError(f"{file}: {name} is no tensor; {_REMEDY}")
    return {name: torch_archive.region(file, name, each) for name, each in kept.items()}


def _check(name: str, region: Extent, shape: tuple[int, ...]) -> None:
    where = str(region.file)
    checkpoint_tensors.check_shape(name, region.shape, shape, where)
    if region.dtype.short is None:
        raise UserError(
            f"{where}: tensor {name} is {region.dtype}; save all tensors in one of "
            f"{', '.join(dtypes.OF_WEIGHTS)}"
        )


def _same(one: Extent, other: Extent) -> bool:
    """Whether two tensors have the same bits."""
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    places = [(each.file, each.offset, each.stride) for each in (one, other)]
    if places[0] == places[1]:  # tensors that share storage
        return True
    place = (*(slice(0, size) for size in one.shape),)
    with ExitStack() as stack:
        opened_files = OpenFiles(stack)
        first, second = (
            ChunkReader(opened_files, [(lying, block) for block in lying.blocks], lying.dtype)
            for lying in (
                replace(each, blocks=(Chunk(each.name, place),)).as_it_lies()
                for each in (one, other)
            )
        )
        return same_bits(first, second, place, one.dtype.itemsize)


def _stored(architecture: Architecture, stored: HFFormat) -> dict[str, _Stored]:
    """The tensors of a model type by name, and what they are made of."""
    shapes = checkpoint_tensors.shapes(architecture)
    parts: dict[str, list[str]] = defaultdict(list)
    for ours in shapes:
        parts[stored.name(ours)].append(ours)
    found = {}
    for name, names in parts.items():
        number, *columns = shapes[names[0]]
        number, turned = sum(shapes[ours][0] for ours in names), stored.is_transposed(names[0])
        shape = (*columns, number) if turned else (number, *columns)
        blocks = [
            _block(ours, run, start, tuple(columns), number if turned else None)
            for ours in names
            for run, start in stored.rows(architecture, ours, shapes[ours][0])
        ]
        found[name] = _Stored(shape, tuple(blocks))
    return found


def _block(
    ours: str, run: slice, start: int, columns: tuple[int, ...], turned: int | None
) -> Chunk:
    """Some rows of a tensor of ours, in theirs.

    Args:
        ours: its name.
        run: the rows.
        start: row of theirs, column if it is transposed, at which they begin.
        columns: shape of a row.
        turned: number of columns of theirs if it is transposed.
    """
    place = (run, *(slice(0, size) for size in columns))
    if turned is None:
        return Chunk(f"model.{ours}", place, start * math.prod(columns))
    return Chunk(f"model.{ours}", place, start, (1, turned))


def lay_out(folder: Path, checkpoint: Checkpoint, target: Target) -> list[Extent]:
    """Write a folder whose tensors are still zeros.

    Args:
        folder: empty, to write into.
        checkpoint: what is to be written; `eos_token_id` in its notes is the token that ends a text
            (or several).
        target: number format and size of files; parts of a model there are none here.

    Returns:
        Where the tensors are to go.

    Raises:
        UserError: transformers has no such model.
    """
    stored = hf_folder.format_for(checkpoint.architecture)
    planned = {
        name: PlannedTensor(each.shape, _dtype(each.blocks, checkpoint.source, target), each.blocks)
        for name, each in _stored(checkpoint.architecture, stored).items()
    }
    widest = dtypes.widest(each.dtype for each in planned.values())
    eos_token = checkpoint.notes.get("eos_token_id")
    content = hf_folder.config(checkpoint.architecture, widest, eos_token)
    hf_folder.write_config(folder, content)
    shards = [*_shards(planned, target.max_shard_bytes)]
    if len(shards) == 1:
        return safetensors_files.lay_out(folder / _SAFE, planned)
    names = [f"model-{n:05}-of-{len(shards):05}.safetensors" for n in range(1, len(shards) + 1)]
    file_of = {key: file for file, shard in zip(names, shards, strict=True) for key in shard}
    index = {
        "metadata": {"total_size": sum(each.num_bytes for each in planned.values())},
        "weight_map": dict(sorted(file_of.items())),
    }
    files.write_json(folder / f"{_SAFE}.index.json", index)
    return [
        region
        for name, shard in zip(names, shards, strict=True)
        for region in safetensors_files.lay_out(folder / name, shard)
    ]


def _dtype(blocks: Iterable[Chunk], source: TensorSource, target: Target) -> Dtype:
    """Number format of a tensor; of one that is made of several, one that holds them all."""
    if target.dtype:
        return dtypes.OF_WEIGHTS[target.dtype]
    return dtypes.widest(source.dtype(block.key) for block in blocks)


def _shards(planned: Mapping[str, PlannedTensor], most: int) -> Iterator[dict[str, PlannedTensor]]:
    """Tensors of a file each time: as many in turn as fit, at least one."""
    shard: dict[str, PlannedTensor] = {}
    size = 0
    for name, each in planned.items():
        if shard and size + each.num_bytes > most:
            yield shard
            shard, size = {}, 0
        shard[name] = each
        size += each.num_bytes
    yield shard
