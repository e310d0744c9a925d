"""What checkpoints of Megatron-DeepSpeed have in common, with pipelining and without.

A root folder whose `latest` names global_step<N>; in it mp_rank_<M>_model_states.pt with arguments
and counters. The formats `mds` and `mds_pipeline` say where the weights are.
"""

import re
from pathlib import Path
from typing import Any

from tokamake.checkpoint import latest
from tokamake.checkpoint.megatron_model import module as megatron_module
from tokamake.checkpoint.megatron_model.arguments import arguments, progress_of
from tokamake.checkpoint.tensors.checkpoint import Checkpoint, ParallelLayout
from tokamake.checkpoint.torch_files import pickle_reader
from tokamake.errors import UserError

REMEDY = "fetch or write the checkpoint again"
SCHEDULE = "lr_scheduler"
"""Note of the state of Megatron's scheduler, which files of DeepSpeed's call so."""
LATER_SCHEDULE = "opt_param_scheduler"
"""What Megatron-LM's own files call it since it has weight decay, too."""
VERSION = "0.14.0"
"""DeepSpeed asks which of its versions has written a checkpoint; from this one on it is alike."""
_SLICED = "zero_pp_rank_0_"
"""ZeRO's stage 3 has such files of each rank, without weights, in the place of those with."""
_STATES = re.compile(rf"(?:{_SLICED})?mp_rank_(\d+)_model_states\.pt")


def states(folder: Path, number: int) -> Path:
    """File of a model-parallel rank, or the first of them."""
    name = f"mp_rank_{number:02d}_model_states.pt"
    sliced = folder / f"{_SLICED}{name}"
    return sliced if sliced.is_file() else folder / name


def new_states(folder: Path, number: int, layout: ParallelLayout) -> list[Path]:
    """Files of a model-parallel rank to write: with ZeRO 3 one a data-parallel rank."""
    name = f"mp_rank_{number:02d}_model_states.pt"
    if layout.zero_stage < 3:
        return [folder / name]
    return [folder / f"zero_pp_rank_{rank}_{name}" for rank in range(layout.data_parallel_size)]


def is_sliced(file: Path) -> bool:
    """Whether weights are in ZeRO's shards alone."""
    return file.name.startswith(_SLICED)


def vocabulary_rows(file: Path, state: dict[str, Any]) -> int:
    """Rows of the embedding that a rank has.

    Args:
        file: of the rank.
        state: what is in it.

    Raises:
        UserError: it has none.
    """
    if not is_sliced(file):
        return megatron_module.vocabulary_rows(file, state.get("module"))
    for group in state.get("param_shapes") or ():
        for name, shape in group.items():
            if name.endswith("word_embeddings.weight"):
                return int(shape[0])
    raise UserError(f"{file}: has no word_embeddings.weight in param_shapes; {REMEDY}")


def find(path: Path) -> Path | None:
    """Folder with ranks' files, which `path` is or which its `latest` names."""
    for folder in (path, *([latest.latest(path)] if (path / "latest").is_file() else [])):
        names = {entry.name for entry in _entries(folder)}
        # A universal checkpoint has such files, too.
        if "zero" not in names and any(map(_STATES.fullmatch, names)):
            return folder
    return None


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def ranks(folder: Path, pattern: re.Pattern[str] = _STATES) -> int:
    """How many ranks have a file.

    Args:
        folder: of the checkpoint.
        pattern: of their names, with the rank's number in a group.

    Raises:
        UserError: one is missing.
    """
    numbers = {int(m[1]) for each in _entries(folder) if (m := pattern.fullmatch(each.name))}
    if missing := sorted({*range(max(numbers, default=0) + 1)} - numbers):
        raise UserError(
            f"{folder}: has files of ranks up to {max(numbers, default=0)}, but none of rank "
            f"{missing[0]}; {REMEDY}"
        )
    return len(numbers)


def read(file: Path) -> dict[str, Any]:
    """What a file holds, tensors without data.

    Raises:
        UserError: it is missing, damaged or could run something.
    """
    state = pickle_reader.read(file, REMEDY)
    if not isinstance(state, dict):
        kind = "tensor" if isinstance(state, pickle_reader.Located) else type(state).__name__
        raise UserError(f"{file}: holds no checkpoint but a {kind}; {REMEDY}")
    return state


def check_step(file: Path, state: dict[str, Any], first: Path, of_first: dict[str, Any]) -> None:
    """See that a rank's file is of the step that the first rank's is of.

    Raises:
        UserError: it is not.
    """
    own, other = progress_of(state, file), progress_of(of_first, first)
    if own != other:
        raise UserError(
            f"{file}: is of step {own.iteration:,} ({own.consumed_samples:,} samples), {first} of "
            f"step {other.iteration:,} ({other.consumed_samples:,}); {REMEDY}"
        )


def unread(state: dict[str, Any], zero_stage: int) -> tuple[str, ...]:
    """What a rank's file holds besides, and is not read.

    Args:
        state: what is in it.
        zero_stage: 0: there are no shards.
    """
    has_states = not zero_stage and state.get("optimizer") is not None
    return ("optimizer states without names, of ZeRO stage 0",) if has_states else ()


def data_ranks(state: dict[str, Any]) -> int:
    """Data-parallel ranks that wrote a file, where it tells."""
    found = state.get("dp_world_size")
    return found if isinstance(found, int) and found > 0 else 1


def args_of(state: dict[str, Any]) -> Any:
    """Megatron's arguments in a rank's file, with the true size of the vocabulary if known."""
    args: Any = state.get("args")
    info = state.get("universal_checkpoint_info")
    known = info.get("original_vocab_size") if isinstance(info, dict) else None
    if known and args is not None:
        args.vocab_size = known
    return args


def client_state(
    checkpoint: Checkpoint, layout: ParallelLayout, padded_vocab_size: int
) -> dict[str, Any]:
    """What a rank's file holds beside weights: DeepSpeed's counters, Megatron's arguments."""
    progress = checkpoint.progress
    return {
        "args": arguments(checkpoint, layout, padded_vocab_size=padded_vocab_size),
        "checkpoint_version": 3.0,
        "iteration": progress.iteration,
        "tokens": progress.consumed_tokens,
        "dp_world_size": layout.data_parallel_size,
        "mp_world_size": layout.tensor_parallel_size * layout.pipeline_parallel_size,
        "global_steps": progress.iteration,
        "global_samples": progress.consumed_samples,
        "skipped_steps": 0,
        "lr_scheduler": new_schedule(checkpoint),
        "sparse_tensor_module_names": set(),
    }


def schedule_of(state: dict[str, Any]) -> dict[str, Any]:
    """Note of the state of Megatron's scheduler, where a rank's file has it."""
    known = state.get(SCHEDULE, state.get(LATER_SCHEDULE))
    if not isinstance(known, dict):
        return {}
    plain = (int, float, str, type(None))
    return {SCHEDULE: {key: value for key, value in known.items() if isinstance(value, plain)}}


def new_schedule(checkpoint: Checkpoint) -> dict[str, Any]:
    """State of Megatron's scheduler: where it stands; its settings are those of the new run.

    They are there for --override-opt_param-scheduler, with which Megatron leaves them.
    """
    rates = ("max_lr", "min_lr", "lr_decay_style")
    lengths = ("lr_warmup_steps", "lr_warmup_tokens", "lr_decay_steps", "lr_decay_tokens")
    progress = checkpoint.progress
    at = {"num_steps": progress.consumed_samples, "num_tokens": progress.consumed_tokens}
    return {**dict.fromkeys((*rates, *lengths)), **checkpoint.notes.get(SCHEDULE, {}), **at}
