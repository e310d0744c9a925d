"""Format `hf`: a Hugging Face folder, config.json with safetensors or `pytorch_model.bin`.

Weights are in one file or in shards with an index. `HFFormat` says which model types there are and
how their tensors differ from tokamake's.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tokamake import files
from tokamake.checkpoint import model_tensors
from tokamake.checkpoint.format_protocol import CheckpointFormat
from tokamake.checkpoint.hf import config_json, interleaved_experts, safetensors_files
from tokamake.checkpoint.hf.config_json import REMEDY
from tokamake.checkpoint.hf.interleaved_experts import StoredTensor
from tokamake.checkpoint.tensors import dtypes
from tokamake.checkpoint.tensors.checkpoint import CHAT_TEMPLATES, Checkpoint, Target
from tokamake.checkpoint.tensors.chunks import is_same
from tokamake.checkpoint.tensors.dtypes import Dtype
from tokamake.checkpoint.tensors.extents import Chunk, Extent, PlannedTensor, whole_slices
from tokamake.checkpoint.tensors.source import TensorSource
from tokamake.checkpoint.torch_files import pickle_reader, torch_archive
from tokamake.checkpoint.torch_files.pickle_reader import PickledTensor
from tokamake.config.architecture import Architecture
from tokamake.errors import UserError
from tokamake.models.common.hf_format import EXPERT_NAMES, HFFormat

TITLE = "Hugging Face"
SUMMARY = "Hugging Face; with the tokenizer of a Hugging Face folder"
PRIORITY = 10
TOKENIZER_CONFIG = "config.json"
NEAR_MISSES = {
    ("config.json",): "has config.json but no weights (*.safetensors or pytorch_model*); "
    "fetch them, too, or name the folder of a checkpoint or of a run"
}

_SAFETENSORS, _PICKLED = "model.safetensors", "pytorch_model.bin"
_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*")
_TOKENIZER_FILES = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*"),
    *("vocab.*", "merges.txt", "*.model", f"{CHAT_TEMPLATES}/*.jinja"),
)
_BUFFERS = r"(.*\.)?(rotary_emb\.\w*inv_freq|attn\.(bias|masked_bias)|embeddings\.\w+_ids)"
"""Names of tensors that old versions of transformers stored, and that follow from the config."""

_MTP_KEY = "num_nextn_predict_layers"
_GATES_AND_UPS = ".gate_up_proj"
"""End of the names of tensors that hold the gates and up projections of all experts of a layer."""
_EXPERTS = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(gate|up|down)_proj\.weight")
_ONE_EXPERT = re.compile(r"\.mlp\.experts\.\d+\.")


def find(path: Path) -> Path | None:
    return path if list_files(path) else None


def list_files(path: Path) -> list[Path]:
    # No other files: the folder may be a whole repository, with images and weights in other forms.
    if not (path / "config.json").is_file():
        return []
    weights = {file for pattern in _WEIGHT_FILES for file in path.glob(pattern)}
    return [path / "config.json", *sorted(weights)] if weights else []


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open a folder. Tensors stay on disk, except a stored copy of a tied output layer."""
    if (folder / "adapter_config.json").is_file():  # transformers would apply it
        raise UserError(f"{folder}: {model_tensors.unsupported_file(folder)}")
    architecture, model_format = config_json.read_config(folder)
    extents = _find_tensors(folder, model_format)
    config = files.read_json(folder / "config.json", REMEDY)
    if model_format.has_mtp_layers:
        stated = config.get(_MTP_KEY)
        architecture, extents = _with_mtp_layers(
            folder, extents, architecture=architecture, model_format=model_format, stated=stated
        )
    has_fused = any(name.endswith(f".mlp.experts{_GATES_AND_UPS}") for name in extents)
    if has_fused and not model_format.interleaves_experts:
        stored = _stored_with_fused_experts(architecture, model_format)
    else:
        stored = _stored_tensors(architecture, model_format)
    # An output layer that is not tied is no copy, but a tensor of the model.
    copies_of = {**model_format.copies, **model_format.mtp_copies(architecture)}
    known = {name: ours for name, ours in copies_of.items() if name not in stored}
    for name, ours in known.items():  # some programs store tied tensors under one of their names
        if name in extents and (original := model_format.name(ours)) not in extents:
            extents[original] = extents.pop(name)
    extra = {
        name: (extents.pop(name), model_format.name(ours))
        for name, ours in known.items()
        if name in extents
    }
    computed = {}
    if model_format.interleaves_experts:
        computed = dict(interleaved_experts.take_quantized(extents, stored))
    stored = {n: each for n, each in stored.items() if each.chunks[0].key not in computed}
    model_tensors.check_names(extents, stored, where=str(folder))
    for name, (shape, _) in stored.items():
        model_tensors.check_weight(name, extents[name], shape=shape)
    for name, ours in model_format.twice.items():
        extra[name] = extents.pop(name), model_format.name(ours)
    located = [
        replace(extent, chunks=stored[name].chunks, is_replica=False)
        for name, extent in extents.items()
    ]
    located += [
        replace(extent, chunks=stored[original].chunks, is_replica=True)
        for extent, original in extra.values()
    ]
    located += [part for each in computed.values() for part in (each.blocks, each.scales)]
    # Checks that no file is too short; so the comparison of the copy comes after it.
    source = TensorSource(located, model_tensors.weight_shapes(architecture), computed=computed)
    copies = source.extents[len(extents) : len(extents) + len(extra)]
    for (name, (extent, original)), copy in zip(extra.items(), copies, strict=True):
        if not _is_same(source, copy, stored=(extent, extents[original])):
            reason = _reason_against(name, architecture, model_format=model_format)
            raise UserError(f"{extent.file}: tensor {name} differs from {original}, {reason}")
    notes = config_json.notes(folder, config, model_format=model_format)
    tokenizer = {file for name in _TOKENIZER_FILES for file in folder.glob(name) if file.is_file()}
    return Checkpoint(
        "hf", folder, architecture, source, tokenizer=(*sorted(tokenizer),), notes=notes
    )


