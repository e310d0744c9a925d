"""Products of retrieval: data files beside a manifest, `NAME.json`, which is written last.

The manifest states sizes and hashes of the data files, `NAME.<suffix>`, and what made them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tokamake import files
from tokamake.errors import UserError

_VERSION = 1


class Product(NamedTuple):
    """A product that is being written."""

    paths: dict[str, Path]
    """Suffix of each data file, such as `.npy`: the temporary path to write."""
    facts: dict[str, Any]
    """Further keys of the manifest; may be filled while data files are written."""


@contextmanager
def new_product(
    manifest: Path, *, kind: str, suffixes: tuple[str, ...], facts: dict[str, Any]
) -> Iterator[Product]:
    """Yield paths of data files to write; then write the manifest. On an error, keep nothing."""
    check_name(manifest)
    paths = [data_path(manifest, suffix) for suffix in suffixes]
    with files.atomic(*paths, manifest) as (*temporary, last):
        product = Product(dict(zip(suffixes, temporary, strict=True)), {**facts})
        yield product
        content = {
            "kind": kind,
            "version": _VERSION,
            **product.facts,
            "bytes": {suffix: path.stat().st_size for suffix, path in product.paths.items()},
            "hashes": {suffix: files.sha256(path) for suffix, path in product.paths.items()},
        }
        last.write_text(files.to_sealed_json(content), encoding="utf-8")


def check_name(manifest: Path) -> None:
    """Refuse a name of a manifest that does not end with .json: data files lie beside it."""
    if manifest.suffix != ".json" or files.is_stream(manifest):
        raise UserError(f"{manifest}: does not end with .json; name the file of the manifest so")


def check_outside(manifest: Path, *folders: Path | None) -> None:
    """Refuse a product inside a folder of embeddings that its stage reads."""
    for folder in filter(None, folders):
        if folder.is_dir() and manifest.parent.resolve() == folder.resolve():
            raise UserError(
                f"--output: {manifest} lies in {folder}, which has only embeddings; name a file in "
                "another folder"
            )


def check_not_negative(options: dict[str, int]) -> None:
    """Refuse negative values of options, by their names."""
    for option, value in options.items():
        if value < 0:
            raise UserError(
                f"{option}: {value} is negative; give a positive number, or leave it out"
            )


def data_path(manifest: Path, suffix: str) -> Path:
    return manifest.with_name(manifest.name.removesuffix(".json") + suffix)


def read_product(manifest: Path, kind: str, *, remedy: str, verify: bool = False) -> dict[str, Any]:
    """Read a manifest, and compare sizes of its data files; `verify`: also their hashes."""
    facts = files.read_sealed_json(manifest, remedy)
    if facts.get("kind") != kind:
        raise UserError(f"{manifest}: not the manifest of {kind}; {remedy}")
    if facts.get("version") != _VERSION:
        raise UserError(f"{manifest}: not of version {_VERSION}; {remedy}")
    for suffix, size in facts["bytes"].items():
        path = data_path(manifest, suffix)
        found = path.stat().st_size if path.is_file() else None
        if found is None:
            raise UserError(f"{path}: no such file, but {manifest.name} names it; {remedy}")
        if found != size:
            raise UserError(f"{path}: {found} bytes, its manifest says {size}; {remedy}")
        if verify and files.sha256(path) != facts["hashes"][suffix]:
            raise UserError(f"{path}: differs from the hash in its manifest; {remedy}")
    return facts


def is_complete(manifest: Path, kind: str, *, request: str) -> bool:
    """Whether a product exists whole, and was made from the inputs with the digest `request`."""
    try:
        return bool(read_product(manifest, kind, remedy="").get("request") == request)
    except UserError:
        return False
