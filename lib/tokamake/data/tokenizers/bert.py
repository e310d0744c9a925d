"""BERT's WordPiece: vocab.txt. Documents end with [SEP] and may begin with [CLS].

tokenizer_config.json in the same folder sets the normalization. Without it, text is lower-cased
unless the vocabulary has capitals.
"""

from pathlib import Path

from tokamake.data.tokenizers import Tokenizer, in_folder, setting, special_token, with_configs
from tokamake.data.tokenizers._fast import wrap
from tokamake.data.tokenizers._tokenizers_internals import inner_tokenizer


def files(path: Path) -> list[Path]:
    """Return vocab.txt and the config files in the same folder."""
    return with_configs(in_folder(path, "vocab.txt"))


def load(paths: list[Path]) -> Tokenizer:
    """Load a WordPiece vocabulary."""
    import tokenizers

    words = paths[0].read_text(encoding="utf-8").splitlines()
    lowercase = setting(paths, "do_lower_case")
    if lowercase is None:
        # In an uncased vocabulary, only special tokens such as [SEP] have capitals.
        lowercase = all(word == word.lower() for word in words if not word.startswith("["))
    implementation = tokenizers.BertWordPieceTokenizer(
        str(paths[0]),
        lowercase=bool(lowercase),
        strip_accents=setting(paths, "strip_accents"),
        handle_chinese_chars=setting(paths, "tokenize_chinese_chars") is not False,
    )
    return wrap(
        inner_tokenizer(implementation),
        paths[0],
        eos=special_token(paths, "sep_token") or "[SEP]",
        bos=special_token(paths, "cls_token") or ("[CLS]" if "[CLS]" in words else ""),
    )