def _reason_against(copy: str, architecture: Architecture, *, model_format: HFFormat) -> str:
    """Why a copy of a tensor may not differ from it, and the remedy."""
    if copy in model_format.mtp_copies(architecture):
        return f"and the model has one for both; set {_MTP_KEY} in config.json to 0"
    if copy in model_format.twice:
        return f"and a {architecture.family} has one for both; choose another model"
    return "but config.json says tie_word_embeddings; set it to false"


def _find_tensors(folder: Path, model_format: HFFormat) -> dict[str, Extent]:
    """Locate tensors that hold weights, by their full names."""
    extents = _locate(folder, re.compile(f"{_BUFFERS}|{model_format.ignored}"))
    prefix = model_format.prefix
    has_prefix = any(name.startswith(prefix) for name in extents)

    def full_name(name: str) -> str:
        # A base model, saved without its output layer, has names without the prefix.
        return name if has_prefix or model_format.is_outside(name) else prefix + name

    return {full_name(name): extent for name, extent in extents.items()}


def _with_mtp_layers(
    folder: Path,
    extents: dict[str, Extent],
    *,
    architecture: Architecture,
    model_format: HFFormat,
    stated: int | None,
) -> tuple[Architecture, dict[str, Extent]]:
    """Count the layers after the last one: the files decide, unless config.json states 0."""
    layer = re.compile(rf"{re.escape(model_format.prefix)}{model_format.layers}\.(\d+)\.")
    number_of = {name: int(match[1]) for name in extents if (match := layer.match(name))}
    first = architecture.num_hidden_layers
    further = {each for each in number_of.values() if each >= first}
    number = len(further)
    if further != {*range(first, first + number)}:
        numbers = f"{min(further)} to {max(further)}, not {first} to {first + number - 1}"
        raise UserError(f"{folder}: MTP layers: {numbers}; fetch the checkpoint again")
    if stated == 0 and number:
        config_json.warn_once(
            f"{folder}: its layers that predict further tokens (MTP), from layer {first} on, are "
            f"left out, because config.json says {_MTP_KEY}: 0"
        )
        kept = {name: each for name, each in extents.items() if number_of.get(name, 0) < first}
        return architecture, kept
    if stated and not number:
        config_json.warn_once(
            f"{folder}: has no layers that predict further tokens (MTP), though config.json says "
            f"{_MTP_KEY}: {stated}; transformers does not save them"
        )
    return architecture.model_copy(update={_MTP_KEY: number}), extents


def _locate(folder: Path, ignored: re.Pattern[str]) -> dict[str, Extent]:
    for name in (_SAFETENSORS, _PICKLED):
        if (folder / name).is_file():
            return _read_file(folder / name, ignored)
        index = folder / f"{name}.index.json"
        if index.is_file():
            return _read_shards(index, ignored)
    raise UserError(
        f"{folder}: neither {_SAFETENSORS} nor {_PICKLED} nor an index of these; {REMEDY}"
    )


