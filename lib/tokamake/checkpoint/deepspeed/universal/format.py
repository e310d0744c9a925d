"""DeepSpeed's universal checkpoint: whole fp32 weights and optimizer states, for any ranks.

global_step<N>_universal/zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt hold a parameter, and
mp_rank_00_model_states.pt holds Megatron's arguments and counters. The file `latest_universal` in
the root folder names global_step<N>_universal. Parameters are Megatron's on one
tensor-parallel rank, without padding.
"""

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokamake import files
from tokamake.checkpoint import model_tensors
from tokamake.checkpoint.deepspeed import folder as deepspeed_folder
from tokamake.checkpoint.deepspeed.folder import VERSION
from tokamake.checkpoint.deepspeed.folder import warnings as warnings
from tokamake.checkpoint.format_protocol import CheckpointFormat
from tokamake.checkpoint.latest import candidates
from tokamake.checkpoint.megatron_model import module_tree, rank_file
from tokamake.checkpoint.megatron_model.args_reader import Description
from tokamake.checkpoint.megatron_model.optimizer_states import (
    MASTER,
    MODEL,
    OptimizerStates,
    parameter_name,
    settings_note,
    state_chunks,
)
from tokamake.checkpoint.megatron_model.rank_file import REMEDY
from tokamake.checkpoint.megatron_model.tensor_parallel_slices import (
    TensorParallelRank,
    TensorSlice,
)
from tokamake.checkpoint.tensors.checkpoint import OPTIMIZER_SETTINGS, Checkpoint, Target
from tokamake.checkpoint.tensors.dtypes import FLOAT32
from tokamake.checkpoint.tensors.extents import Chunk, Extent, PlannedTensor
from tokamake.checkpoint.tensors.source import TensorSource
from tokamake.checkpoint.torch_files import pickle_reader, torch_archive
from tokamake.checkpoint.torch_files.pickle_reader import PickledTensor
from tokamake.checkpoint.torch_files.torch_archive import archives as archives
from tokamake.config.architecture import Architecture
from tokamake.errors import UserError
from tokamake.parallel.axis import Axis

TITLE = "DeepSpeed universal"
SUMMARY = "DeepSpeed's, for any ZeRO stage and ranks; with all optimizer states"
PRIORITY = 60
SIZES = {"pipeline_parallel_size": None}
DTYPE = "fp32"
STEP_FOLDER = r"global_step(\d+)_universal"
POINTER = "latest_universal"
_ZERO, _WEIGHTS, _STEP = "zero", "fp32", "step"
_NUM_GROUPS = 16
"""Number of empty parameter groups to write. DeepSpeed pairs them with the groups of its optimizer,
which then keep their settings."""
_TOKAMAKE, _NOTES = "tokamake", ("optimizer", "loss_scale", OPTIMIZER_SETTINGS)
"""Key in model_states.pt for the notes that DeepSpeed has no place for, and their names."""
_MOMENTS = "optimizer.exp_avg."


