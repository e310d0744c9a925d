"""GPT-2's byte-level BPE: vocab.json and merges.txt, ended by <|endoftext|>."""

from pathlib import Path

from tokamake.data.tokenizers import Tokenizer, _in_folder
from tokamake.data.tokenizers._fast import wrap


def files(path: Path) -> list[Path]:
    """vocab.json and merges.txt."""
    return _in_folder(path, "vocab.json", "merges.txt")


def load(found: list[Path]) -> Tokenizer:
    """Load GPT-2's tokenizer: no prefix space, `<|endoftext|>` in text is one token."""
    import tokenizers

    fast = tokenizers.ByteLevelBPETokenizer(str(found[0]), str(found[1]))._tokenizer
    if "<|endoftext|>" in fast.get_vocab():
        fast.add_special_tokens(["<|endoftext|>"])
    return wrap(fast, "<|endoftext|>", found[0])
