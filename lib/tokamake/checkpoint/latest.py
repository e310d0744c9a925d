"""Pointer files such as `latest`, which name a checkpoint's folder in the same parent folder."""

from pathlib import Path

from tokamake.errors import UserError

REMEDY = (
    "give the folder of a training run, or convert any other checkpoint with "
    "`tokamake convert --format native`"
)
_MAX_NAME_BYTES = 255
"""Longest name of a folder on Linux."""


def latest(folder: Path) -> Path:
    """Return the checkpoint that the file `latest` of a folder names."""
    pointer = folder / "latest"
    if not folder.is_dir():
        raise UserError(f"checkpoint {folder}: no such folder; {REMEDY}")
    if not pointer.is_file():
        raise UserError(
            f"checkpoint {folder}: has no file latest, so it holds no finished checkpoint; {REMEDY}"
        )
    name = _name(pointer)
    if not (folder / name).is_dir():
        steps = sorted(path.name for path in folder.glob("global_step*") if path.is_dir())
        choices = f" ({', '.join(steps)})" if steps else ""
        raise UserError(f"{pointer}: names {name}, which is missing; name an existing one{choices}")
    return folder / name


def candidates(path: Path, pointer_name: str, numbered_folder: str = "") -> list[Path]:
    """Return the folders that may hold a checkpoint: `path`, and its pointer's target."""
    if not pointer_name or not (pointer := path / pointer_name).is_file():
        return [path]
    name = _name(pointer)
    if numbered_folder and name.isdecimal():
        name = numbered_folder.format(int(name))
    return [path, path / name]


def pointed_files(path: Path, pointer_name: str, *, numbered_folder: str = "") -> list[Path]:
    """List the pointer file of a folder, if it exists, and all files of the checkpoint's folder."""
    folder = candidates(path, pointer_name, numbered_folder)[-1]
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    if pointer_name and (path / pointer_name).is_file():
        return [path / pointer_name, *files]
    return files


def _name(pointer: Path) -> str:
    with pointer.open("rb") as stream:
        content = stream.read(_MAX_NAME_BYTES + 2).strip()  # the end of the line may follow a name
    name = content.decode(errors="replace")
    is_name = name not in ("", "..") and Path(name).name == name and name.isprintable()
    if len(content) > _MAX_NAME_BYTES or not is_name:
        raise UserError(f"{pointer}: {name[:40]!r} is not the name of a folder; {REMEDY}")
    return name
