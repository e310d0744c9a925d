"""BERT's WordPiece: vocab.txt; documents end with [SEP] and may begin with [CLS].

Normalized as tokenizer_config.json beside it says; without one, lower-cased unless the vocabulary
has capitals.
"""

from pathlib import Path

from tokamake.data.tokenizers import Tokenizer, in_folder, setting, special_token, with_configs
from tokamake.data.tokenizers._fast import wrap


def files(path: Path) -> list[Path]:
    """vocab.txt and the config files beside it."""
    return with_configs(in_folder(path, "vocab.txt"))


def load(found: list[Path]) -> Tokenizer:
    """Load a WordPiece vocabulary."""
    import tokenizers

    words = found[0].read_text(encoding="utf-8").splitlines()
    lowercase = setting(found, "do_lower_case")
    if lowercase is None:
        # Only the special tokens of an uncased vocabulary, [SEP] and its like, have capitals.
        lowercase = all(word == word.lower() for word in words if not word.startswith("["))
    fast = tokenizers.BertWordPieceTokenizer(
        str(found[0]),
        lowercase=bool(lowercase),
        strip_accents=setting(found, "strip_accents"),
        handle_chinese_chars=setting(found, "tokenize_chinese_chars") is not False,
    )._tokenizer
    return wrap(
        fast,
        found[0],
        eos=special_token(found, "sep_token") or "[SEP]",
        bos=special_token(found, "cls_token") or ("[CLS]" if "[CLS]" in words else ""),
    )
