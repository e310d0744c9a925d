"""DeepSpeed's universal checkpoint: whole fp32 weights and optimizer states, for any ranks.

global_step<N>_universal/zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt, named by the file
`latest_universal` beside; mp_rank_00_model_states.pt in it has Megatron's arguments and counters.
Parameters are Megatron's of one tensor-parallel rank, without padding.
"""

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokamake import files
from tokamake.checkpoint.deepspeed import folder as deepspeed_folder
from tokamake.checkpoint.deepspeed.folder import REMEDY, VERSION
from tokamake.checkpoint.deepspeed.mds_pipeline import format as mds_pipeline_format
from tokamake.checkpoint.deepspeed.zero_reader import States, parameter, settings_of
from tokamake.checkpoint.format_protocol import CheckpointFormat
from tokamake.checkpoint.latest import pointed_files
from tokamake.checkpoint.megatron_model import module as megatron_module
from tokamake.checkpoint.megatron_model.arguments import (
    architecture_of,
    is_padding_unknown,
    notes_of,
    number,
    progress_of,
    version_of,
)
from tokamake.checkpoint.megatron_model.rank_tensors import Rank, TensorSlice
from tokamake.checkpoint.tensors.checkpoint import OPTIMIZER_SETTINGS, Checkpoint, Target
from tokamake.checkpoint.tensors.dtypes import FLOAT32
from tokamake.checkpoint.tensors.extents import Chunk, Extent, PlannedTensor, TensorSource
from tokamake.checkpoint.torch_files import pickle_reader, torch_archive
from tokamake.checkpoint.torch_files.pickle_reader import Located
from tokamake.config.architecture import Architecture
from tokamake.errors import UserError
from tokamake.parallel.axis import Axis

TITLE = "DeepSpeed universal"
PRIORITY = 60
SIZES: tuple[str, ...] = ("pipeline_parallel_size",)
IN_ROOT = False
_POINTER = "latest_universal"
_ZERO, _WEIGHTS, _STEP = "zero", "fp32", "step"
_GROUPS = 16
"""Parameter groups of which the file says nothing, so that DeepSpeed keeps its settings."""
_OURS, _NOTES = "tokamake", ("optimizer", "loss_scale", OPTIMIZER_SETTINGS)
"""Where a rank's file has what DeepSpeed does not keep, and which notes these are."""
_MOMENTS = "optimizer.exp_avg."
_SPLIT_BY_COLUMNS = ("self_attention.dense.weight", "mlp.dense_4h_to_h.weight")
_OF_VOCABULARY = ("word_embeddings.weight", "output_layer.weight", "lm_head.weight")


def find(path: Path) -> Path | None:
    """Folder of the checkpoint, if it is one."""
    folders = [path]
    if (pointer := path / _POINTER).is_file():
        folders.append(path / pointer.read_text(encoding="utf-8", errors="replace").strip())
    return next((folder for folder in folders if (folder / _ZERO).is_dir()), None)


