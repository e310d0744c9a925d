"""The files that Megatron-DeepSpeed's checkpoints share, with and without pipeline parallelism.

The file `latest` of the root folder names global_step<N>. In it, mp_rank_<M>_model_states.pt holds
Megatron's arguments and counters. The formats `mds` and `mds_pipeline` know where the weights are.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from tokamake import plugins
from tokamake.checkpoint import latest, model_tensors
from tokamake.checkpoint.megatron_model import module_tree
from tokamake.checkpoint.megatron_model.args_reader import Description
from tokamake.checkpoint.megatron_model.args_writer import argument_warnings, megatron_arguments
from tokamake.checkpoint.megatron_model.core_names import family_constant
from tokamake.checkpoint.megatron_model.optimizer_states import (
    LR_SCHEDULER,
    OptimizerStates,
    scheduler_note,
    scheduler_state,
)
from tokamake.checkpoint.megatron_model.rank_file import REMEDY, first_missing
from tokamake.checkpoint.megatron_model.tensor_parallel_slices import (
    TensorParallelRank,
    TensorSlice,
)
from tokamake.checkpoint.tensors.checkpoint import Checkpoint, ParallelLayout
from tokamake.checkpoint.tensors.extents import Extent
from tokamake.config.architecture import Architecture
from tokamake.errors import UserError

VERSION = "0.14.0"
"""DeepSpeed checks the version that wrote a checkpoint; the layout is the same from here on."""
_FIRST_ZERO_3_RANK = "zero_pp_rank_0_"
"""Prefix in ZeRO 3, where each data-parallel rank writes a file. These files have no weights."""
_MODEL_STATES = re.compile(rf"(?:{_FIRST_ZERO_3_RANK})?mp_rank_(\d+)_model_states\.pt")
_TIED_EMBEDDING = "tied_modules.embed"


_EXPERTS = "DeepSpeed's experts have files and routers of their own"


def model_states_path(folder: Path, rank: int) -> Path:
    """Return the file of a model-parallel rank; with ZeRO 3, of its first data-parallel rank."""
    name = f"mp_rank_{rank:02d}_model_states.pt"
    zero_3_path = folder / f"{_FIRST_ZERO_3_RANK}{name}"
    return zero_3_path if zero_3_path.is_file() else folder / name


def new_model_states_paths(folder: Path, rank: int, *, layout: ParallelLayout) -> list[Path]:
    """Return the files to write for a model-parallel rank: several with ZeRO 3, otherwise one."""
    name = f"mp_rank_{rank:02d}_model_states.pt"
    if layout.zero_stage < 3:
        return [folder / name]
    return [folder / f"zero_pp_rank_{rank}_{name}" for rank in range(layout.data_parallel_size)]


def has_no_weights(file: Path) -> bool:
    """Return whether a file is from ZeRO 3, which keeps weights in the optimizer's files."""
    return file.name.startswith(_FIRST_ZERO_3_RANK)


def vocabulary_rows(file: Path, state: dict[str, Any]) -> int:
    """Return the number of rows of the embedding on a rank."""
    if not has_no_weights(file):
        return module_tree.vocabulary_rows(file, state.get("module"))
    for group in state.get("param_shapes") or ():
        for name, shape in group.items():
            if name.endswith("word_embeddings.weight"):
                return int(shape[0])
    raise UserError(f"{file}: has no word_embeddings.weight in param_shapes; {REMEDY}")


