"""BERT's WordPiece: vocab.txt. Documents end with [SEP] and may begin with [CLS].

tokenizer_config.json in the same folder sets the normalization. Without it, text is lower-cased
unless the vocabulary has capitals.
"""

from pathlib import Path

from tokamake.data.tokenizers import Tokenizer, in_folder, settings, special_token, with_configs
from tokamake.data.tokenizers._fast import wrap

_NAMES = ("unk", "sep", "pad", "cls", "mask")


def files(path: Path) -> list[Path]:
    return with_configs(in_folder(path, "vocab.txt"))


def load(paths: list[Path]) -> Tokenizer:
    """Load a WordPiece vocabulary."""
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    config = settings(paths)
    lowercase = config.get("do_lower_case")
    if lowercase is None:
        words = paths[0].read_text(encoding="utf-8").splitlines()
        # In an uncased vocabulary, only special tokens such as [SEP] have capitals.
        lowercase = all(word == word.lower() for word in words if not word.startswith("["))
    defaults = {f"{name}_token": f"[{name.upper()}]" for name in _NAMES}
    unknown = special_token(config, "unk_token") or "[UNK]"
    fast = Fast(models.WordPiece.from_file(str(paths[0]), unk_token=unknown))
    fast.normalizer = normalizers.BertNormalizer(
        lowercase=bool(lowercase),
        strip_accents=config.get("strip_accents"),
        handle_chinese_chars=config.get("tokenize_chinese_chars") is not False,
    )
    fast.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    fast.decoder = decoders.WordPiece()
    return wrap(fast, paths, defaults=defaults)