def find(path: Path) -> Path | None:
    """Return the folder of the checkpoint, or None if it has another format."""
    folders = candidates(path, POINTER)
    return next((folder for folder in folders if (folder / _ZERO).is_dir()), None)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Open a checkpoint in a folder that `find` returned."""
    file = deepspeed_folder.model_states_path(folder, 0)
    state = rank_file.read(file)
    folders = sorted(entry for entry in (folder / _ZERO).iterdir() if entry.is_dir())
    _check_same_files(folders)
    folder_of = {module_tree.current_name(entry.name): entry for entry in folders}
    args = deepspeed_folder.megatron_args(state, file)
    hidden_size = rank_file.whole_number(
        getattr(args, "hidden_size", None) or 1, f"{file}: args.hidden_size"
    )
    rows = _vocabulary_rows(folder, folder_of, hidden_size=hidden_size)
    description = Description(file, state, args, rows, names=frozenset(folder_of))
    architecture = description.architecture
    states = _states(folder, folder_of, rank=TensorParallelRank(architecture, Axis(0, 1), rows))
    return description.checkpoint(
        "universal",
        folder,
        states.source((), model_tensors.weight_shapes(architecture)),
        notes=_settings_note(folder / _ZERO) | _tokamake_notes(state),
    )


def _states(
    folder: Path, folder_of: Mapping[str, Path], *, rank: TensorParallelRank
) -> OptimizerStates:
    states = OptimizerStates()
    has_root = any(f".{module_tree.ROOT}." in f".{name}" for name in folder_of)
    slices = _slices(rank, None if has_root else deepspeed_folder.pipeline_layer_numbers(folder_of))
    if missing := sorted({*slices} - {*folder_of}):
        missing_slices = {name: slices[name] for name in missing}
        states.extents += _frozen_weights(folder, rank.architecture, slices=missing_slices)
    for name, parameter_folder in folder_of.items():
        if (tensor := slices.get(name)) is None:
            raise UserError(f"{parameter_folder}: is not part of the model; {REMEDY}")
        _add_parameter(states, parameter_folder, tensor=tensor)
    _add_steps_of_zero_3(states, folder / _ZERO)
    return states


def _vocabulary_rows(folder: Path, folder_of: Mapping[str, Path], *, hidden_size: int) -> int:
    """Return the number of rows of the embedding or the output layer.

    If both were frozen, they are not in `zero`, but in the files of the ranks.
    """
    for name, parameter_folder in folder_of.items():
        if name.endswith(module_tree.ROW_PER_TOKEN):
            return _param(parameter_folder / f"{_WEIGHTS}.pt").numel // hidden_size
    state = rank_file.read(file := deepspeed_folder.model_states_path(folder, 0))
    if deepspeed_folder.has_no_weights(file) or not isinstance(state.get("module"), dict):
        raise UserError(f"{folder / _ZERO}: has no word_embeddings.weight; {REMEDY}")
    rows = module_tree.vocabulary_rows(file, state["module"])
    return rows * deepspeed_folder.count_ranks(folder)


def _frozen_weights(
    folder: Path, architecture: Architecture, *, slices: Mapping[str, TensorSlice]
) -> list[Extent]:
    """Return the extents of frozen parameters, which are in the ranks' files, not in `zero`."""
    num_ranks = deepspeed_folder.count_ranks(folder)
    keys = {chunk.key for tensor in slices.values() for chunk in tensor.chunks}
    first_missing, extents = next(iter(slices)), list[Extent]()
    for number in range(num_ranks):
        state = rank_file.read(file := deepspeed_folder.model_states_path(folder, number))
        groups, module = state.get("param_shapes"), state.get("module")
        # DeepSpeed lists only trained parameters in param_shapes.
        trained = {module_tree.current_name(name) for group in groups or () for name in group}
        if not groups or not trained.isdisjoint(slices):
            lost = next((name for name in slices if name in trained), first_missing)
            raise UserError(f"{folder / _ZERO}: has no parameter {lost}; {REMEDY}")
        if deepspeed_folder.has_no_weights(file) or not isinstance(module, dict):
            raise UserError(
                f"{folder / _ZERO}: has no parameter {first_missing}, which was frozen: with ZeRO "
                "3 and with pipelines, DeepSpeed's universal checkpoints omit frozen weights; "
                "convert the checkpoint from which DeepSpeed made this one"
            )
        rows = module_tree.vocabulary_rows(file, module) * num_ranks
        version = rank_file.version_of(state, file, default=3.0)
        rank = TensorParallelRank(architecture, Axis(number, num_ranks), rows, version)
        tree = module_tree.stage_tree(rank, range(architecture.num_hidden_layers))
        for extent in module_tree.locate(file, module, tree):
            if all(chunk.key in keys for chunk in extent.chunks):
                extents.append(extent)
    return extents


def _settings_note(zero: Path) -> dict[str, Any]:
    """Return the note with the optimizer's settings, which only DeepSpeed's own files record."""
    file = zero / "optimizer_state.pt"
    groups = rank_file.read(file).get("param_groups") if file.is_file() else None
    return settings_note(groups)


def _check_same_files(folders: Iterable[Path]) -> None:
    names_of = {folder: {file.name for file in folder.glob("*.pt")} for folder in folders}
    expected = {name for names in names_of.values() for name in names}
    for folder, names in names_of.items():
        if missing := sorted(expected - names):
            raise UserError(f"{folder / missing[0]}: no such file; {REMEDY}")


def _tokamake_notes(state: dict[str, Any]) -> dict[str, Any]:
    notes = state.get(_TOKAMAKE)
    return {key: notes[key] for key in _NOTES if key in notes} if isinstance(notes, dict) else {}


def _slices(
    rank: TensorParallelRank, layer_numbers: Iterable[int] | None
) -> dict[str, TensorSlice]:
    """Return the parameters of a model by DeepSpeed's names; None: there is no pipeline."""
    if layer_numbers is not None:
        return deepspeed_folder.pipeline_parameters(rank, layer_numbers)
    layers = range(rank.architecture.num_hidden_layers)
    return dict(module_tree.named_slices(module_tree.stage_tree(rank, layers)))


def _param(file: Path) -> PickledTensor:
    content = pickle_reader.read(file, REMEDY)
    # From ZeRO 3, DeepSpeed writes the flat tensor itself, not a dict with `param`.
    tensor = content.get("param") if isinstance(content, dict) else content
    if not isinstance(tensor, PickledTensor):
        raise UserError(f"{file}: holds no tensor param; {REMEDY}")
    return tensor


def _add_parameter(states: OptimizerStates, folder: Path, *, tensor: TensorSlice) -> None:
    for file in sorted(folder.glob("*.pt")):
        kind = file.stem
        prefix = MODEL if kind == _WEIGHTS else f"optimizer.{kind}."
        chunks = (*state_chunks(tensor.chunks, prefix),)
        if kind == _STEP:
            step = pickle_reader.read(file, REMEDY)
            states.add_step(file, _STEP, step=step, keys={chunk.key for chunk in chunks})
            continue
        param = _param(file)
        if param.shape not in (tensor.shape, (math.prod(tensor.shape),)):
            raise UserError(
                f"{file}: has shape {list(param.shape)}, the architecture calls for "
                f"{list(tensor.shape)}; fix the architecture or give another checkpoint"
            )
        states.extents.append(torch_archive.extent(file, folder.name, param, chunks))


