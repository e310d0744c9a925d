"""The checkpoint that a folder's file `latest` names, of any format that tokamake trains with."""

from pathlib import Path

from torch import Tensor

from tokamake.checkpoint import megatron_deepspeed, native
from tokamake.config import Architecture
from tokamake.errors import UserError

REMEDY = "give the folder of a training run, or make a checkpoint with `tokamake init-model`"


def latest(folder: Path) -> Path:
    """Checkpoint that `latest` of a folder points to.

    Raises:
        UserError: no `latest`, or what it names is missing.
    """
    pointer = folder / "latest"
    if not pointer.is_file():
        raise UserError(f"{pointer}: no such file, so no checkpoint is finished; {REMEDY}")
    name = pointer.read_text(encoding="utf-8", errors="replace").strip()
    if not name or Path(name).name != name:
        raise UserError(f"{pointer}: {name!r} is not the name of a folder; {REMEDY}")
    if not (folder / name).is_dir():
        raise UserError(f"{pointer}: names {name}, which is missing; name one that is there")
    return folder / name


def read(folder: Path) -> tuple[Architecture, dict[str, Tensor], int]:
    """Architecture, whole tensors by Hugging Face's names, and step of the latest checkpoint.

    Raises:
        UserError: it is missing or damaged, or its tensors do not fit its architecture.
    """
    path = latest(folder)
    return native.read(path) if native.is_native(path) else megatron_deepspeed.read(folder)