def list_files(path: Path) -> list[Path]:
    return pointed_files(path, _POINTER)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open a checkpoint that `find` has found.

    Raises:
        UserError: a file is missing or damaged, or the model is none that we have.
    """
    file = deepspeed_folder.states(folder, 0)
    state = deepspeed_folder.read(file)
    folders = sorted(each for each in (folder / _ZERO).iterdir() if each.is_dir())
    _check_files(folders)
    names = {megatron_module.newer(each.name): each for each in folders}
    args = deepspeed_folder.args_of(state)
    hidden = number(getattr(args, "hidden_size", None) or 1, f"{file}: args.hidden_size")
    rows = _rows(folder, names, hidden)
    architecture = architecture_of(args, file, padded_vocab_size=rows)
    rank, states = Rank(architecture, Axis(0, 1), rows), States()
    is_flat = any(name.startswith("language_model.") for name in names)
    known = _parts(rank, numbers=None if is_flat else _numbers(names))
    if missing := sorted({*known} - {*names}):
        states.regions += _frozen(folder, architecture, {name: known[name] for name in missing})
    for name, each in names.items():
        if (part := known.get(name)) is None:
            raise UserError(f"{each}: is not part of the model; {REMEDY}")
        _add(states, each, part)
    _add_steps(states, folder / _ZERO)
    return Checkpoint(
        "universal",
        folder,
        architecture,
        states.source((), megatron_module.shapes_of(architecture)),
        progress=progress_of(state, file),
        padded_vocab_size=rows,
        notes=notes_of(args) | _settings(folder / _ZERO) | _notes(state),
        is_padding_unknown=is_padding_unknown(args, file, padded_vocab_size=rows),
    )


def _rows(folder: Path, names: Mapping[str, Path], hidden_size: int) -> int:
    """Rows of the embedding or output layer, which ranks' files have where none was trained.

    Raises:
        UserError: nothing tells them.
    """
    for name, each in names.items():
        if name.endswith(_OF_VOCABULARY):
            return _param(each / f"{_WEIGHTS}.pt").numel // hidden_size
    state = deepspeed_folder.read(file := deepspeed_folder.states(folder, 0))
    if deepspeed_folder.is_sliced(file) or not isinstance(state.get("module"), dict):
        raise UserError(f"{folder / _ZERO}: has no word_embeddings.weight; {REMEDY}")
    return megatron_module.vocabulary_rows(file, state["module"]) * deepspeed_folder.ranks(folder)


def _frozen(
    folder: Path, architecture: Architecture, parts: Mapping[str, TensorSlice]
) -> list[Extent]:
    """Where parameters lie that were not trained: DeepSpeed leaves these in ranks' files.

    Args:
        folder: of the checkpoint.
        architecture: shape of the model.
        parts: what zero/ has not, by name.

    Raises:
        UserError: they were trained, or are in no file.
    """
    size, keys = (
        deepspeed_folder.ranks(folder),
        {b.key for each in parts.values() for b in each.blocks},
    )
    missing, regions = next(iter(parts)), list[Extent]()
    for place in range(size):
        state = deepspeed_folder.read(file := deepspeed_folder.states(folder, place))
        groups, module = state.get("param_shapes"), state.get("module")
        trained = {megatron_module.newer(name) for group in groups or () for name in group}
        if not groups or not trained.isdisjoint(parts):
            lost = next((name for name in parts if name in trained), missing)
            raise UserError(f"{folder / _ZERO}: has no parameter {lost}; {REMEDY}")
        if deepspeed_folder.is_sliced(file) or not isinstance(module, dict):
            raise UserError(
                f"{folder / _ZERO}: has no parameter {missing}, which was frozen: of ZeRO 3 and of "
                "pipelines, DeepSpeed's universal checkpoints have no such weights; convert the "
                "checkpoint that it was made of"
            )
        rows = megatron_module.vocabulary_rows(file, module) * size
        rank = Rank(architecture, Axis(place, size), rows, version_of(state, file, missing=3.0))
        tree = megatron_module.nested(rank, range(architecture.num_hidden_layers))
        for region in megatron_module.found(file, module, tree):
            if all(block.key in keys for block in region.blocks):
                regions.append(region)
    return regions


def _settings(zero: Path) -> dict[str, Any]:
    """Settings of the optimizer, where DeepSpeed has made the checkpoint."""
    file = zero / "optimizer_state.pt"
    groups = deepspeed_folder.read(file).get("param_groups") if file.is_file() else None
    return settings_of(groups)


def _check_files(folders: Iterable[Path]) -> None:
    """See that all parameters have the same files.

    Raises:
        UserError: one is missing.
    """
    found = {folder: {file.name for file in folder.glob("*.pt")} for folder in folders}
    every = {name for names in found.values() for name in names}
    for folder, names in found.items():
        if missing := sorted(every - names):
            raise UserError(f"{folder / missing[0]}: no such file; {REMEDY}")


def _notes(state: dict[str, Any]) -> dict[str, Any]:
    """What tokamake has put in, where it has written the checkpoint."""
    kept = state.get(_OURS)
    return {key: kept[key] for key in _NOTES if key in kept} if isinstance(kept, dict) else {}


def _numbers(names: Iterable[str]) -> list[int]:
    """Numbers of a pipeline's layers; a tied embedding, which has none, comes first."""
    found = {name.partition(".")[0] for name in names}
    tied = [0] if "tied_modules" in found else []
    return [*tied, *sorted(int(number) for number in found if number.isdecimal())]


def _parts(rank: Rank, numbers: Iterable[int] | None) -> dict[str, TensorSlice]:
    """What a model is made of, by DeepSpeed's names.

    Args:
        rank: the only one.
        numbers: of a pipeline's layers; None: there is no pipeline.
    """
    layers = range(rank.architecture.num_hidden_layers)
    if numbers is None:
        return dict(megatron_module.named(megatron_module.nested(rank, layers)))
    return mds_pipeline_format.by_deepspeed(rank, numbers)


def _param(file: Path) -> Located:
    found = pickle_reader.read(file, REMEDY)
    # Stage 3 is converted to tensors without shapes.
    found = found.get("param") if isinstance(found, dict) else found
    if not isinstance(found, Located):
        raise UserError(f"{file}: holds no tensor param; {REMEDY}")
    return found


def _add(states: States, folder: Path, part: TensorSlice) -> None:
    """Add what a parameter's folder has."""
    for file in sorted(folder.glob("*.pt")):
        kind = file.stem
        prefix = "model." if kind == _WEIGHTS else f"optimizer.{kind}."
        blocks = [
            block._replace(key=prefix + parameter(block.key))
            for block in part.blocks
            if not block.is_mean
        ]
        if kind != _STEP:
            tensor = _param(file)
            if tensor.shape not in (part.shape, (math.prod(part.shape),)):
                raise UserError(
                    f"{file}: has shape {list(tensor.shape)}, the architecture calls for "
                    f"{list(part.shape)}; mend the architecture, or take another checkpoint"
                )
            states.regions.append(torch_archive.region(file, folder.name, tensor, (*blocks,)))
            continue
        _add_step(states, file, pickle_reader.read(file, REMEDY), {block.key for block in blocks})


