"""Paths of the files of an indexed dataset, derived from its prefix."""

from pathlib import Path


def bin_path(prefix: Path) -> Path:
    """Path of the token file. A prefix may contain dots, so `with_suffix` would be wrong."""
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".idx")


def manifest_path(prefix: Path) -> Path:
    """Path of the manifest. It is written last: if it exists, the dataset is complete."""
    return prefix.with_name(prefix.name + ".json")


def quarantine_path(prefix: Path) -> Path:
    """Path of a shard's unreadable documents. With several text keys, the first shard has it."""
    return prefix.with_name(prefix.name + ".quarantine.jsonl")


def file_path(prefix: Path, name: str) -> Path:
    """Path of a file by its key in the manifest: bin, idx, sources or quarantine.jsonl."""
    return prefix.with_name(f"{prefix.name}.{name}")


def corpus_of(prefix: str) -> str:
    """Return the corpus that a prefix names, as `plan` writes it: <corpus>-<number>.

    It is the last path component up to its first hyphen.
    """
    name = prefix.rpartition("/")[2]
    return name.partition("-")[0] or name or prefix
