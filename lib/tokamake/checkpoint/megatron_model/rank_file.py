"""The file of a rank: counters and tensors of Megatron-LM and Megatron-DeepSpeed."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tokamake.checkpoint.tensors.checkpoint import Progress
from tokamake.checkpoint.torch_files import pickle_reader
from tokamake.errors import UserError

REMEDY = "fetch or write the checkpoint again"


def read(file: Path) -> dict[str, Any]:
    """Return the contents of a file, with tensors as `PickledTensor`."""
    state = pickle_reader.read(file, REMEDY)
    if not isinstance(state, dict):
        kind = "tensor" if isinstance(state, pickle_reader.PickledTensor) else type(state).__name__
        raise UserError(f"{file}: holds a {kind}, not a checkpoint; {REMEDY}")
    return state


def check_same_step(
    file: Path, state: dict[str, Any], *, first_file: Path, first_state: Mapping[str, Any]
) -> None:
    """Check that the file of a rank is from the same step as the first rank's file."""
    progress, first = progress_of(state, file), progress_of(first_state, first_file)
    if progress != first:
        raise UserError(
            f"{file}: is of step {progress.iteration:,} ({progress.consumed_samples:,} samples), "
            f"{first_file} of step {first.iteration:,} ({first.consumed_samples:,}); {REMEDY}"
        )


def progress_of(state: Any, file: Path) -> Progress:
    """Return the progress of the run that a checkpoint records."""
    args = state.get("args")
    samples = getattr(args, "consumed_train_samples", None) or state.get("global_samples") or 0
    tokens = getattr(args, "consumed_train_tokens", None) or state.get("tokens") or 0
    counts = {
        "iteration": state.get("iteration") or 0,
        "consumed_train_samples": samples,
        "consumed_train_tokens": tokens,
    }
    return Progress(*(whole_number(count, f"{file}: {name}") for name, count in counts.items()))


def version_of(state: Any, file: Path, *, default: float) -> float:
    """Return Megatron's checkpoint_version, or the default if a file has none."""
    version = state.get("checkpoint_version")
    if version is None:
        return default
    if not isinstance(version, int | float):
        raise UserError(
            f"{file}: checkpoint_version: {version!r}: is not a number; fetch or write the "
            "checkpoint again"
        )
    return float(version)


def first_missing(numbers: Collection[int], count: int) -> int | None:
    """Return the first number below `count`, which a file may say, that is not among `numbers`."""
    return next((number for number in range(count) if number not in numbers), None)


def whole_number(value: Any, name: str) -> int:
    """Convert an int, or a float without a fraction, to an int."""
    if isinstance(value, int | float) and value == value // 1:
        return int(value)
    raise UserError(
        f"{name}: {value!r}: is not a whole number; fetch or write the checkpoint again"
    )
