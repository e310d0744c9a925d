"""Expansion of names to raw files: files, folders, patterns and saved Hugging Face datasets."""

import os
import re
import stat
from collections.abc import Callable, Container, Iterable, Iterator
from glob import glob, has_magic
from pathlib import Path
from typing import TypeVar

from tokamake.data.readers import text
from tokamake.data.readers._detect import content_suffix
from tokamake.data.readers._input import reading
from tokamake.errors import UserError
from tokamake.files import read_json

Item = TypeVar("Item")
File = tuple[str, os.stat_result]

_REMEDY = "save the dataset again"
_NUMBER = re.compile(r"\d+")
_SAME_DIGIT = str.maketrans("123456789", "000000000")


def natural_key(path: str) -> str:
    """Return a sorting key that puts 2 before 10."""
    # Each number gets its length as prefix. A key of lists would take four times as long.
    return f"{_NUMBER.sub(_with_length, path)}\0{path}"


def _with_length(number: re.Match[str]) -> str:
    digits = number[0].lstrip("0")
    return f"{len(digits):03d}{digits}"


def in_natural_order(items: Iterable[Item], path: Callable[[Item], str]) -> list[Item]:
    """Sort items by their paths, with 2 before 10."""
    items = list(items)
    # Paths that differ in digits only, such as 001 and 010, are in natural order as texts, which
    # takes a tenth of the time.
    shapes = {path(item).translate(_SAME_DIGIT) for item in items}
    key = path if len(shapes) <= 1 else (lambda item: natural_key(path(item)))
    return sorted(items, key=key)


def expand(names: Iterable[str | Path]) -> list[Path]:
    """Return the raw files that names stand for: in the order of names, each in natural order.

    A name is a file, a folder (read recursively, without names that begin with . or _), a glob
    pattern (** matches nested folders), or a folder that `datasets` saved. A file that matches
    several names appears once, at its first match.
    """
    # Keyed by device and inode, so that links to the same file count once.
    paths: dict[tuple[int, int], str] = {}
    for name in map(str, names):
        files = list(_files(name, set()))
        if not files:
            raise UserError(f"{name}: matches no files; fix the path or pattern")
        if Path(name).is_dir():
            _refuse_texts_beside_data(name, [path for path, _ in files])
        for path, status in files:
            paths.setdefault(_identity(status), path)
    return list(map(Path, paths.values()))


def _refuse_texts_beside_data(folder: str, files: list[str]) -> None:
    """Refuse a folder of data with text files: documentation is hardly meant for training."""
    texts = [file for file in files if content_suffix(Path(file)) in text.NAMES]
    if texts and len(texts) < len(files):
        data_file = next(file for file in files if file not in set(texts))
        raise UserError(
            f"{folder}: holds both texts ({texts[0]}) and other files ({data_file}); select files "
            f"by a pattern such as {folder}/**/*{''.join(Path(data_file).suffixes[-2:])}"
        )


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _files(name: str, visited: set[tuple[int, int]]) -> Iterator[File]:
    """Yield the files of one name; skip visited folders, because links can form cycles."""
    try:
        status = Path(name).stat()
    except OSError as error:
        if not has_magic(name):
            is_missing = isinstance(error, FileNotFoundError)
            reason = "no such file" if is_missing else f"cannot be read ({error.strerror})"
            raise UserError(f"{name}: {reason}; fix the list of files") from None
        for match in sorted(glob(name, recursive=True), key=natural_key):
            # ** already matches the files inside folders.
            if "**" not in name or Path(match).is_file():
                yield from _files(match, visited)
        return
    if not stat.S_ISDIR(status.st_mode):
        yield name, status
    elif _identity(status) not in visited:
        visited.add(_identity(status))
        yield from _folder(name, visited)


def _folder(folder: str, visited: set[tuple[int, int]]) -> Iterator[File]:
    with reading(Path(folder)), os.scandir(folder) as scanned:
        entries = {entry.name: entry for entry in scanned}
    if "dataset_dict.json" in entries:
        _refuse_splits(Path(folder))
    names = sorted(entries, key=natural_key)
    if "state.json" in entries and "dataset_info.json" in entries:
        names = _dataset_files(Path(folder), entries)
    for name in names:
        if not name.startswith((".", "_")):
            entry = entries[name]
            if entry.is_file():  # scandir knows the type: no look-up by path for each file
                yield entry.path, entry.stat()
            else:
                yield from _files(entry.path, visited)


def _refuse_splits(folder: Path) -> None:
    value = read_json(folder / "dataset_dict.json", _REMEDY)
    splits = value.get("splits") if isinstance(value, dict) else None
    example = folder / str(splits[0]) if splits else f"{folder}/train"
    raise UserError(
        f"{folder}: holds several splits ({', '.join(map(str, splits or []))}); name the folder "
        f"of one split, such as {example}"
    )


def _dataset_files(folder: Path, entries: Container[str]) -> list[str]:
    """Return the file names of a saved dataset in row order, which state.json defines."""
    state = folder / "state.json"
    value = read_json(state, _REMEDY)
    try:
        names = [str(file["filename"]) for file in value["_data_files"]]
    except (KeyError, TypeError) as error:
        raise UserError(f"{state}: lists no data files ({error}); {_REMEDY}") from None
    for name in names:
        if name not in entries:
            raise UserError(f"{folder / name}: listed in {state}, but missing; {_REMEDY}")
    return names
