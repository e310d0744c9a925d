"""Hugging Face tokenizers: tokenizer.json, and config files that name the end-of-document token."""

from pathlib import Path

from tokamake.data.tokenizers import (
    CONFIGS,
    IDS_KEY,
    Tokenizer,
    in_folder,
    setting,
    special_token,
    with_configs,
)
from tokamake.data.tokenizers._fast import wrap
from tokamake.errors import UserError


def files(path: Path) -> list[Path]:
    """Return tokenizer.json and the config files in the same folder."""
    return with_configs(in_folder(path, "tokenizer.json"))


def load(paths: list[Path]) -> Tokenizer:
    """Load tokenizer.json. The end-of-document token is the `eos_token` of the config files.

    BERT's tokenizers have none: `sep_token` and `cls_token` replace `eos_token` and `bos_token`.
    """
    import tokenizers

    fast = tokenizers.Tokenizer.from_file(str(paths[0]))
    eos = special_token(paths, "eos_token") or special_token(paths, "sep_token")
    if not eos:
        raise UserError(
            f"tokenizer {paths[0]}: no eos_token in {' or '.join(CONFIGS)} beside it; "
            "add the file that came with the tokenizer"
        )
    bos = special_token(paths, "bos_token") or special_token(paths, "cls_token")
    return wrap(
        fast,
        paths[0],
        eos=eos,
        bos=bos,
        adds_bos=setting(paths, "add_bos_token"),
        has_text=not setting(paths, IDS_KEY),
    )
