"""Hugging Face tokenizers: tokenizer.json, and config files that name the end-of-document token."""

from pathlib import Path

from tokamake._csrc import model_spans
from tokamake.data.tokenizers import IDS_KEY, Tokenizer, in_folder, settings, with_configs
from tokamake.data.tokenizers._fast import Merges, check_number, wrap


def files(path: Path) -> list[Path]:
    return with_configs(in_folder(path, "tokenizer.json"))


def load(paths: list[Path]) -> Tokenizer:
    """Load tokenizer.json. The end-of-document token is the `eos_token` of the config files.

    BERT's tokenizers have none: `sep_token` and `cls_token` replace `eos_token` and `bos_token`.
    """
    import tokenizers

    definition = paths[0].read_bytes()
    check_number(paths[0], definition.count(b'"single_word"'))  # before they take minutes to load
    has_text = not settings(paths).get(IDS_KEY)
    if (spans := model_spans(definition)) is None:
        return wrap(tokenizers.Tokenizer.from_buffer(definition), paths, has_text=has_text)
    _, (begin, end), highest = spans
    # Merges take most of the time to load. The package needs them only to encode.
    without = tokenizers.Tokenizer.from_buffer(definition[:begin] + b"[]" + definition[end:])
    merges = Merges(
        definition[begin:end], highest, lambda: tokenizers.Tokenizer.from_buffer(definition)
    )
    return wrap(without, paths, has_text=has_text, merges=merges)
