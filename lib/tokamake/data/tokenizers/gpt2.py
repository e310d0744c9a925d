"""GPT-2's byte-level BPE: vocab.json and merges.txt. <|endoftext|> ends and begins documents.

tokenizer_config.json or special_tokens_map.json in the same folder may name other tokens.
"""

from pathlib import Path

from tokamake.data.tokenizers import Tokenizer, in_folder, settings, with_configs
from tokamake.data.tokenizers._fast import wrap


def files(path: Path) -> list[Path]:
    return with_configs(in_folder(path, "vocab.json", "merges.txt"))


def load(paths: list[Path]) -> Tokenizer:
    """Load GPT-2's tokenizer. Special tokens in text become one token."""
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models, pre_tokenizers

    fast = Fast(models.BPE.from_file(*map(str, paths[:2])))
    has_prefix = bool(settings(paths).get("add_prefix_space"))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=has_prefix)
    fast.decoder = decoders.ByteLevel()
    names = ("bos_token", "eos_token", "unk_token")
    return wrap(fast, paths, defaults=dict.fromkeys(names, "<|endoftext|>"))
