"""BERT's WordPiece: vocab.txt; lower-cased unless its entries have capitals; ended by [SEP]."""

from pathlib import Path

from tokamake.data.tokenizers import Tokenizer, _in_folder
from tokamake.data.tokenizers._fast import wrap


def files(path: Path) -> list[Path]:
    """vocab.txt."""
    return _in_folder(path, "vocab.txt")


def load(found: list[Path]) -> Tokenizer:
    """Load a WordPiece vocabulary."""
    import tokenizers

    words = found[0].read_text(encoding="utf-8").splitlines()
    # Only the special tokens of an uncased vocabulary, [SEP] and its like, have capitals.
    lowercase = all(word == word.lower() for word in words if not word.startswith("["))
    fast = tokenizers.BertWordPieceTokenizer(str(found[0]), lowercase=lowercase)._tokenizer
    return wrap(fast, "[SEP]", found[0])
