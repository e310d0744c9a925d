"""Tokenizers, one module per kind. The files that a path holds decide the kind.

A kind's module defines `files(path)`, which returns the tokenizer's files at the path or an empty
list, and `load(paths)`.
"""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from tokamake import plugins
from tokamake.errors import UserError
from tokamake.files import read_json

CONFIGS = ("tokenizer_config.json", "special_tokens_map.json")
"""Files beside a tokenizer that name its special tokens."""
ADDED_TOKENS = "added_tokens.json"
"""File beside a tokenizer with ids of tokens that its vocabulary lacks."""
_DECODER_KEY = "added_tokens_decoder"
"""Key of tokenizer_config.json: added tokens by their ids."""
_MAX_BYTES = 256 << 20
"""Size of a file of a tokenizer. The largest ones known have 35 MB."""
_MAX_TEMPLATE_BYTES = 1 << 20
_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token")
BASE_KEY = "extends_tokenizer"
"""Key of tokenizer_config.json: fingerprint of the tokenizer that this one extends."""
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
    definition: Callable[[], bytes] = bytes
    """Text of tokenizer.json, or the SentencePiece model. It determines the tokens."""
    fingerprint: str = ""
    """sha256 of the tokenizer's files."""
    base: str = ""
    """Fingerprint of the tokenizer that this one extends by further tokens; empty: none."""
    chat_template: str = ""
    """Jinja template that turns messages into a prompt; empty if there is none."""
    special_texts: Mapping[str, str] = field(default_factory=dict)
    """Texts of special tokens by their names in the config files, such as bos_token."""
    read_special_tokens_as_text: Callable[[], None] = lambda: None
    """Make `encode_batch` and `definition` take special tokens in texts as plain text from now on,
    as split_special_tokens in transformers does. sentencepiece always does."""

    def encode_prompt(self, text: str) -> list[int]:
        """Encode a text to continue, as transformers does: `bos` comes first where it adds it."""
        tokens = self.encode_batch([text])[0]
        if not self.adds_bos or self.bos is None or tokens[:1] == [self.bos]:
            return tokens
        return [self.bos, *tokens]


def tokenizer_files(path: Path) -> tuple[str, list[Path]]:
    """Return the kind of a tokenizer and its files."""
    if not path.exists():
        raise UserError(f"tokenizer {path}: no such file or folder; fix the path")
    candidates = {}
    # tokenizer.json comes first, because it is complete. Older files beside it may lack tokens.
    for kind in sorted(plugins.names("data/tokenizers"), key=lambda kind: kind != "huggingface"):
        if paths := plugins.load("data/tokenizers", kind).files(path):
            candidates[kind] = paths
            if kind == "huggingface":
                break
    if not candidates:
        raise UserError(
            f"tokenizer {path}: holds no tokenizer.json, vocab.json with merges.txt, *.model or "
            "vocab.txt (NAME-vocab.json with NAME-merges.txt and NAME-vocab.txt are known, too); "
            "fix the path"
        )
    refuse_several(path, [paths[0] for paths in candidates.values()])
    (found,) = candidates.items()
    return found


def refuse_several(path: Path, files: list[Path]) -> None:
    """Raise UserError if there are several files at a path that each are a tokenizer."""
    if len(files) > 1:
        names = " or ".join(file.name for file in files)
        raise UserError(f"tokenizer {path}: holds several tokenizers; name the file, {names}")


def open_tokenizer(path: Path) -> Tokenizer:
    """Load the tokenizer in a file or folder."""
    kind, paths = tokenizer_files(path)
    try:
        tokenizer: Tokenizer = plugins.load("data/tokenizers", kind).load(paths)
    except UserError:
        raise
    except BaseException as error:  # the tokenizers package raises bare Exception, or panics
        raise UserError(
            f"tokenizer {path}: cannot be loaded ({failure(error)}); fetch it again"
        ) from None
    named = settings(paths)
    return replace(
        tokenizer,
        fingerprint=fingerprint(paths),
        base=str(named.get(BASE_KEY) or ""),
        chat_template=_chat_template(paths[0].parent, named.get("chat_template")),
        special_texts={key: special_token(named, key) for key in _SPECIAL},
    )


def _chat_template(folder: Path, stated: Any) -> str:
    """The default chat template of a tokenizer; empty if there is none."""
    if (path := folder / "chat_template.jinja").is_file():
        if path.stat().st_size > _MAX_TEMPLATE_BYTES:
            raise UserError(f"{path}: more than {_MAX_TEMPLATE_BYTES:,} bytes; fetch it again")
        return path.read_text(encoding="utf-8")
    if isinstance(stated, list):  # several, each with a name
        stated = {each.get("name"): each.get("template") for each in stated}.get("default")
    return stated if isinstance(stated, str) else ""


def failure(error: BaseException) -> str:
    """Return the message of an error from a package written in Rust, in one line.

    Any other BaseException is raised again. A panic in Rust raises a `PanicException`, which is not
    an `Exception`.
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
    """Return the files `names` in a folder (or beside the first file), or [] if any is missing.

    All may begin with one more name, such as gpt2-vocab.json and gpt2-merges.txt.
    """
    first = names[0]
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.name.endswith(first))
    found = [
        [file.with_name(start + name) for name in names]
        for file in files
        if not (start := file.name.removesuffix(first)) or start.endswith("-")
    ]
    found = [paths for paths in found if all(file.is_file() for file in paths)]
    refuse_several(path, [paths[0] for paths in found])
    return found[0] if found else []


def with_configs(paths: list[Path]) -> list[Path]:
    """Return a tokenizer's files and the files in the same folder that add tokens or name some."""
    if not paths:
        return []
    others = (paths[0].parent / name for name in (*CONFIGS, ADDED_TOKENS))
    found = [*paths, *(path for path in others if path.is_file())]
    for path in found:
        if (size := path.stat().st_size) > _MAX_BYTES:
            raise UserError(
                f"tokenizer {path}: {size:,} bytes, more than {_MAX_BYTES:,}; fetch it again"
            )
    ignored = ADDED_TOKENS if _DECODER_KEY in settings(found) else ""  # as in transformers
    return [path for path in found if path.name != ignored]


def settings(paths: list[Path]) -> dict[str, Any]:
    """Return the content of the config files among a tokenizer's files.

    As in transformers, special_tokens_map.json counts more than tokenizer_config.json, unless
    that has added_tokens_decoder.
    """
    config, special = (
        _json_object(paths[0].parent / name) if paths[0].parent / name in paths else {}
        for name in CONFIGS
    )
    return special | config if _DECODER_KEY in config else config | special


def _json_object(path: Path) -> dict[str, Any]:
    content = read_json(path, "fetch the tokenizer again")
    if not isinstance(content, dict):
        raise UserError(f"{path}: not a JSON object; fetch the tokenizer again")
    return content


def special_token(named: Mapping[str, Any], *keys: str) -> str:
    """Return the text of the first special token (e.g. eos_token) that has a name, or empty."""
    return next(filter(None, (token_text(named.get(key)) for key in keys)), "")


def token_text(value: Any) -> str:
    """Text of a special token in a config file, which is a string or an object; empty: neither."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else ""
