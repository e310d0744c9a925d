"""Hugging Face tokenizers: a folder with tokenizer.json, whose config files name the end token."""

import json
from pathlib import Path

from tokamake.data.tokenizers import Tokenizer, _in_folder
from tokamake.data.tokenizers._fast import wrap
from tokamake.errors import UserError

_CONFIGS = ("tokenizer_config.json", "special_tokens_map.json")


def files(path: Path) -> list[Path]:
    """tokenizer.json and the config files beside it."""
    found = _in_folder(path, "tokenizer.json")
    return found + [
        found[0].parent / c for c in _CONFIGS if found and (found[0].parent / c).is_file()
    ]


def load(found: list[Path]) -> Tokenizer:
    """Load tokenizer.json; the end of a document is the `eos_token` of the config files."""
    import tokenizers

    for config in found[1:]:
        token = json.loads(config.read_text(encoding="utf-8")).get("eos_token")
        token = token["content"] if isinstance(token, dict) else token
        if token:
            return wrap(tokenizers.Tokenizer.from_file(str(found[0])), token, found[0])
    raise UserError(
        f"tokenizer {found[0]}: no eos_token in {' or '.join(_CONFIGS)} beside it; "
        "add the file that came with the tokenizer"
    )
