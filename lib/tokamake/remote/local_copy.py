"""Local copies of tokenizers and checkpoints that configs and commands name by addresses."""

import sys
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from tokamake.errors import UserError
from tokamake.files import digest
from tokamake.remote import https
from tokamake.remote.addresses import FOLDER, is_remote
from tokamake.remote.download import download
from tokamake.remote.hub_models import fetched_path, pin, unfetched

_CONFIGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
"""Files beside a tokenizer, unless its name says that other tokenizers share its folder."""


def local_copy(address: str, *, tokenizer_only: bool, online: bool = True) -> Path:
    """Return the path of a tokenizer or model, without weights that jobs bring.

    `online`: download missing files.
    """
    if address.startswith("hf://"):
        return (pin if online else fetched_path)(address, tokenizer_only=tokenizer_only)
    if not tokenizer_only:
        raise UserError(f"{address}: no model of the Hub; write hf://ORG/NAME, or download it")
    path = _tokenizer_path(address)
    if not (path.exists() or online):
        remedy = f"run `tokamake fetch --tokenizer {address}` on a node with a network"
        raise UserError(f"{address}: not fetched yet; {remedy}")
    return path if path.exists() else fetch_tokenizer(address)[0]


def fetch_tokenizer(address: str) -> list[Path]:
    """Download a tokenizer at an https address, with merges or configs beside it; return links."""
    path, links, url = _tokenizer_path(address), [], urlsplit(address)
    needs = {path.name: True, **dict.fromkeys(_CONFIGS if "-" not in path.name else (), False)}
    if path.name.endswith("vocab.json"):
        needs[f"{path.name.removesuffix('vocab.json')}merges.txt"] = True
    for name, is_needed in needs.items():
        beside = f"{url.path.rpartition('/')[0]}/{quote(name)}"
        try:
            file = https.list_file(url._replace(path=beside).geturl())
        except https.AbsentError:
            if is_needed:
                raise
            continue
        links.append(path.with_name(name))
        download(file, link=links[-1])
    return links


def _tokenizer_path(address: str) -> Path:
    place, name = https.place(address)
    return Path(FOLDER, "tokenizers", place, digest(address)[:12], name)


def bring(address: str, *, tokenizer_only: bool = False) -> Path:
    """Return the path of a tokenizer, or of a model with its weights; download missing files."""
    path = local_copy(address, tokenizer_only=tokenizer_only)
    for file in [] if tokenizer_only else unfetched(path):
        download(file)
        print(f"{file.path}: {file.size:,} bytes", file=sys.stderr, flush=True)
    return path


def replace_addresses(arguments: dict[str, Any]) -> None:
    """Replace addresses of tokenizers and checkpoints in a command's arguments by local copies."""
    for name, value in arguments.items():
        for each in value if isinstance(value, list | tuple) else [value]:
            text = str(each).replace(":/", "://", 1)  # a Path has one slash
            if isinstance(each, Path) and is_remote(text):
                if name not in ("tokenizer", "checkpoint", "source", "path"):
                    raise UserError(
                        f"{name}: {text}: takes no address; run `tokamake fetch {text}`"
                    )
                arguments[name] = bring(text, tokenizer_only=name == "tokenizer")
