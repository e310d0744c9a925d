"""Megatron-DeepSpeed's checkpoint folder without pipelining, at tensor-parallel size 1.

The format `mds` has taken its place, which tests hold against it.
`latest` names a folder global_step<N>, whose mp_rank_00_model_states.pt holds the weights, nested
and fused as Megatron has them (checkpoint version 3.0), and the arguments.
"""

import argparse
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokamake import files
from tokamake.checkpoint import tensors as checkpoint_tensors
from tokamake.checkpoint.megatron.arguments import of_model
from tokamake.checkpoint.megatron.layout import from_megatron, padded_vocab_size, to_megatron
from tokamake.config import Architecture
from tokamake.errors import UserError
from tokamake.validation import validate

_REMEDY = "import or train the checkpoint again"
_STATES = "mp_rank_00_model_states.pt"


def client_state(architecture: Architecture, iteration: int = 0, tokens: int = 0) -> dict[str, Any]:
    """What Megatron adds to DeepSpeed's part of the file; pass it to `engine.save_checkpoint`.

    Args:
        architecture: shape of the model; kept whole in `args.tokamake`, beside Megatron's names.
        iteration: steps trained.
        tokens: tokens trained on.
    """
    return {
        "args": of_model(architecture, tokens, padded_vocab_size=padded_vocab_size(architecture)),
        "checkpoint_version": 3.0,
        "iteration": iteration,
        "tokens": tokens,
    }


def write(path: Path, architecture: Architecture, tensors: Mapping[str, Tensor]) -> None:
    """Write the folder of a run that has not begun: global_step0, whole or not at all.

    Args:
        path: folder; an existing one is replaced.
        architecture: shape of the model, vocab_size filled in.
        tensors: by our names, all of one dtype.
    """
    checkpoint_tensors.common_dtype(tensors, str(path))
    state = {
        "module": to_megatron(architecture, tensors),
        "dp_world_size": 1,
        "mp_world_size": 1,
        "global_steps": 0,
        **client_state(architecture),
    }
    with files.atomic_folder(path) as temporary:
        (temporary / "global_step0").mkdir()
        torch.save(state, temporary / "global_step0" / _STATES)
        files.write_text(temporary / "latest_checkpointed_iteration.txt", "0")
        files.write_text(temporary / "latest", "global_step0")


def read(path: Path) -> tuple[Architecture, dict[str, Tensor], int]:
    """Read the checkpoint that `latest` names; see `lazily`.

    Returns:
        Architecture, tensors by our names, and iteration. What fusing did not move is
        backed by the memory-mapped file.
    """
    architecture, tensors, iteration = lazily(path)
    return architecture, dict(tensors), iteration


def lazily(path: Path) -> tuple[Architecture, Mapping[str, Tensor], int]:
    """Open the checkpoint that `latest` names.

    Returns:
        Architecture, tensors by our names, each read from the memory-mapped file when it is asked
        for, and iteration.

    Raises:
        UserError: a file is missing or damaged, or its tensors do not fit its architecture.
    """
    file = path / _latest(path) / _STATES
    state = _load(file)
    described = getattr(state.get("args"), "tokamake", None)
    if described is None or not isinstance(state.get("module"), dict):
        raise UserError(
            f"{file}: no args.tokamake or no weights in it; make a checkpoint of it to start from "
            "with `tokamake convert --format native`"
        )
    if (size := getattr(state["args"], "tensor_model_parallel_size", 1)) > 1:
        raise UserError(
            f"{file}: of {size} tensor-parallel ranks; make a checkpoint of it to start from with "
            "`tokamake convert --format native`"
        )
    architecture = validate(Architecture, described, f"{file}: args.tokamake")
    tensors = from_megatron(architecture, state["module"], str(file))
    checkpoint_tensors.common_dtype(tensors.stored, str(file))
    return architecture, tensors, int(state.get("iteration", 0))


def _latest(path: Path) -> str:
    pointer = path / "latest"
    try:
        name = pointer.read_text(encoding="utf-8", errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"{pointer}: no such file, so no checkpoint is finished; {_REMEDY}"
        ) from None
    if not name or Path(name).name != name:
        raise UserError(f"{pointer}: {name!r} is not the name of a folder; {_REMEDY}")
    return name


def _load(file: Path) -> dict[str, Any]:
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):
            state: Any = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except FileNotFoundError:
        raise UserError(
            f"{file}: no such file, though latest names its folder; {_REMEDY}"
        ) from None
    except pickle.UnpicklingError as error:
        reason = str(error).split("\n")[0]
        raise UserError(
            f"{file}: holds more than tensors and plain values ({reason}); {_REMEDY}"
        ) from None
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        reason = str(error).split("\n")[0]
        raise UserError(f"{file}: damaged ({reason}); {_REMEDY}") from None
    if not isinstance(state, dict):
        raise UserError(f"{file}: holds no checkpoint but a {type(state).__name__}; {_REMEDY}")
    return state