def find(path: Path) -> Path | None:
    """Return the folder with the ranks' files: `path`, or the folder that its `latest` names."""
    for folder in (path, *([latest.latest(path)] if (path / "latest").is_file() else [])):
        names = {entry.name for entry in _entries(folder)}
        # A universal checkpoint has such files, too. Its parameters are in the folder `zero`.
        if "zero" not in names and any(map(_MODEL_STATES.fullmatch, names)):
            return folder
    return None


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def count_ranks(folder: Path, pattern: re.Pattern[str] = _MODEL_STATES) -> int:
    """Return the number of ranks that have a file; the first group of `pattern` is the rank."""
    matches = (pattern.fullmatch(entry.name) for entry in _entries(folder))
    ranks = {int(match[1]) for match in matches if match}
    missing = first_missing(ranks, max(ranks, default=0) + 1)
    if missing is not None:
        raise UserError(
            f"{folder}: has files of ranks up to {max(ranks, default=0)}, but none of rank "
            f"{missing}; {REMEDY}"
        )
    return len(ranks)


def opened(
    format: str,
    folder: Path,
    description: Description,
    weights: list[Extent],
    states: OptimizerStates,
    *,
    ranks: tuple[int, int],
    unread: tuple[str, ...] = (),
) -> Checkpoint:
    """Return the open checkpoint of a format; `ranks` are tensor-parallel and pipeline ranks."""
    state, stage = description.state, states.zero_stage
    has_unread = not stage and state.get("optimizer") is not None
    num_ranks = states.data_parallel_size or _data_parallel_size(state)
    return description.checkpoint(
        format,
        folder,
        states.source(weights, model_tensors.weight_shapes(description.architecture)),
        layout=ParallelLayout(*ranks, data_parallel_size=num_ranks, zero_stage=stage),
        unread=unread or ("optimizer states without names, of ZeRO stage 0",) * has_unread,
        notes=states.notes | scheduler_note(state),
    )


def _data_parallel_size(state: Mapping[str, Any]) -> int:
    """Return the number of data-parallel ranks that wrote a file, or 1 if it is not recorded."""
    size = state.get("dp_world_size")
    return size if isinstance(size, int) and size > 0 else 1


def megatron_args(state: dict[str, Any], file: Path, *, reads_experts: bool = False) -> Any:
    """Return Megatron's arguments in a rank's file, with the vocabulary size if it is recorded."""
    args: Any = state.get("args")
    if has_experts(args) and not reads_experts:
        raise UserError(
            f"{file}: args.num_experts: {args.num_experts}: {_EXPERTS}, which tokamake reads from "
            "the format mds alone; give a checkpoint that Megatron-DeepSpeed saved without a "
            "pipeline, not a universal one"
        )
    info = state.get("universal_checkpoint_info")
    vocab_size = info.get("original_vocab_size") if isinstance(info, dict) else None
    if vocab_size and args is not None:
        args.vocab_size = vocab_size
    return args


def has_experts(args: Any) -> bool:
    """Return whether arguments are those of a model with DeepSpeed's experts.

    Other checkpoints that tokamake writes have a number, and Megatron-DeepSpeed always has a list.
    """
    experts = getattr(args, "num_experts", None) or 1
    if getattr(args, "tokamake", None) is not None and not isinstance(experts, list | tuple):
        return False
    numbers = experts if isinstance(experts, list | tuple) else [experts]
    return any(number != 1 for number in numbers)


def client_state(
    checkpoint: Checkpoint, layout: ParallelLayout, padded_vocab_size: int
) -> dict[str, Any]:
    """Return the contents of a rank's file besides weights: Megatron's arguments, counters."""
    progress = checkpoint.progress
    return {
        "args": megatron_arguments(checkpoint, layout, padded_vocab_size=padded_vocab_size),
        "checkpoint_version": 3.0,
        "iteration": progress.iteration,
        "tokens": progress.consumed_tokens,
        "dp_world_size": layout.data_parallel_size,
        "mp_world_size": layout.tensor_parallel_size * layout.pipeline_parallel_size,
        "global_steps": progress.iteration,
        "global_samples": progress.consumed_samples,
        "skipped_steps": 0,
        LR_SCHEDULER: scheduler_state(checkpoint),
        "sparse_tensor_module_names": set(),
    }


