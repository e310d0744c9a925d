"""A .bin/.idx pair on disk and the manifest that vouches for it.

`tokenize` and `merge` write pairs with a manifest last; the workflow asks here which are broken.
No numpy: this runs for every pair each time the workflow is read.
"""

from pathlib import Path
from typing import Any

from tokamake import files
from tokamake.errors import UserError


def bin_path(prefix: Path) -> Path:
    """Path of a pair's token file (a prefix may contain dots, so no `with_suffix`)."""
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    """Path of a pair's index file."""
    return prefix.with_name(prefix.name + ".idx")


def manifest_path(prefix: Path) -> Path:
    """Path of a pair's manifest, written last: where it stands, the pair is whole."""
    return prefix.with_name(prefix.name + ".json")


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
    """Write a manifest with a digest of itself, so that a damaged one is known."""
    files.write_json(path, {**manifest, "digest": files.digest(manifest)})


def hashes(bin_file: Path, idx_file: Path) -> dict[str, dict[str, Any]]:
    """Sizes and hashes of a pair, as its manifest states them."""
    return {
        "bytes": {"bin": bin_file.stat().st_size, "idx": idx_file.stat().st_size},
        "sha256": {"bin": files.sha256(bin_file), "idx": files.sha256(idx_file)},
    }


def broken(prefix: Path) -> str | None:
    """Say what is wrong with a finished pair, or None if it is whole.

    Sizes are always compared; a file that changed after the manifest was written is hashed, so
    that asking costs little.
    """
    try:
        written = manifest_path(prefix).stat().st_mtime_ns
        stats = {"bin": bin_path(prefix).stat(), "idx": idx_path(prefix).stat()}
        stated = read_manifest(prefix)
    except FileNotFoundError as error:
        return f"{error.filename} is missing"
    except UserError as error:
        return str(error).partition(";")[0]
    for suffix, stat in stats.items():
        path = prefix.with_name(f"{prefix.name}.{suffix}")
        if stat.st_size != stated["bytes"][suffix]:
            return f"{path} has {stat.st_size} bytes, its manifest says {stated['bytes'][suffix]}"
        if stat.st_mtime_ns > written and files.sha256(path) != stated["sha256"][suffix]:
            return f"{path} differs from the hash in its manifest"
    return None
