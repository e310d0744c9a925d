"""Hugging Face tokenizers: a folder with tokenizer.json, whose config files name the end token."""

from pathlib import Path

from tokamake.data.tokenizers import (
    CONFIGS,
    Tokenizer,
    in_folder,
    special_token,
    with_configs,
)
from tokamake.data.tokenizers._fast import wrap
from tokamake.errors import UserError


def files(path: Path) -> list[Path]:
    """tokenizer.json and the config files beside it."""
    return with_configs(in_folder(path, "tokenizer.json"))


def load(found: list[Path]) -> Tokenizer:
    """Load tokenizer.json; the end of a document is the `eos_token` of the config files.

    BERT-like tokenizers have none; their `sep_token` and `cls_token` stand for it.
    """
    import tokenizers

    fast = tokenizers.Tokenizer.from_file(str(found[0]))
    eos = special_token(found, "eos_token") or special_token(found, "sep_token")
    if not eos:
        raise UserError(
            f"tokenizer {found[0]}: no eos_token in {' or '.join(CONFIGS)} beside it; "
            "add the file that came with the tokenizer"
        )
    return wrap(
        fast,
        found[0],
        eos=eos,
        bos=special_token(found, "bos_token") or special_token(found, "cls_token"),
    )
