"""The tokenizer that a checkpoint is written with: its special tokens and the files to copy."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokamake.checkpoint.hf.config_json import including
from tokamake.checkpoint.tensors.checkpoint import Checkpoint
from tokamake.config.architecture import Architecture
from tokamake.data.tokenizers import open_tokenizer, tokenizer_files, with_configs
from tokamake.data.tokenizers._sentinels import DECODER_TOKENS, decoder_tokens
from tokamake.errors import UserError

TOKENIZER_CONFIG = "tokenizer_config.json"
_OPTIONAL_FILES = ("added_tokens.json", "chat_template.*", "additional_chat_templates/*.jinja")
"""Patterns of further files of a tokenizer that transformers reads."""


def exported_config(config: Mapping[str, Any], architecture: Architecture) -> dict[str, Any]:
    """Content of an export's tokenizer_config.json, so that transformers gives the model's inputs.

    With token types, the inputs can be a pair of texts. A decoder has its own begin and end tokens.
    """
    exported = dict(config)
    if (architecture.model_extra or {}).get("type_vocab_size"):
        names = ["input_ids", "token_type_ids", "attention_mask"]
        exported = {"model_input_names": names, **exported}
    if architecture.has_decoder and {*DECODER_TOKENS} <= _texts_of_special_tokens(config):
        exported |= dict(zip(("bos_token", "eos_token"), DECODER_TOKENS, strict=True))
    return exported


def _texts_of_special_tokens(config: Mapping[str, Any]) -> set[str]:
    tokens = config.get("additional_special_tokens") or ()
    return {token if isinstance(token, str) else token.get("content", "") for token in tokens}


def read_tokenizer(
    tokenizer: Path, checkpoint: Checkpoint
) -> tuple[dict[str, Any], tuple[Path, ...], str | None]:
    """Return a tokenizer's special tokens, its files that transformers reads, and a warning.

    The special tokens have the names of config.json. If the model ends text with several tokens,
    these stay, as long as the tokenizer's is among them.

    The warning says that the model has more entries: padding, or another tokenizer's entries.
    """
    opened = open_tokenizer(tokenizer)
    warning = _compare_sizes(opened.vocab_size, checkpoint, named=f"--tokenizer {tokenizer}")
    files = tokenizer_files(tokenizer)[1]
    optional = (file for pattern in _OPTIONAL_FILES for file in files[0].parent.glob(pattern))
    copied = (*sorted({*with_configs(files), *optional}),)
    bos, eos = opened.bos, opened.eod
    if checkpoint.architecture.has_decoder:
        bos, eos = decoder_tokens(opened) or (bos, eos)
    tokens: dict[str, Any] = {"eos_token_id": including(checkpoint.stated_end_tokens, eos)}
    if bos is not None:
        tokens["bos_token_id"] = bos
    return tokens, copied, warning


def check_kept_tokenizer(checkpoint: Checkpoint) -> str | None:
    """Compare the size of the tokenizer beside a model with the model's; return a warning."""
    folder = checkpoint.tokenizer[-1].parent
    try:
        num_entries = open_tokenizer(folder).vocab_size
    except UserError as error:  # transformers may know it
        return f"{folder}: its tokenizer is kept, but not compared with the model: {error}"
    return _compare_sizes(num_entries, checkpoint, named=f"tokenizer {folder}")


def _compare_sizes(num_entries: int, checkpoint: Checkpoint, *, named: str) -> str | None:
    vocab_size = checkpoint.architecture.vocab_size
    assert vocab_size is not None, "an open checkpoint has its vocab_size set"
    sizes = (
        f"{named}: has {num_entries:,} entries, the model of {checkpoint.path} has {vocab_size:,}"
    )
    if num_entries > vocab_size:
        raise UserError(f"{sizes}; give the tokenizer that it was trained with")
    if num_entries == vocab_size:
        return None
    return (
        f"{sizes}; if the other rows are not padding, the model was trained with another tokenizer"
    )


def exported_name(file: Path) -> str:
    """Name by which transformers finds a file of a tokenizer: vocab.json for gpt2-vocab.json."""
    return re.sub(r"^.*-(?=(vocab\.json|merges\.txt|vocab\.txt|tokenizer\.json)$)", "", file.name)