def _read_shards(index: Path, ignored: re.Pattern[str]) -> dict[str, Extent]:
    content = files.read_json(index, REMEDY)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index}: no weight_map; {REMEDY}")
    for shard in weight_map.values():
        # A path could lead to any file of the user's.
        if not isinstance(shard, str) or Path(shard).name != shard or shard == "..":
            raise UserError(f"{index}: weight_map: {shard!r} is not a file of the folder; {REMEDY}")
    file_of = {name: index.parent / shard for name, shard in weight_map.items()}
    shards = {file: _read_file(file, ignored) for file in sorted(set(file_of.values()))}
    extents = {}
    for name, file in file_of.items():
        if ignored.fullmatch(name):
            continue
        if name not in shards[file]:
            raise UserError(f"{file}: tensor {name} is missing; {REMEDY}")
        extents[name] = shards[file][name]
    return extents


def _read_file(file: Path, ignored: re.Pattern[str]) -> dict[str, Extent]:
    if file.suffix == ".safetensors":
        extents = safetensors_files.read(file, REMEDY)
        return {name: extent for name, extent in extents.items() if not ignored.fullmatch(name)}
    state = pickle_reader.read(file, REMEDY)
    if not isinstance(state, Mapping):
        raise UserError(f"{file}: holds no tensors by name; {REMEDY}")
    tensors = {str(key): value for key, value in state.items() if not ignored.fullmatch(str(key))}
    for name, value in tensors.items():
        if not isinstance(value, PickledTensor):
            raise UserError(f"{file}: {name} is not a tensor; {REMEDY}")
    return {name: torch_archive.extent(file, name, value) for name, value in tensors.items()}


def _is_same(source: TensorSource, copy: Extent, *, stored: tuple[Extent, Extent]) -> bool:
    """Whether an extent is a copy of a tensor; `stored`: both of them as their files have them."""
    if len({(extent.shape, extent.dtype) for extent in stored}) > 1:
        return False
    # torch.save stores tensors that share memory once.
    is_shared = len({(extent.file, extent.offset, extent.stride) for extent in stored}) == 1
    return is_shared or all(is_same(source, (copy, chunk)) for chunk in copy.chunks)


def _stored_tensors(architecture: Architecture, model_format: HFFormat) -> dict[str, StoredTensor]:
    """Return the tensors of a model type by name, each with the chunks that it holds."""
    shapes = model_tensors.shapes(architecture)
    members: dict[str, list[str]] = defaultdict(list)
    index_of: dict[str, int | None] = {}
    for name, whole in shapes.items():
        for stored_name, index in model_format.stored_names(name, whole):
            members[stored_name].append(name)
            index_of[stored_name] = index
    stored = {}
    for stored_name, names in members.items():
        index = index_of[stored_name]
        parts = {name: shapes[name] if index is None else shapes[name][1:] for name in names}
        columns = parts[names[0]][1:]
        num_rows = sum(rows for rows, *_ in parts.values())
        is_transposed = model_format.is_transposed(names[0])
        chunks = [
            _chunk(name, rows, start, columns, num_columns=num_rows if is_transposed else None)
            for name, (number, *_) in parts.items()
            for rows, start in model_format.rows(architecture, name, number)
        ]
        if index is not None:
            chunks = [chunk.in_stack(index) for chunk in chunks]
        shape = (*columns, num_rows) if is_transposed else (num_rows, *columns)
        if names[0] in model_format.as_rows:
            shape = (1, *shape)
        stored[stored_name] = StoredTensor(shape, tuple(chunks))
    if model_format.interleaves_experts:
        stored = interleaved_experts.interleaved(stored, shapes)
    for name, ours in model_format.twice.items():
        stored[name] = stored[model_format.name(ours)]
    return stored


def _stored_with_fused_experts(
    architecture: Architecture, model_format: HFFormat
) -> dict[str, StoredTensor]:
    """Tensors by the names in the memory of transformers 5, which it can also save.

    A layer has one tensor with the gates and up projections of all experts, one with the down
    projections.
    """
    stored = _stored_tensors(architecture, replace(model_format, names=EXPERT_NAMES))
    fused: dict[str, list[Chunk]] = defaultdict(list)
    shapes = {}
    for name, whole in model_tensors.shapes(architecture).items():
        if not (match := _EXPERTS.fullmatch(name)):
            continue
        experts, kind = match.groups()
        number, rows, columns = whole
        target = f"{experts}.down_proj" if kind == "down" else experts + _GATES_AND_UPS
        halves = 1 if kind == "down" else 2
        shapes[target] = (number, halves * rows, columns)
        half = int(kind == "up")
        slices = whole_slices((rows, columns))
        fused[target] += [
            Chunk(f"model.{name}", slices, (halves * each + half) * rows * columns).in_stack(each)
            for each in range(number)
        ]
    stored = {name: each for name, each in stored.items() if not _ONE_EXPERT.search(name)}
    return stored | {name: StoredTensor(shapes[name], (*fused[name],)) for name in fused}


