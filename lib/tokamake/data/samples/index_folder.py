"""The index folder on disk: index.json, which describes it, and a folder of arrays for each set.

`index` writes it; the loader, `resolve` and `train` read it.
"""

from pathlib import Path
from typing import Any

from tokamake import files
from tokamake.data.indexed.manifest import differs_from_manifest
from tokamake.data.indexed.merge_inputs import find_manifest
from tokamake.data.indexed.paths import bin_path, idx_path
from tokamake.errors import UserError

VERSION = 2
REMEDY = "run `tokamake index` again, or its rule in the workflow"


def read_index(folder: Path) -> dict[str, Any]:
    """Read an index folder's index.json, as `index` describes it.

    Raises:
        UserError: it is missing, of another version or was changed since.
    """
    path = folder / "index.json"
    described = files.read_json(path, REMEDY)
    if not isinstance(described, dict) or described.get("version") != VERSION:
        raise UserError(f"{path}: not an index of version {VERSION}; {REMEDY}")
    rest = {key: value for key, value in described.items() if key != "digest"}
    if files.digest(rest) != described.get("digest"):
        raise UserError(f"{path}: does not match its own digest; {REMEDY}")
    return described


def is_whole(folder: Path, request: str) -> bool:
    """Whether a folder holds, in full size, what a request with this digest asks for."""
    try:
        described = read_index(folder)
    except UserError:
        return False
    sizes = described["bytes"].items()
    paths = {folder / name: size for name, size in sizes}
    return described["request"] == request and all(
        path.is_file() and path.stat().st_size == size for path, size in paths.items()
    )


def made_sets(folder: Path) -> list[str]:
    """Sets that a folder holds from whatever time, with its description or without."""
    return [path.parent.name for path in folder.glob("*/dataset_index.npy")]


def sizes(folder: Path) -> dict[str, int]:
    """Bytes of all files below a folder, by their paths in it, sorted."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}


def identity(data_root: Path, prefix: str, *, thorough: bool = False) -> dict[str, Any]:
    """What tells a pair from another: sizes in bytes and hashes.

    The hashes come from the pair's manifest; without one, the .idx file is hashed. `thorough`
    hashes what else decides the samples: with a manifest the .idx file, which must be the one it
    vouches for, without one the .bin file.

    Raises:
        UserError: a file of the pair is missing or another than its manifest says, or the manifest
            is broken.
    """
    pair = data_root / prefix
    found: dict[str, Any] = {"bytes": {}, "sha256": {}}
    for kind, path in (("bin", bin_path(pair)), ("idx", idx_path(pair))):
        try:
            found["bytes"][kind] = path.stat().st_size
        except OSError:
            raise UserError(
                f"{path}: no such file; check the prefix, and the data root {data_root}"
            ) from None
    stated = find_manifest(pair)
    if stated is None:
        found["sha256"]["idx"] = files.sha256(idx_path(pair))
        return found | ({"content": files.sha256(bin_path(pair))} if thorough else {})
    if any(stated["bytes"][kind] != size for kind, size in found["bytes"].items()) or (
        thorough and differs_from_manifest(pair, stated, "idx")
    ):
        raise UserError(f"{pair}: its files are others than its manifest says; make the pair again")
    return found | {"sha256": stated["sha256"]}


def is_pair(described: dict[str, Any], found: dict[str, Any]) -> bool:
    """Whether a pair's identity is the one in an index, as far as it was looked at."""
    return all(described.get(key) == value for key, value in found.items())