def _add_steps_of_zero_3(states: OptimizerStates, zero: Path) -> None:
    """Add the step counts of a checkpoint from ZeRO 3, which are in a single file."""
    read_keys = {chunk.key for extent in states.extents for chunk in extent.chunks}
    keys = {
        f"optimizer.{_STEP}.{parameter_name(key)}" for key in read_keys if key.startswith(_MOMENTS)
    }
    file, missing = zero / "optimizer_state.pt", keys - states.scalar_keys - states.values.keys()
    if missing and file.is_file():
        state = rank_file.read(file).get("optimizer_state_dict", {})
        torch_state = state.get("optimizer_state_dict", state)
        step = torch_state.get("state", {}).get(0, {}).get(_STEP)
        states.add_step(file, _STEP, step=step, keys=missing)


def lay_out(folder: Path, checkpoint: Checkpoint, *, target: Target) -> list[Extent]:
    """Write the files without the data of their tensors; with several stages, for a pipeline."""
    if target.dtype not in (None, DTYPE):
        raise UserError(
            f"--dtype {target.dtype}: this format holds {DTYPE} weights; leave the option out"
        )
    architecture = checkpoint.architecture
    deepspeed_folder.check_model(architecture)
    assert architecture.vocab_size is not None
    name = f"global_step{checkpoint.progress.iteration}_universal"
    zero = folder / name / _ZERO
    zero.mkdir(parents=True)
    files.write_text(folder / POINTER, name)
    rank = TensorParallelRank(architecture, Axis(0, 1), architecture.vocab_size)
    slices = _slices(rank, count(1) if target.layout.pipeline_parallel_size > 1 else None)
    extents: list[Extent] = []
    for parameter, tensor in slices.items():
        (zero / parameter).mkdir()
        for kind, content in _contents(tensor, checkpoint.source):
            extents += torch_archive.lay_out(zero / parameter / f"{kind}.pt", content)
    groups = {"param_groups": [{}] * _NUM_GROUPS, "ds_version": VERSION}
    torch_archive.lay_out(zero / "optimizer_state.pt", groups)
    _write_model_states(folder / name, checkpoint, target=target)
    return extents


def _write_model_states(folder: Path, checkpoint: Checkpoint, *, target: Target) -> None:
    vocab_size = checkpoint.architecture.vocab_size
    assert vocab_size is not None
    client_state = deepspeed_folder.client_state(checkpoint, target.layout, vocab_size)
    notes = {key: checkpoint.notes[key] for key in _NOTES if key in checkpoint.notes}
    content = {"module": None, "ds_version": VERSION, _TOKAMAKE: notes, **client_state}
    path = deepspeed_folder.model_states_path(folder, 0)
    torch_archive.lay_out(path, content | {"mp_world_size": 1})


def _contents(tensor: TensorSlice, source: TensorSource) -> Iterator[tuple[str, Any]]:
    """Yield the kind and contents of each of a parameter's files."""
    # DeepSpeed divides the parameter among ranks along cat_dim, pads a vocab_tensor, and divides
    # each sub-parameter of a fused tensor by itself.
    options: dict[str, Any] = {"cat_dim": int(tensor.split == "columns")}
    if tensor.split == "vocabulary":
        options["vocab_tensor"] = True
    if tensor.split == "rows" and len(tensor.chunks) > 1:
        options["param_n_sub_params"] = len(tensor.chunks)
    parameters = [parameter_name(chunk.key) for chunk in tensor.chunks]
    weights = MASTER if f"{MASTER}{parameters[0]}" in source else MODEL
    yield _WEIGHTS, {"param": _planned(tensor, weights), **options}
    for kind in _kinds(source):
        keys = [f"optimizer.{kind}.{parameter}" for parameter in parameters]
        if not all(key in source for key in keys):
            raise UserError(
                f"--format universal: DeepSpeed needs the same states for all parameters, but "
                f"{parameters[0]} has no {kind}; choose another format, or convert to hf first"
            )
        if source.shapes[keys[0]]:
            yield kind, {"param": _planned(tensor, f"optimizer.{kind}."), **options}
        else:
            yield kind, PlannedTensor((), FLOAT32, (Chunk(keys[0], ()),))


@functools.cache
def _kinds(source: TensorSource) -> tuple[str, ...]:
    """Return the kinds of optimizer states of a checkpoint."""
    kinds = (key.split(".")[1] for key in source if key.startswith("optimizer."))
    return (*dict.fromkeys(kinds),)


def _planned(tensor: TensorSlice, prefix: str) -> PlannedTensor:
    chunks = (chunk._replace(key=prefix + parameter_name(chunk.key)) for chunk in tensor.chunks)
    return PlannedTensor(tensor.shape, FLOAT32, (*chunks,))


if TYPE_CHECKING:
    from tokamake.checkpoint.deepspeed.universal import format as this_module

    _: CheckpointFormat = this_module
