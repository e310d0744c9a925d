"""Files of a list of names: files, folders, glob patterns, and datasets saved by `datasets`."""

import os
import re
import stat
from collections.abc import Container, Iterable, Iterator
from glob import glob, has_magic
from pathlib import Path

from tokamake.data.readers import text
from tokamake.data.readers._detect import kind_of_name
from tokamake.data.readers._input import reading
from tokamake.errors import UserError
from tokamake.files import read_json

File = tuple[str, os.stat_result]

_REMEDY = "save the dataset again"
_NUMBER = re.compile(r"\d+")


def natural_key(path: str) -> str:
    """Sorting key that puts 2 before 10; text, since lists would take four times as long."""
    return f"{_NUMBER.sub(_with_length, path)}\0{path}"


def _with_length(number: re.Match[str]) -> str:
    digits = number[0].lstrip("0")
    return f"{len(digits):03d}{digits}"


def expand(names: Iterable[str | Path]) -> list[Path]:
    """Raw files that names stand for, in the order of names, each name's in natural order.

    Args:
        names: files, folders (taken whole, without names that begin with . or _), glob patterns
            (** goes into folders), or folders that `datasets` saved.

    Returns:
        Paths; a file that is found under several names comes once, where it is found first.

    Raises:
        UserError: a name stands for nothing.
    """
    found: dict[tuple[int, int], str] = {}
    for name in map(str, names):
        named = list(_files(name, set()))
        if not named:
            raise UserError(f"{name}: no files there; fix the path or pattern")
        if Path(name).is_dir():
            _refuse_mixture(name, [file for file, _ in named])
        for file, status in named:
            found.setdefault(_identity(status), file)
    return list(map(Path, found.values()))


def _refuse_mixture(folder: str, files: list[str]) -> None:
    """Documentation that lies beside data is hardly meant to be trained on."""
    texts = [file for file in files if kind_of_name(Path(file)) in text.NAMES]
    if texts and len(texts) < len(files):
        other = next(file for file in files if file not in set(texts))
        raise UserError(
            f"{folder}: holds both texts ({texts[0]}) and other files ({other}); name those you "
            f"want by a pattern, as {folder}/**/*{''.join(Path(other).suffixes[-2:])}"
        )


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _files(name: str, folders: set[tuple[int, int]]) -> Iterator[File]:
    """Files of one name; folders that were gone through are not again, lest links go in circles."""
    try:
        status = Path(name).stat()
    except OSError as error:
        if not has_magic(name):
            raise UserError(
                f"{name}: no such file ({error.strerror}); fix the list of files"
            ) from None
        for match in _matches(name):
            if "**" not in name or Path(match).is_file():  # ** itself finds what is in folders
                yield from _files(match, folders)
        return
    if not stat.S_ISDIR(status.st_mode):
        yield name, status
    elif _identity(status) not in folders:
        folders.add(_identity(status))
        yield from _folder(name, folders)


def _matches(pattern: str) -> list[str]:
    """Paths that a glob pattern finds, as a shell does, in natural order."""
    return sorted(glob(pattern, recursive=True), key=natural_key)


def _folder(folder: str, folders: set[tuple[int, int]]) -> Iterator[File]:
    """Files of a folder and those below it, in natural order."""
    with reading(Path(folder)), os.scandir(folder) as entries:
        inside = {entry.name: entry for entry in entries}
    if "dataset_dict.json" in inside:
        _refuse_splits(Path(folder))
    names = sorted(inside, key=natural_key)
    if "state.json" in inside and "dataset_info.json" in inside:
        names = _dataset(Path(folder), inside)
    for name in names:
        if not name.startswith((".", "_")):
            entry = inside[name]
            if entry.is_file():
                yield entry.path, entry.stat()
            else:
                yield from _files(entry.path, folders)


def _refuse_splits(folder: Path) -> None:
    value = read_json(folder / "dataset_dict.json", _REMEDY)
    splits = value.get("splits") if isinstance(value, dict) else None
    example = folder / str(splits[0]) if splits else f"{folder}/train"
    raise UserError(
        f"{folder}: holds several splits ({', '.join(map(str, splits or []))}); name the folder "
        f"of one, as {example}"
    )


def _dataset(folder: Path, inside: Container[str]) -> list[str]:
    """Names of the files of a saved dataset, in the order of its rows."""
    state = folder / "state.json"
    value = read_json(state, _REMEDY)
    try:
        names = [str(file["filename"]) for file in value["_data_files"]]
    except (KeyError, TypeError) as error:
        raise UserError(f"{state}: names no data files ({error}); {_REMEDY}") from None
    for name in names:
        if name not in inside:
            raise UserError(f"{folder / name}: named by {state}, but not there; {_REMEDY}")
    return names
