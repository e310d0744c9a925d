"""Tokenizers, one module per kind. The files that a path holds decide the kind.

A kind's module defines `files(path)`, which returns the tokenizer's files at the path or an empty
list, and `load(paths)`.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tokamake import plugins
from tokamake.errors import UserError
from tokamake.files import read_json

if TYPE_CHECKING:
    from tokamake.data.tokenizers._word_rules import WordRules

CONFIGS = ("tokenizer_config.json", "special_tokens_map.json")
"""Files beside a Hugging Face tokenizer that name its special tokens."""
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")
BASE_KEY = "extends_tokenizer"
"""Key of tokenizer_config.json: fingerprint of the tokenizer that this one only adds tokens to."""
IDS_KEY = "text_is_token_ids"
"""Key of tokenizer_config.json: text is token ids separated by spaces."""


class BatchEncoder(Protocol):
    """Function that encodes texts to token ids and adds no special tokens."""

    def __call__(self, texts: list[str], /, *, workers: int = 1) -> list[list[int]]:
        """Encode texts on `workers` threads.

        `tokenizers` ignores `workers`: it reads RAYON_NUM_THREADS once, at first use.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """A loaded tokenizer."""

    vocab_size: int
    """Highest token id + 1, including added tokens."""
    eod: int
    """End-of-document token."""
    bos: int | None = None
    """Token that can begin a document; None if the tokenizer has none."""
    adds_bos: bool = False
    """Whether transformers begins each text with `bos`."""
    special_tokens: frozenset[int] = frozenset()
    """Tokens that transformers can leave out of texts."""
    encode_batch: BatchEncoder
    """Texts to token ids, by the tokenizer's own package."""
    decode: Callable[[list[int]], str]
    """Token ids to text, including special tokens."""
    has_text: bool = True
    """False: text is token ids separated by spaces, whose bytes say nothing about the data."""
    package: str = ""
    """The tokenizer's own package: tokenizers or sentencepiece."""
    word_rules: Callable[[], "WordRules | None"] = lambda: None
    """Rules to split texts into words that can be encoded alone; None if there are none."""
    definition: Callable[[], bytes] = bytes
    """Text of tokenizer.json, or the SentencePiece model. It determines the tokens."""
    fingerprint: str = ""
    """sha256 of the tokenizer's files."""
    base: str = ""
    """Fingerprint of the tokenizer that this one extends by tokens after all others; empty: none.
    """
    chat_template: str = ""
    """Jinja template that turns messages into a prompt; empty if there is none."""
    special_texts: Mapping[str, str] = field(default_factory=dict)
    """Texts of special tokens by their names in the config files, such as bos_token."""

    def encode_prompt(self, text: str) -> list[int]:
        """Encode a text to continue, as transformers does: `bos` comes first where it adds it."""
        tokens = self.encode_batch([text])[0]
        if not self.adds_bos or self.bos is None or tokens[:1] == [self.bos]:
            return tokens
        return [self.bos, *tokens]


def tokenizer_files(path: Path) -> tuple[str, list[Path]]:
    """Return the kind of a tokenizer and its files.

    Raises:
        UserError: the path does not exist, or holds no known tokenizer.
    """
    if not path.exists():
        raise UserError(f"tokenizer {path}: no such file or folder; fix the path")
    kinds = plugins.names("data/tokenizers")
    candidates = {kind: plugins.load("data/tokenizers", kind).files(path) for kind in kinds}
    candidates = {kind: paths for kind, paths in candidates.items() if paths}
    if not candidates:
        raise UserError(
            f"tokenizer {path}: holds no tokenizer.json, vocab.json with merges.txt, *.model or "
            "vocab.txt; fix the path"
        )
    # tokenizer.json is complete. Older files beside it may lack added tokens.
    kind = "huggingface" if "huggingface" in candidates else next(iter(candidates))
    if len(candidates) > 1 and kind != "huggingface":
        names = " or ".join(paths[0].name for paths in candidates.values())
        raise UserError(f"tokenizer {path}: holds several tokenizers; name the file, {names}")
    return kind, candidates[kind]


def open_tokenizer(path: Path) -> Tokenizer:
    """Load the tokenizer in a file or folder.

    Raises:
        UserError: the tokenizer is missing or damaged, or has no end-of-document token.
    """
    kind, paths = tokenizer_files(path)
    try:
        tokenizer: Tokenizer = plugins.load("data/tokenizers", kind).load(paths)
    except UserError:
        raise
    except BaseException as error:  # the tokenizers package raises bare Exception, or panics
        raise UserError(
            f"tokenizer {path}: cannot be loaded ({failure(error)}); fetch it again"
        ) from None
    return replace(
        tokenizer,
        fingerprint=fingerprint(paths),
        base=str(setting(paths, BASE_KEY) or ""),
        chat_template=_chat_template(paths),
        special_texts={key: special_token(paths, key) for key in _SPECIAL},
    )


def _chat_template(paths: list[Path]) -> str:
    """The default chat template beside a tokenizer; empty if there is none."""
    if (path := paths[0].parent / "chat_template.jinja").is_file():
        return path.read_text(encoding="utf-8")
    found = setting(paths, "chat_template")
    if isinstance(found, list):  # several, each with a name
        found = {each.get("name"): each.get("template") for each in found}.get("default")
    return found if isinstance(found, str) else ""


def failure(error: BaseException) -> str:
    """Return the message of an error from a package written in Rust, in one line.

    Raises:
        BaseException: `error` itself, unless it comes from the package. A panic in Rust raises
            a `PanicException`, which is not an `Exception`.
    """
    is_panic = type(error).__name__ == "PanicException"
    if not (is_panic or isinstance(error, Exception)) or isinstance(error, MemoryError):
        raise error
    return " ".join(str(error).split())


def fingerprint(paths: list[Path]) -> str:
    """Hash of a tokenizer's files and their names, as manifests state it."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.name} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def in_folder(path: Path, *names: str) -> list[Path]:
    """Return the files `names` in a folder (or beside the first file), or [] if any is missing."""
    folder = path if path.is_dir() else path.parent
    if not path.is_dir() and path.name != names[0]:
        return []
    paths = [folder / name for name in names]
    return paths if all(file.is_file() for file in paths) else []


def with_configs(paths: list[Path]) -> list[Path]:
    """Return a tokenizer's files and the config files in the same folder."""
    return paths + [
        path for name in CONFIGS if paths and (path := paths[0].parent / name).is_file()
    ]


def setting(paths: list[Path], key: str) -> Any:
    """Return the value of a key in the config files among a tokenizer's files, or None."""
    for path in paths:
        if path.name in CONFIGS:
            settings = read_json(path, "fetch the tokenizer again")
            if not isinstance(settings, dict):
                raise UserError(f"{path}: not a JSON object; fetch the tokenizer again")
            if settings.get(key) is not None:
                return settings[key]
    return None


def special_token(paths: list[Path], key: str) -> str:
    """Return the text of a special token (e.g. eos_token) from the config files, or empty."""
    value = setting(paths, key)
    return str(value["content"] if isinstance(value, dict) else value or "")
