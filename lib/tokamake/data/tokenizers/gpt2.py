"""GPT-2's byte-level BPE: vocab.json and merges.txt. <|endoftext|> ends and begins documents.

tokenizer_config.json or special_tokens_map.json in the same folder may name other tokens.
"""

from pathlib import Path

from tokamake.data.tokenizers import Tokenizer, in_folder, setting, special_token, with_configs
from tokamake.data.tokenizers._fast import wrap
from tokamake.data.tokenizers._tokenizers_internals import inner_tokenizer

_EOD_TOKEN = "<|endoftext|>"


def files(path: Path) -> list[Path]:
    """Return vocab.json, merges.txt and the config files in the same folder."""
    return with_configs(in_folder(path, "vocab.json", "merges.txt"))


def load(paths: list[Path]) -> Tokenizer:
    """Load GPT-2's tokenizer without prefix space. Special tokens in text become one token."""
    import tokenizers

    fast = inner_tokenizer(tokenizers.ByteLevelBPETokenizer(str(paths[0]), str(paths[1])))
    vocabulary = fast.get_vocab()
    eos = special_token(paths, "eos_token") or _EOD_TOKEN
    bos = special_token(paths, "bos_token") or (_EOD_TOKEN if _EOD_TOKEN in vocabulary else "")
    fast.add_special_tokens([token for token in dict.fromkeys((eos, bos)) if token in vocabulary])
    adds_bos = setting(paths, "add_bos_token")
    return wrap(fast, paths[0], eos=eos, bos=bos, adds_bos=adds_bos)
