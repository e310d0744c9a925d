"""GPT-2's byte-level BPE: vocab.json and merges.txt; <|endoftext|> ends and begins documents.

A tokenizer_config.json or special_tokens_map.json beside them may name other tokens for that.
"""

from pathlib import Path

from tokamake.data.tokenizers import Tokenizer, in_folder, special_token, with_configs
from tokamake.data.tokenizers._fast import wrap

_END = "<|endoftext|>"


def files(path: Path) -> list[Path]:
    """vocab.json, merges.txt and the config files beside them."""
    return with_configs(in_folder(path, "vocab.json", "merges.txt"))


def load(found: list[Path]) -> Tokenizer:
    """Load GPT-2's tokenizer: no prefix space, its special tokens in text are one token each."""
    import tokenizers

    fast = tokenizers.ByteLevelBPETokenizer(str(found[0]), str(found[1]))._tokenizer
    vocabulary = fast.get_vocab()
    eos = special_token(found, "eos_token") or _END
    bos = special_token(found, "bos_token") or (_END if _END in vocabulary else "")
    fast.add_special_tokens([token for token in dict.fromkeys((eos, bos)) if token in vocabulary])
    return wrap(fast, found[0], eos=eos, bos=bos)
