"""Raw files of a corpus, on disk or declared, or its indexed datasets (`format: indexed`).

`plan` finds the files behind the names, folders and patterns in the table of corpora, and the
datasets behind the lines of a weighting file. It reads no file, and calls `stat` once per file, so
100,000 files take about a second.
"""

import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from glob import glob, has_magic
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from tokamake.data.corpus.corpora import Corpus, patterns
from tokamake.data.readers import DECLARED, expand, file_stamp, in_natural_order
from tokamake.data.urls.url_list import is_url_list
from tokamake.errors import UserError
from tokamake.files import digest, glob_expression
from tokamake.remote.addresses import RemoteFile, is_remote

_HUB_NAME = r"[\w-][\w.-]*/[\w.-]+"
SUFFIXES = (".bin", ".idx")


class RawFile(NamedTuple):
    """A raw file, for the plan."""

    path: str
    """Path as the user wrote it, absolute or relative to the working directory."""
    size: int
    """Bytes on disk; for a declared file, bytes of uncompressed text."""
    modified: int | None
    """Nanoseconds since the epoch; None for a declared file, which does not exist yet."""
    is_remote: bool = False
    """Whether it is behind an address; then it is as if it did not exist yet, but has its size."""


class DatasetFiles(NamedTuple):
    """An indexed dataset on disk, for the plan."""

    prefix: str
    """Path without .bin and .idx, as the user wrote it."""
    stamp: str
    """Changes if one of its files is changed or touched."""


def raw_files(
    corpus: Corpus,
    declared: Mapping[str, int],
    *,
    downloads: Mapping[str, Iterable[RemoteFile]] = MappingProxyType({}),
) -> list[RawFile]:
    """Return the raw files of a corpus in natural order, with names as in `readers.expand`.

    `declared` has the sizes of files that do not exist yet. Files on disk in the folder of a
    declared file are ignored: an earlier declaration made them.
    """
    declared_folders = {Path(path).parent.resolve() for path in declared}
    files: dict[object, RawFile] = {}
    for pattern in patterns(corpus):
        if is_remote(pattern) or is_url_list(pattern):
            remote = [RawFile(file.path, file.size, None, True) for file in downloads[pattern]]
            files.update({file.path: file for file in remote})
            continue
        expression = glob_expression(pattern)
        num_matches = 0
        for path, size in declared.items():
            if any(re.fullmatch(expression, name) for name in (path, str(Path(path).absolute()))):
                files.setdefault(Path(path).resolve(), RawFile(path, size, None))
                num_matches += 1
        # `**` already lists the files in folders.
        on_disk = _files_on_disk(_paths(pattern), declared_folders, folders="**" not in pattern)
        try:
            for identity, file in on_disk:
                files.setdefault(identity, file)  # one file may have several names
                num_matches += 1
        except UserError as error:
            raise UserError(f"{corpus.where}: files: {error}") from None
        if not num_matches:
            fault = "no file matches" if has_magic(pattern) else "no such file"
            hint = f"; for a dataset of the Hub, write hf://datasets/{pattern}"
            raise UserError(
                f"{corpus.where}: files: {pattern}: {fault}; fix the column, whose paths start "
                f"from {Path.cwd()}{hint * bool(re.fullmatch(_HUB_NAME, pattern))}"
            )
    return in_natural_order(files.values(), path=attrgetter("path"))


def stamps(files: Sequence[RawFile]) -> tuple[str, ...]:
    """Return the stamp of each file."""
    # A list: a generator would take longer, for each of 100,000 files.
    return tuple(
        [
            DECLARED if file.modified is None else file_stamp(file.size, file.modified)
            for file in files
        ]
    )


def stamp(files: Sequence[RawFile], parts: tuple[str, ...] = ()) -> str:
    """Return a string that changes if a file is changed, touched or removed."""
    parts = parts or stamps(files)
    if len(parts) == 1:
        return parts[0]
    return digest([(file.path, part) for file, part in zip(files, parts, strict=True)])


def _paths(pattern: str) -> list[str]:
    """Return the paths of a name or pattern, sorted, because the first of several links is kept."""
    # A file whose own name has glob characters is a name, not a pattern.
    return [pattern] if os.path.lexists(pattern) else sorted(glob(pattern, recursive=True))


def _files_on_disk(
    paths: Iterable[str], skipped_folders: set[Path], *, folders: bool
) -> Iterator[tuple[object, RawFile]]:
    """Yield the device and inode of each file, and the file; enter folders if `folders`."""
    is_skipped: dict[str, bool] = {}  # by folder, because `resolve` is slow
    for path in paths:
        parent = path[: path.rfind("/") + 1] or "."
        if parent not in is_skipped:
            is_skipped[parent] = bool(skipped_folders) and Path(parent).resolve() in skipped_folders
        if is_skipped[parent]:
            continue
        try:
            status = os.stat(path)  # noqa: PTH116 (a Path for each file would double the time)
        except OSError as error:
            is_link = isinstance(error, FileNotFoundError) and Path(path).is_symlink()
            reason = "a link to a missing file" if is_link else error.strerror
            raise UserError(f"{path}: cannot be read ({reason}); fix or remove it") from None
        if path.endswith((".bin", ".idx")) and Path(f"{path[:-4]}.idx").exists():
            raise UserError(
                f"{path}: an indexed dataset, not raw text; give this row the format indexed"
            )
        if stat.S_ISREG(status.st_mode):
            file = RawFile(path, status.st_size, status.st_mtime_ns)
            yield (status.st_dev, status.st_ino), file
        elif stat.S_ISDIR(status.st_mode) and folders:
            yield from _files_on_disk(map(str, expand([path])), skipped_folders, folders=False)


