"""Files such as `latest`, which name the folder of a checkpoint beside them."""

from pathlib import Path

from tokamake.errors import UserError

REMEDY = (
    "give the folder of a training run, or make one of any other checkpoint with "
    "`tokamake convert --format native`"
)
_MEGATRON = "latest_checkpointed_iteration.txt"


def latest(folder: Path) -> Path:
    """Checkpoint that `latest` of a folder points to.

    Raises:
        UserError: no `latest`, or what it names is missing.
    """
    pointer = folder / "latest"
    if not folder.is_dir():
        raise UserError(f"checkpoint {folder}: no such folder; {REMEDY}")
    if not pointer.is_file():
        raise UserError(
            f"checkpoint {folder}: has no file latest, so none is finished there; {REMEDY}"
        )
    name = pointer.read_text(encoding="utf-8", errors="replace").strip()
    if not name or Path(name).name != name:
        raise UserError(f"{pointer}: {name!r} is not the name of a folder; {REMEDY}")
    if not (folder / name).is_dir():
        others = sorted(path.name for path in folder.glob("global_step*") if path.is_dir())
        there = f" ({', '.join(others)})" if others else ""
        raise UserError(f"{pointer}: names {name}, which is missing; name one that is there{there}")
    return folder / name


def pointed(path: Path) -> tuple[Path | None, Path]:
    """The file that names a checkpoint's folder, if there is one, and that folder.

    Args:
        path: folder of the checkpoint, or one with such a file.
    """
    for name in ("latest", "latest_universal", _MEGATRON):
        pointer = path / name
        if pointer.is_file():
            named = pointer.read_text(encoding="utf-8", errors="replace").strip()
            if name == _MEGATRON:
                named = f"iter_{int(named):07d}" if named.isdecimal() else named
            return pointer, path / named
    return None, path
