"""Local copies of tokenizers and checkpoints that configs and commands name by addresses."""

import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from tokamake.errors import UserError
from tokamake.files import digest, write_link
from tokamake.remote import https
from tokamake.remote.download import download
from tokamake.remote.hub_models import fetched_path, pin, unfetched
from tokamake.remote.remote_file import FOLDER, is_remote

_CONFIGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
"""Files that may lie beside a tokenizer, unless its name says that others share its folder."""
_CHECKPOINTS = ("checkpoint", "source", "path")
"""Arguments of commands that are checkpoints."""


def local_copy(address: str, *, tokenizer_only: bool, online: bool = True) -> Path:
    """Return the path of a tokenizer or model, without weights that jobs bring.

    Args:
        address: hf://ORG/NAME, or the https address of a tokenizer's file.
        tokenizer_only: bring no config of a model.
        online: download what is missing.

    Raises:
        UserError: files are missing or cannot be downloaded, or it is no model of the Hub.
    """
    if address.startswith("hf://"):
        return (pin if online else fetched_path)(address, tokenizer_only=tokenizer_only)
    if not tokenizer_only:
        raise UserError(f"{address}: no model of the Hub; write hf://ORG/NAME, or download it")
    path = _tokenizer_path(address)
    if not path.exists():
        if not online:
            raise UserError(
                f"{address}: not fetched yet; run `tokamake fetch --tokenizer {address}` on a node "
                "with a network"
            )
        fetch_tokenizer(address)
    return path


def fetch_tokenizer(address: str) -> list[Path]:
    """Download a tokenizer at an https address; merges or configs beside it come with it.

    Returns:
        Links to its files, in one folder.

    Raises:
        UserError: it cannot be downloaded.
    """
    path, links = _tokenizer_path(address), []
    parts = urlsplit(address)
    beside = dict.fromkeys(_CONFIGS, False) if "-" not in path.name else {}
    if path.name.endswith("vocab.json"):
        beside[f"{path.name.removesuffix('vocab.json')}merges.txt"] = True
    for name, is_needed in {path.name: True, **beside}.items():
        folder = parts.path.rpartition("/")[0]
        own = parts._replace(path=f"{folder}/{quote(name)}").geturl()
        try:
            file = https.list_file(address if name == path.name else own)
        except https.AbsentError:
            if is_needed:
                raise
            continue
        cached = https.download(file).absolute()
        link = path.with_name(name)
        if not (link.is_symlink() and link.readlink() == cached):
            write_link(link, cached)
        links.append(link)
    return links


def _tokenizer_path(address: str) -> Path:
    place, name = https.place(address)
    return Path(FOLDER, "tokenizers", place, digest(address)[:12], name)


def replace_addresses(arguments: dict[str, Any]) -> None:
    """Replace addresses among the arguments of a command by local copies, with weights.

    Raises:
        UserError: an argument takes no address, or nothing can be downloaded.
    """
    for name, value in arguments.items():
        for each in value if isinstance(value, list | tuple) else [value]:
            text = str(each).replace(":/", "://", 1)  # a Path has one slash
            if isinstance(each, Path) and is_remote(text):
                if name not in ("tokenizer", *_CHECKPOINTS):
                    raise UserError(
                        f"{name}: {text}: takes no address; run `tokamake fetch {text}`"
                    )
                arguments[name] = bring(text, tokenizer_only=name == "tokenizer")


def bring(address: str, *, tokenizer_only: bool = False) -> Path:
    """Return the path of a tokenizer, or of a model with its weights; download what is missing.

    Raises:
        UserError: as `local_copy`.
    """
    path = local_copy(address, tokenizer_only=tokenizer_only)
    for file in [] if tokenizer_only else unfetched(path):
        download(file)
        print(f"{file.path}: {file.size:,} bytes", file=sys.stderr, flush=True)
    return path
