"""The manifest of an indexed dataset: sizes and hashes of its files, and how it was made.

`tokenize` and `merge` write the manifest last. The workflow asks here which datasets are damaged.
This module imports no numpy, because it runs for every dataset each time Snakemake reads the
workflow.
"""

import hashlib
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

from tokamake import files
from tokamake.data.indexed.paths import file_path, manifest_path, sources_path
from tokamake.errors import UserError

if TYPE_CHECKING:
    from tokamake.data.tokenizers import Tokenizer

_JOINED = "parts:"
_BLOCK = 1 << 20


class HashedRange(NamedTuple):
    """A range of bytes of a token file; in a merged dataset, the tokens of one input."""

    size: int
    sha256: str


def raw_inputs(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the raw files of a dataset, in the order of the numbers in its sources file.

    For a merged dataset they are the raw files of its inputs, one input after the other.
    """
    if "inputs" in manifest:
        return manifest["inputs"]
    return [raw for source in manifest["sources"] for raw in source["inputs"]]


def read_manifest(prefix: Path) -> dict[str, Any]:
    """Read the manifest of a dataset."""
    path = manifest_path(prefix)
    manifest = files.read_json(path, "rebuild the dataset")
    if not isinstance(manifest, dict) or "sha256" not in manifest:
        raise UserError(f"{path}: not the manifest of an indexed dataset; rebuild the dataset")
    if manifest.pop("digest", None) != files.digest(manifest):
        raise UserError(f"{path}: changed since it was written; rebuild the dataset")
    return manifest


def find_manifest(prefix: Path) -> dict[str, Any] | None:
    """Return the manifest of a dataset, or None for a dataset of another program."""
    # A sources file without a manifest: the manifest was lost, or the job did not finish.
    has_manifest = manifest_path(prefix).exists() or sources_path(prefix).exists()
    return read_manifest(prefix) if has_manifest else None


def check_tokenizer(prefix: Path, tokenizer: "Tokenizer") -> None:
    """Compare the fingerprint of a tokenizer, or of its base tokenizer, with the manifest.

    A dataset of another program has no manifest; it passes unchecked.
    """
    path = manifest_path(prefix)
    if not path.is_file():
        return
    fingerprint = files.read_json(path, "rebuild the dataset").get("tokenizer")
    known = [tokenizer.fingerprint, *filter(None, [tokenizer.base])]
    if fingerprint not in (None, *known):
        raise UserError(
            f"{prefix}: made with another tokenizer ({fingerprint[:12]}) than the one given "
            f"({tokenizer.fingerprint[:12]}); give the tokenizer that made the dataset"
        )


def write_manifest(path: Path, manifest: dict[str, Any]) -> None:
    """Write a manifest with its own digest, so that readers detect a damaged one.

    `path` is a temporary file that `files.atomic` renames later.
    """
    signed = {**manifest, "digest": files.digest(manifest)}
    # Names of raw files are not always UTF-8.
    path.write_bytes(files.to_json(signed).encode("utf-8", "surrogateescape"))


def sizes_and_hashes(
    *paths: Path, bin_sha256: str = "", index: bytes = b""
) -> dict[str, dict[str, Any]]:
    """Return sizes and hashes of a dataset's files, as its manifest states them.

    `paths`: the token file, the index, and if there are any the sources file and the quarantine.
    """
    named = dict(zip(("bin", "idx", "sources", "quarantine.jsonl"), paths, strict=False))
    known = {"bin": bin_sha256, "idx": hashlib.sha256(index).hexdigest() if index else ""}
    return {
        "bytes": {name: path.stat().st_size for name, path in named.items()},
        "sha256": {name: known.get(name) or files.sha256(path) for name, path in named.items()},
    }


def hashed_ranges(manifest: dict[str, Any]) -> list[HashedRange]:
    """Return the byte ranges that the manifest hashes: one for each input, or the whole file."""
    whole = [[manifest["bytes"]["bin"], manifest["sha256"]["bin"]]]
    return [HashedRange(*hashed) for hashed in manifest.get("parts", whole)]


def joined_sha256(ranges: list[HashedRange]) -> str:
    """Return the hash that a manifest states for a token file of several ranges.

    It is `parts:` and a digest of the sizes and hashes of the ranges. Threads can hash ranges in
    parallel and reuse known hashes; SHA-256 of the whole file could do neither. For a single
    range it is the hash of the file.
    """
    if len(ranges) == 1:
        return ranges[0].sha256
    return _JOINED + files.digest([list(hashed) for hashed in ranges])


def differs_from_manifest(prefix: Path, manifest: dict[str, Any], *, name: str) -> bool:
    """Hash a file of a dataset and compare it with the manifest."""
    path, expected = file_path(prefix, name), manifest["sha256"][name]
    if not expected.startswith(_JOINED):
        return files.sha256(path) != expected
    with path.open("rb", buffering=0) as stream:
        ranges = [HashedRange(size, sha256_of(stream, size)) for size, _ in hashed_ranges(manifest)]
        # Bytes after the last range are damage too.
        return bool(stream.read(1)) or joined_sha256(ranges) != expected


def sha256_of(stream: IO[bytes], size: int) -> str:
    """Hash the next `size` bytes of a stream, or fewer at its end."""
    digest = hashlib.sha256()
    while size and (block := stream.read(min(size, _BLOCK))):
        digest.update(block)
        size -= len(block)
    return digest.hexdigest()


def find_fault(prefix: Path) -> str | None:
    """Return the first fault of a finished dataset, or None if it is intact.

    It always compares sizes. It hashes only files that changed after the manifest was written, so
    that a check of many datasets is cheap.
    """
    try:
        written = manifest_path(prefix).stat().st_mtime_ns
        manifest = read_manifest(prefix)
        paths = {name: file_path(prefix, name) for name in manifest["bytes"]}
        stats = {name: path.stat() for name, path in paths.items()}
    except FileNotFoundError as error:
        return f"{error.filename} is missing"
    except UserError as error:
        return str(error).partition(";")[0]
    for name, stat in stats.items():
        path, size = paths[name], manifest["bytes"][name]
        if stat.st_size != size:
            return f"{path} has {stat.st_size} bytes, its manifest says {size}"
        if stat.st_mtime_ns > written and differs_from_manifest(prefix, manifest, name=name):
            return f"{path} differs from the hash in its manifest"
    return None
