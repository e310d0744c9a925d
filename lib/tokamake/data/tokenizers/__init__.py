"""Tokenizers, one file per kind, told apart by the files that a path holds.

A kind's module has `files(path)`, the tokenizer's files there or an empty list, and `load(files)`.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tokamake import plugins
from tokamake.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """A loaded tokenizer."""

    vocab_size: int
    """Highest token id + 1, added tokens included."""
    eod: int
    """Token that ends a document."""
    encode_batch: Callable[[list[str]], list[list[int]]]
    """Texts to token ids, without any special token of its own."""
    decode: Callable[[list[int]], str]
    """Token ids to text, special tokens included."""
    fingerprint: str = field(default="")
    """sha256 over the tokenizer's files."""


def tokenizer_files(path: Path) -> tuple[str, list[Path]]:
    """Find the kind of a tokenizer and its files.

    Raises:
        UserError: the path is missing or holds no known tokenizer.
    """
    if not path.exists():
        raise UserError(f"tokenizer {path}: no such file or folder; fix tokenizer.path")
    kinds = plugins.names("data/tokenizers")
    found = {kind: plugins.load("data/tokenizers", kind).files(path) for kind in kinds}
    found = {kind: paths for kind, paths in found.items() if paths}
    if not found:
        raise UserError(
            f"tokenizer {path}: holds no tokenizer.json, vocab.json with merges.txt, *.model or "
            "vocab.txt; fix tokenizer.path"
        )
    # tokenizer.json is the whole tokenizer; older files beside it know less of added tokens.
    kind = "huggingface" if "huggingface" in found else next(iter(found))
    if len(found) > 1 and kind != "huggingface":
        names = " or ".join(paths[0].name for paths in found.values())
        raise UserError(f"tokenizer {path}: holds several tokenizers; name the file, {names}")
    return kind, found[kind]


def open_tokenizer(path: Path) -> Tokenizer:
    """Load the tokenizer that a file or folder holds.

    Raises:
        UserError: nothing is there, it is damaged, or it names no end-of-document token.
    """
    kind, found = tokenizer_files(path)
    try:
        loaded: Tokenizer = plugins.load("data/tokenizers", kind).load(found)
    except UserError:
        raise
    except Exception as error:  # the tokenizers package raises bare Exception
        raise UserError(f"tokenizer {path}: cannot be loaded ({error}); fetch it again") from None
    return Tokenizer(**{**vars(loaded), "fingerprint": _fingerprint(found)})


def _fingerprint(found: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in found:
        digest.update(f"{path.name} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def _in_folder(path: Path, *names: str) -> list[Path]:
    """All of `names` in a folder (or beside the first of them), or nothing."""
    folder = path if path.is_dir() else path.parent
    if not path.is_dir() and path.name != names[0]:
        return []
    found = [folder / name for name in names]
    return found if all(file.is_file() for file in found) else []