def warnings(checkpoint: Checkpoint) -> list[str]:
    """Return warnings about settings for which Megatron-DeepSpeed has no argument."""
    return argument_warnings(checkpoint, is_megatron_lm=False)


def check_model(architecture: Architecture, *, writes_experts: bool = False) -> None:
    """Refuse a model that megatron.core alone has.

    Args:
        writes_experts: whether the format has DeepSpeed's experts.
    """
    is_known = architecture.family in plugins.names("models/*/megatron")  # else refused later
    if not is_known or not family_constant(architecture, "IS_CORE", default=False):
        return
    reason = ""
    if architecture.has_routers:
        reason = f": {_EXPERTS}"
        if family_constant(architecture, "HAS_DEEPSPEED_EXPERTS", default=False):
            if writes_experts:
                return
            reason += ", which tokamake writes in the format mds alone"
    raise UserError(
        f"format: Megatron-DeepSpeed has no model of family {architecture.family}{reason}; choose "
        "the format megatron, torch_dist or native"
    )


def pipeline_layers(rank: TensorParallelRank) -> Iterator[dict[str, TensorSlice]]:
    """Yield a rank's tensors of each pipeline layer, in order."""
    if rank.heads() or rank.architecture.several_stacks:
        raise UserError(
            f"format: Megatron-DeepSpeed has no pipeline of a {rank.architecture.family}; choose "
            "mds, megatron or another format"
        )
    yield rank.embedding()
    for number in range(rank.architecture.num_hidden_layers):
        yield rank.layer(number)
    yield rank.norm()
    if output := rank.output_layer():
        yield {f"lm_head.{name}": tensor for name, tensor in output.items()}


def pipeline_parameters(rank: TensorParallelRank, numbers: Iterable[int]) -> dict[str, TensorSlice]:
    """Return a rank's tensors by DeepSpeed's names of parameters."""
    slices: dict[str, TensorSlice] = {}
    for index, (number, tree) in enumerate(zip(numbers, pipeline_layers(rank), strict=False)):
        # DeepSpeed names a tied layer after the tie, not after its number.
        is_tied = index == 0 and rank.architecture.tie_word_embeddings
        prefix = _TIED_EMBEDDING if is_tied else f"{number}"
        slices |= {f"{prefix}.{name}": tensor for name, tensor in tree.items()}
    return slices


def pipeline_layer_numbers(names: Iterable[str]) -> list[int]:
    """Return the numbers of the pipeline layers of parameters; empty if there is no pipeline.

    A tied embedding has no number in its name, and is first.
    """
    prefixes = {name.partition(".")[0] for name in names}
    tied = [0] if _TIED_EMBEDDING.partition(".")[0] in prefixes else []
    return [*tied, *sorted(int(prefix) for prefix in prefixes if prefix.isdecimal())]


def stage_parameters(
    rank: TensorParallelRank, stage: int, *, stages: int
) -> dict[str, TensorSlice]:
    """Return the tensors of a stage in the order of its model, by their names in written files.

    DeepSpeed's `type:transformer` partition gives each stage the same number of layers. If that
    is not possible, the first stages get one more. The first stage also has the layers before
    them, and the last stage the layers after them.
    """
    num_layers = rank.architecture.num_hidden_layers
    per_stage, num_longer = divmod(num_layers, stages)
    # Number 1 is the embedding, layers follow from 2.
    begin, end = (2 + at * per_stage + min(at, num_longer) for at in (stage, stage + 1))
    numbers = range(begin if stage else 1, end if stage < stages - 1 else num_layers + 4)
    slices: dict[str, TensorSlice] = {}
    for name, tensor in pipeline_parameters(rank, count(1)).items():
        number = name.partition(".")[0]
        # The tied embedding is the first parameter of both the first and the last stage.
        in_stage = int(number) in numbers if number.isdecimal() else stage in (0, stages - 1)
        if in_stage:
            slices[name] = tensor
    return slices
