"""Indexed datasets that exist already: those of a row with `format: indexed`.

`plan` finds the datasets behind the prefixes, folders and patterns of the row, or behind the lines
of a weighting file. It reads no file.
"""

from collections.abc import Iterator
from glob import glob, has_magic
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from tokamake.data.corpus.corpora import Corpus, patterns
from tokamake.data.corpus.stamps import file_stamp
from tokamake.data.readers import in_natural_order
from tokamake.errors import UserError
from tokamake.files import digest
from tokamake.remote.remote_file import is_remote

SUFFIXES = (".bin", ".idx")


class DatasetFiles(NamedTuple):
    """An indexed dataset on disk, for the plan."""

    prefix: str
    """Path without .bin and .idx, as the user wrote it."""
    stamp: str
    """Changes if one of its files is changed or touched."""


def dataset_files(corpus: Corpus) -> list[DatasetFiles]:
    """Return the indexed datasets of a corpus in natural order.

    The column `files` has prefixes with or without .bin or .idx, folders, and patterns of these.
    """
    datasets = _listed(corpus) if corpus.listed else _named(corpus)
    return in_natural_order(datasets, path=attrgetter("prefix"))


def _named(corpus: Corpus) -> list[DatasetFiles]:
    """Datasets of a row of the table, each once."""
    datasets: dict[Path, DatasetFiles] = {}
    for pattern in patterns(corpus):
        if is_remote(pattern):
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
    """Datasets of the lines of a weighting file."""
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
