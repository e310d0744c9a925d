"""A .bin/.idx pair on disk and the manifest that vouches for it.

`tokenize` and `merge` write pairs with a manifest last; the workflow asks here which are broken.
No numpy: this runs for every pair each time the workflow is read.
"""

import hashlib
from pathlib import Path
from typing import IO, Any, NamedTuple

from tokamake import files
from tokamake.data.indexed.paths import file_path, manifest_path
from tokamake.errors import UserError

_JOINED = "parts:"
_BLOCK = 1 << 20


class HashedRange(NamedTuple):
    """A run of bytes of a token file: what one of a merged pair's parts gave."""

    size: int
    """Its bytes."""
    sha256: str
    """Their hash."""


def raw_inputs(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Raw files of a pair, in the order in which its map of sources counts them.

    Those of a merged pair are those of its parts, one after the other, merged themselves or not.
    """
    if "inputs" in manifest:
        return manifest["inputs"]
    return [source for part in manifest["sources"] for source in part["inputs"]]


def read_manifest(prefix: Path) -> dict[str, Any]:
    """Read a pair's manifest.

    Raises:
        UserError: it is missing or not a manifest.
    """
    path = manifest_path(prefix)
    manifest = files.read_json(path, "make the pair again")
    if not isinstance(manifest, dict) or "sha256" not in manifest:
        raise UserError(f"{path}: not the manifest of a pair; make the pair again")
    if manifest.pop("digest", None) != files.digest(manifest):
        raise UserError(f"{path}: changed since it was written; make the pair again")
    return manifest


def write_manifest(path: Path, manifest: dict[str, Any]) -> None:
    """Write a manifest with a digest of itself, so that a damaged one is known.

    Args:
        path: temporary file, which `files.atomic` will bring to its place.
        manifest: what is known of the pair.
    """
    signed = {**manifest, "digest": files.digest(manifest)}
    # Names of raw files need not be UTF-8.
    path.write_bytes(files.to_json(signed).encode("utf-8", "surrogateescape"))


def sizes_and_hashes(*paths: Path, bin_sha256: str = "") -> dict[str, dict[str, Any]]:
    """Sizes and hashes of a pair's files, as its manifest states them.

    Args:
        paths: the token file, the index, the map of sources and the quarantine, as far as there
            are any.
        bin_sha256: hash of the token file where it is known already.
    """
    named = dict(zip(("bin", "idx", "sources", "quarantine.jsonl"), paths, strict=False))
    known = {"bin": bin_sha256} if bin_sha256 else {}
    return {
        "bytes": {name: path.stat().st_size for name, path in named.items()},
        "sha256": {name: known.get(name) or files.sha256(path) for name, path in named.items()},
    }


def hashed_ranges(manifest: dict[str, Any]) -> list[HashedRange]:
    """Pieces whose hashes prove a pair's token file: those of its parts, or the whole file."""
    whole = [[manifest["bytes"]["bin"], manifest["sha256"]["bin"]]]
    return [HashedRange(*piece) for piece in manifest.get("parts", whole)]


def joined_sha256(parts: list[HashedRange]) -> str:
    """Proof of a token file made of parts: `parts:` and a digest of their sizes and hashes.

    A chain of SHA-256 over the merged file could not use more than one core, nor what is known of
    its parts. A single part's proof is the hash of the file.
    """
    if len(parts) == 1:
        return parts[0].sha256
    return _JOINED + files.digest([list(part) for part in parts])


def differs_from_manifest(prefix: Path, manifest: dict[str, Any], name: str) -> bool:
    """Hash a file of a pair and tell whether it is another than its manifest says."""
    path, stated = file_path(prefix, name), manifest["sha256"][name]
    if not stated.startswith(_JOINED):
        return files.sha256(path) != stated
    with path.open("rb", buffering=0) as stream:
        found = [HashedRange(size, _sha256(stream, size)) for size, _ in hashed_ranges(manifest)]
        return bool(stream.read(1)) or joined_sha256(found) != stated


def _sha256(stream: IO[bytes], size: int) -> str:
    """Hash of the next bytes of a stream."""
    digest = hashlib.sha256()
    while size and (block := stream.read(min(size, _BLOCK))):
        digest.update(block)
        size -= len(block)
    return digest.hexdigest()


def find_fault(prefix: Path) -> str | None:
    """Say what is wrong with a finished pair, or None if it is whole.

    Sizes are always compared; a file that changed after the manifest was written is hashed, so
    that asking costs little.
    """
    try:
        written = manifest_path(prefix).stat().st_mtime_ns
        stated = read_manifest(prefix)
        paths = {name: file_path(prefix, name) for name in stated["bytes"]}
        stats = {name: path.stat() for name, path in paths.items()}
    except FileNotFoundError as error:
        return f"{error.filename} is missing"
    except UserError as error:
        return str(error).partition(";")[0]
    for name, stat in stats.items():
        path, size = paths[name], stated["bytes"][name]
        if stat.st_size != size:
            return f"{path} has {stat.st_size} bytes, its manifest says {size}"
        if stat.st_mtime_ns > written and differs_from_manifest(prefix, stated, name):
            return f"{path} differs from the hash in its manifest"
    return None
