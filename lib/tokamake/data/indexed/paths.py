"""Paths of the files of an indexed dataset, derived from its prefix."""

import re
from functools import lru_cache
from pathlib import Path

_UNDERSCORED = re.compile(r"(.+?)_\d+(?=_[^_]+_(?:document|sentence)$)")
_NUMBERED = re.compile(r"(.+?)-\d{4,}(?:-of-\d{4,})?(?=_|$)")


def file_path(prefix: Path, name: str) -> Path:
    """Path of a file by its key in the manifest: bin, idx, sources or quarantine.jsonl.

    A prefix may contain dots, so `with_suffix` would be wrong.
    """
    # The current folder has no name.
    return _file_path(prefix if prefix.name else prefix.resolve(), name)


@lru_cache(maxsize=256)  # the paths of one dataset are asked for twenty times
def _file_path(prefix: Path, name: str) -> Path:
    return Path(f"{prefix}.{name}")


def bin_path(prefix: Path) -> Path:
    return file_path(prefix, "bin")


def idx_path(prefix: Path) -> Path:
    return file_path(prefix, "idx")


def sources_path(prefix: Path) -> Path:
    return file_path(prefix, "sources")


def manifest_path(prefix: Path) -> Path:
    """Path of the manifest. It is written last: if it exists, the dataset is complete."""
    return file_path(prefix, "json")


def quarantine_path(prefix: Path) -> Path:
    """Path of a shard's unreadable documents. With several text keys, the first shard has it."""
    return file_path(prefix, "quarantine.jsonl")


def corpus_of(prefix: str) -> str:
    """Return the corpus that a prefix names, as `plan` writes it: <corpus>-<number>.

    It is the last path component up to a number of four digits or more behind a hyphen, else up to
    its first hyphen: stack-v2-0003_text_document and stack-v2-00003-of-00512 belong to stack-v2,
    books-en to books. A number of a file between underscores counts, too: my_books_0_text_document
    belongs to my_books.
    """
    name = prefix.rpartition("/")[2]
    if numbered := _NUMBERED.match(name) or _UNDERSCORED.match(name):
        return numbered[1]
    return name.partition("-")[0] or name or prefix