def dataset_files(corpus: Corpus) -> list[DatasetFiles]:
    """Return the indexed datasets of a corpus in natural order.

    The column `files` has prefixes with or without .bin or .idx, folders, and patterns of these.
    """
    datasets = _listed(corpus) if corpus.listed else _named(corpus)
    return in_natural_order(datasets, path=attrgetter("prefix"))


def dataset_pairs(corpus: Corpus) -> list[dict[str, DatasetFiles]]:
    """Return the indexed datasets of a corpus by their text keys, in natural order.

    With several keys, the name of a dataset ends in one of them: X_text_sentence and
    X_title_document are a pair.
    """
    if not corpus.has_pairs:
        return [{corpus.text_key: dataset} for dataset in dataset_files(corpus)]
    keys = corpus.text_key.split(",")
    # The longest key first: title,sub_title.
    choice = "|".join(map(re.escape, sorted(keys, key=len, reverse=True)))
    pairs: dict[str, dict[str, DatasetFiles]] = {}
    for dataset in dataset_files(corpus):
        match = re.fullmatch(rf"(.*?)_({choice})(?:_(?:sentence|document))?", dataset.prefix)
        if match is None:
            raise UserError(
                f"{corpus.where}: files: {dataset.prefix}: its name ends in no key of text_key "
                f"{corpus.text_key}, such as _{keys[0]}_document; rename it, or fix text_key"
            )
        other = pairs.setdefault(match[1], {}).setdefault(match[2], dataset)
        if other is not dataset:
            raise UserError(
                f"{corpus.where}: files: {dataset.prefix}: a second dataset of the key {match[2]} "
                f"beside {other.prefix}; name one of them"
            )
    for stem, pair in pairs.items():
        if missing := [key for key in keys if key not in pair]:
            raise UserError(
                f"{corpus.where}: files: {next(iter(pair.values())).prefix}: no dataset "
                f"{stem}_{missing[0]}_document beside it, which text_key {corpus.text_key} pairs "
                "with it; also name this dataset"
            )
    return [*pairs.values()]


def _named(corpus: Corpus) -> list[DatasetFiles]:
    datasets: dict[Path, DatasetFiles] = {}
    for pattern in patterns(corpus):
        if is_remote(pattern) or is_url_list(pattern):
            raise UserError(
                f"{corpus.where}: files: {pattern}: an address, but indexed datasets are read from "
                "disk; download it with `tokamake fetch`, and name the folder that this prints"
            )
        prefixes = list(_prefixes(pattern))
        if not prefixes:
            fault = "no indexed dataset matches" if has_magic(pattern) else "no such dataset"
            raise UserError(
                f"{corpus.where}: files: {pattern}: {fault}; give prefixes of .bin and .idx files, "
                f"folders or patterns, whose paths start from {Path.cwd()}"
            )
        for prefix in prefixes:  # a dataset may have several names
            datasets.setdefault(
                Path(f"{prefix}.bin").resolve(),
                DatasetFiles(prefix, _stamp(prefix, f"{corpus.where}: files")),
            )
    return list(datasets.values())


def _listed(corpus: Corpus) -> list[DatasetFiles]:
    datasets = []
    first_lines: dict[Path, str] = {}
    for prefix, _, _, where in corpus.listed:
        if Path(prefix).is_dir():
            raise UserError(
                f"{where}: {prefix}: a folder, but a line names one dataset; list the prefixes of "
                "its datasets, or name the folder in a table of corpora, with the format indexed"
            )
        if not any(Path(prefix + suffix).is_file() for suffix in SUFFIXES):
            raise UserError(
                f"{where}: {prefix}: no such dataset: it has neither .bin nor .idx; fix the line, "
                "or give the folder that has the datasets now in data_root"
            )
        first = first_lines.setdefault(Path(f"{prefix}.bin").resolve(), where)
        if first != where:
            raise UserError(
                f"{where}: {prefix}: the same files as in {first}; join the lines to one"
            )
        datasets.append(DatasetFiles(prefix, _stamp(prefix, where)))
    return datasets


def _prefixes(pattern: str) -> Iterator[str]:
    """Yield the prefixes that a name or a pattern stands for, each once."""
    if Path(pattern).is_dir():
        pattern = f"{pattern.removesuffix('/')}/*"
    elif pattern.endswith(SUFFIXES):
        pattern = pattern[:-4]
    paths = [path for suffix in SUFFIXES for path in _existing(pattern + suffix)]
    # Names with a leading dot are temporary files of a running job; patterns leave them out.
    yield from dict.fromkeys(path[:-4] for path in paths)


def _existing(name: str) -> list[str]:
    # A file whose own name has glob characters is a name, not a pattern.
    return [name] if Path(name).is_file() else sorted(glob(name, recursive=True))


def _stamp(prefix: str, where: str) -> str:
    stamps = []
    for suffix in SUFFIXES:
        path = Path(f"{prefix}{suffix}")
        try:
            status = path.stat()
        except OSError as error:
            fault = (
                f"cannot be read ({error.strerror}), but the other file of the dataset exists; "
                "rebuild the dataset, or leave it out"
            )
            if suffix == ".idx" and Path(f"{prefix}.bin.idx").exists():
                fault = f"missing, but {prefix}.bin.idx exists; rename it to {path}"
            raise UserError(f"{where}: {path}: {fault}") from None
        stamps.append(file_stamp(status.st_size, status.st_mtime_ns))
    return digest(stamps)
