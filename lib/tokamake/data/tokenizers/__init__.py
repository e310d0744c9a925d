"""Tokenizers, one file per kind, told apart by the files that a path holds.

A kind's module has `files(path)`, the tokenizer's files there or an empty list, and `load(files)`.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tokamake import plugins
from tokamake.errors import UserError
from tokamake.files import read_json

if TYPE_CHECKING:
    from tokamake.data.tokenizers._word_rules import WordRules

CONFIGS = ("tokenizer_config.json", "special_tokens_map.json")
"""Files beside a Hugging Face tokenizer that name its special tokens."""


class EncodeBatch(Protocol):
    """Texts to token ids, without any special token of its own."""

    def __call__(self, texts: list[str], /, *, workers: int = 1) -> list[list[int]]:
        """Encode on `workers` threads where the package has its threads from us.

        `tokenizers` takes their number from RAYON_NUM_THREADS, once.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """A loaded tokenizer."""

    vocab_size: int
    """Highest token id + 1, added tokens included."""
    eod: int
    """Token that ends a document."""
    bos: int | None = None
    """Token that begins a document, where one is asked for; None: the tokenizer has none."""
    encode_batch: EncodeBatch
    """Texts to token ids by the tokenizer's own package."""
    decode: Callable[[list[int]], str]
    """Token ids to text, special tokens included."""
    package: str = ""
    """The package that encodes: tokenizers or sentencepiece."""
    word_rules: Callable[[], "WordRules | None"] = lambda: None
    """How to split texts into words that have the same tokens alone; None: none do."""
    definition: Callable[[], bytes] = bytes
    """The text of tokenizer.json, or the SentencePiece model: all that decides the tokens."""
    fingerprint: str = ""
    """sha256 over the tokenizer's files."""


def tokenizer_files(path: Path) -> tuple[str, list[Path]]:
    """Find the kind of a tokenizer and its files.

    Raises:
        UserError: the path is missing or holds no known tokenizer.
    """
    if not path.exists():
        raise UserError(f"tokenizer {path}: no such file or folder; fix the path")
    kinds = plugins.names("data/tokenizers")
    found = {kind: plugins.load("data/tokenizers", kind).files(path) for kind in kinds}
    found = {kind: paths for kind, paths in found.items() if paths}
    if not found:
        raise UserError(
            f"tokenizer {path}: holds no tokenizer.json, vocab.json with merges.txt, *.model or "
            "vocab.txt; fix the path"
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
    except BaseException as error:  # the tokenizers package raises bare Exception, or panics
        raise UserError(
            f"tokenizer {path}: cannot be loaded ({failure(error)}); fetch it again"
        ) from None
    return replace(loaded, fingerprint=_fingerprint(found))


def failure(error: BaseException) -> str:
    """What went wrong in a package written in Rust, whose panics are no `Exception`, in one line.

    Raises:
        BaseException: `error`, if the package is not to blame for it.
    """
    panicked = type(error).__name__ == "PanicException"
    if not (panicked or isinstance(error, Exception)) or isinstance(error, MemoryError):
        raise error
    return " ".join(str(error).split())


def _fingerprint(found: list[Path]) -> str:
    digest = hashlib.sha256()
    for path in found:
        digest.update(f"{path.name} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def in_folder(path: Path, *names: str) -> list[Path]:
    """All of `names` in a folder (or beside the first of them), or nothing."""
    folder = path if path.is_dir() else path.parent
    if not path.is_dir() and path.name != names[0]:
        return []
    found = [folder / name for name in names]
    return found if all(file.is_file() for file in found) else []


def with_configs(found: list[Path]) -> list[Path]:
    """A tokenizer's files and the config files beside the first of them."""
    return found + [
        path for name in CONFIGS if found and (path := found[0].parent / name).is_file()
    ]


def setting(found: list[Path], key: str) -> Any:
    """Value of a key in the config files among a tokenizer's files; None where none states it."""
    for path in found:
        if path.name in CONFIGS:
            settings = read_json(path, "fetch the tokenizer again")
            if not isinstance(settings, dict):
                raise UserError(f"{path}: not a JSON object; fetch the tokenizer again")
            if settings.get(key) is not None:
                return settings[key]
    return None


def special_token(found: list[Path], key: str) -> str:
    """Text of a special token, as eos_token, by the config files; empty where none states it."""
    value = setting(found, key)
    return str(value["content"] if isinstance(value, dict) else value or "")
