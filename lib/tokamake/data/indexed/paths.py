"""Paths of an indexed dataset's files: a prefix names them all."""

from pathlib import Path


def bin_path(prefix: Path) -> Path:
    """Path of a pair's token file (a prefix may contain dots, so no `with_suffix`)."""
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    """Path of a pair's index file."""
    return prefix.with_name(prefix.name + ".idx")


def manifest_path(prefix: Path) -> Path:
    """Path of a pair's manifest, written last: where it stands, the pair is whole."""
    return prefix.with_name(prefix.name + ".json")


def quarantine_path(prefix: Path) -> Path:
    """Path of the documents set aside when a shard was made; with several keys, of its first."""
    return prefix.with_name(prefix.name + ".quarantine.jsonl")


def file_path(prefix: Path, name: str) -> Path:
    """Path of a file of a pair by its name in the manifest: bin, idx, sources, quarantine.jsonl."""
    return prefix.with_name(f"{prefix.name}.{name}")


def corpus_of(prefix: str) -> str:
    """Corpus of a pair by its name, as `plan` gives it: <corpus>-<number>.

    It is the prefix's last part up to its first hyphen.
    """
    name = prefix.rpartition("/")[2]
    return name.partition("-")[0] or name or prefix