def _add_step(states: States, file: Path, step: Any, keys: set[str]) -> None:
    """Add how many steps the optimizer has done."""
    if isinstance(step, Located):
        blocks = (*(Chunk(key, ()) for key in sorted(keys)),)
        states.regions.append(torch_archive.region(file, _STEP, step, blocks))
        states.numbers |= keys
    elif isinstance(step, int | float):
        states.given |= dict.fromkeys(keys, float(step))


def _add_steps(states: States, zero: Path) -> None:
    """Add the steps of what was stage 3, which are in one file."""
    known = {block.key for region in states.regions for block in region.blocks}
    keys = {f"optimizer.{_STEP}.{parameter(key)}" for key in known if key.startswith(_MOMENTS)}
    file, left = zero / "optimizer_state.pt", keys - states.numbers - states.given.keys()
    if left and file.is_file():
        state = deepspeed_folder.read(file).get("optimizer_state_dict", {})
        inner = state.get("optimizer_state_dict", state)
        _add_step(states, file, inner.get("state", {}).get(0, {}).get(_STEP), left)


def lay_out(folder: Path, checkpoint: Checkpoint, target: Target) -> list[Extent]:
    """Write the files without their tensors; with names of a pipeline if it is to have one.

    Args:
        folder: to write, empty.
        checkpoint: whose description the files get.
        target: how many stages; tensors are fp32.

    Returns:
        Where the tensors are to go.

    Raises:
        UserError: another number format is asked for.
    """
    if target.dtype not in (None, "fp32"):
        raise UserError(f"--dtype {target.dtype}: this format holds fp32 weights; leave it out")
    architecture, source = checkpoint.architecture, checkpoint.source
    assert architecture.vocab_size is not None
    name = f"global_step{checkpoint.progress.iteration}_universal"
    zero = folder / name / _ZERO
    zero.mkdir(parents=True)
    files.write_text(folder / _POINTER, name)
    rank = Rank(architecture, Axis(0, 1), architecture.vocab_size)
    parts = _parts(rank, count(1) if target.layout.pipeline_parallel_size > 1 else None)
    regions: list[Extent] = []
    for each, part in parts.items():
        (zero / each).mkdir()
        for kind, content in _contents(each, part, source):
            regions += torch_archive.lay_out(zero / each / f"{kind}.pt", content)
    groups = {"param_groups": [{}] * _GROUPS, "ds_version": VERSION}
    torch_archive.lay_out(zero / "optimizer_state.pt", groups)
    rest = deepspeed_folder.client_state(checkpoint, target.layout, architecture.vocab_size)
    ours = {key: checkpoint.notes[key] for key in _NOTES if key in checkpoint.notes}
    torch_archive.lay_out(
        deepspeed_folder.states(folder / name, 0),
        {"module": None, "ds_version": VERSION, _OURS: ours, **rest, "mp_world_size": 1},
    )
    return regions


def _contents(name: str, part: TensorSlice, source: TensorSource) -> Iterator[tuple[str, Any]]:
    """What a parameter's files hold, by kind."""
    about: dict[str, Any] = {"cat_dim": int(name.endswith(_SPLIT_BY_COLUMNS))}
    if name.endswith(_OF_VOCABULARY):
        about["vocab_tensor"] = True
    if "dense_h_to_4h" in name and len(part.blocks) > 1:
        about["param_n_sub_params"] = len(part.blocks)
    ours = [parameter(block.key) for block in part.blocks]
    weights = "master." if f"master.{ours[0]}" in source else "model."
    yield _WEIGHTS, {"param": _planned(part, weights), **about}
    for kind in _kinds(source):
        keys = [f"optimizer.{kind}.{each}" for each in ours]
        if not all(key in source for key in keys):
            raise UserError(
                f"--format universal: DeepSpeed has the same states of all parameters, there is "
                f"no {kind} of {ours[0]}; choose another format, or convert to hf first"
            )
        if source.shapes[keys[0]]:
            yield kind, {"param": _planned(part, f"optimizer.{kind}."), **about}
        else:
            yield kind, PlannedTensor((), FLOAT32, (Chunk(keys[0], ()),))


@functools.cache
def _kinds(source: TensorSource) -> tuple[str, ...]:
    """States of the optimizer that made a checkpoint."""
    found = (key.split(".")[1] for key in source if key.startswith("optimizer."))
    return (*dict.fromkeys(found),)


def _planned(part: TensorSlice, prefix: str) -> PlannedTensor:
    blocks = (block._replace(key=prefix + parameter(block.key)) for block in part.blocks)
    return PlannedTensor(part.shape, FLOAT32, (*blocks,))


if TYPE_CHECKING:
    from tokamake.checkpoint.deepspeed.universal import format as this_module

    _: CheckpointFormat = this_module