def _chunk(
    name: str, rows: slice, start: int, columns: tuple[int, ...], *, num_columns: int | None
) -> Chunk:
    """Place rows of a tensor at row `start` of a stored one, or at a column if it is transposed."""
    slices = (rows, *whole_slices(columns))
    if num_columns is None:
        return Chunk(f"model.{name}", slices, start * math.prod(columns))
    return Chunk(f"model.{name}", slices, start, (1, num_columns))


def archives(files: Iterable[Path]) -> dict[Path, list[tuple[int, int]]]:
    """Return the archives in pickled files; safetensors have no checksums."""
    return torch_archive.archives(file for file in files if file.suffix != ".safetensors")


def warnings(checkpoint: Checkpoint) -> list[str]:
    """Return warnings about rates of dropout that config.json has no key for.

    `lay_out` refuses models that transformers lacks.
    """
    model_format = config_json.format_for(checkpoint.architecture)
    rates: Mapping[str, float] = checkpoint.notes.get("dropout", {})
    warnings = []
    for name in sorted(rates.keys() - model_format.dropout.values()):
        used = rates.get("hidden", 0.0) if name in model_format.dropout_as_hidden else 0.0
        if rates[name] != used:
            warnings.append(
                f"transformers' {model_format.model_type} has no key for {name} dropout, here "
                f"{rates[name]:g}: a training there uses {used:g}"
            )
    return warnings


def lay_out(folder: Path, checkpoint: Checkpoint, *, target: Target) -> list[Extent]:
    """Write config.json and files of safetensors with holes in place of the tensors."""
    architecture = checkpoint.architecture
    model_format = config_json.format_for(architecture)
    stored = _stored_tensors(architecture, model_format)
    for name, ours in model_format.mtp_copies(architecture).items():
        stored[name] = stored[model_format.name(ours)]
    source = checkpoint.source
    planned = {
        name: PlannedTensor(each.shape, _dtype(each.chunks, source, target), each.chunks)
        for name, each in stored.items()
    }
    weights = (name for name in planned if not name.endswith(model_tensors.WITHOUT_GRADIENT))
    widest = dtypes.widest(planned[name].dtype for name in weights)
    notes = checkpoint.notes
    config_json.write_config(
        folder,
        architecture,
        dtype=widest,
        eos_token=notes.get("eos_token_id"),
        bos_token=notes.get("bos_token_id"),
        notes=notes,
    )
    shards = [*_shards(planned, target.max_shard_bytes)]
    if len(shards) == 1:
        return safetensors_files.lay_out(folder / _SAFETENSORS, planned)
    names = [f"model-{n:05}-of-{len(shards):05}.safetensors" for n in range(1, len(shards) + 1)]
    file_of = {key: file for file, shard in zip(names, shards, strict=True) for key in shard}
    index = {
        "metadata": {"total_size": sum(tensor.num_bytes for tensor in planned.values())},
        "weight_map": dict(sorted(file_of.items())),
    }
    files.write_json(folder / f"{_SAFETENSORS}.index.json", index)
    return [
        extent
        for name, shard in zip(names, shards, strict=True)
        for extent in safetensors_files.lay_out(folder / name, shard)
    ]


def _dtype(chunks: Sequence[Chunk], source: TensorSource, target: Target) -> Dtype:
    if target.dtype and not chunks[0].key.endswith(model_tensors.WITHOUT_GRADIENT):
        return dtypes.OF_WEIGHTS[target.dtype]
    return dtypes.widest(source.dtype(chunk.key) for chunk in chunks)


def _shards(
    planned: Mapping[str, PlannedTensor], max_bytes: int
) -> Iterator[dict[str, PlannedTensor]]:
    """Split tensors, in their order, over files of at most `max_bytes`, at least one per file."""
    shard: dict[str, PlannedTensor] = {}
    num_bytes = 0
    for name, tensor in planned.items():
        if shard and num_bytes + tensor.num_bytes > max_bytes:
            yield shard
            shard, num_bytes = {}, 0
        shard[name] = tensor
        num_bytes += tensor.num_bytes
    yield shard


if TYPE_CHECKING:
    from tokamake.checkpoint.hf import format as this_module

    _: CheckpointFormat = this_module
