"""Wrapper of tokenizers of the `tokenizers` package."""

import json
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from tokamake.data.tokenizers import Tokenizer, failure, settings
from tokamake.data.tokenizers._added_tokens import add_tokens
from tokamake.data.tokenizers._word_rules import word_rules
from tokamake.errors import UserError

if TYPE_CHECKING:
    import tokenizers


def wrap(
    fast: "tokenizers.Tokenizer",
    paths: list[Path],
    *,
    defaults: Mapping[str, str] = {},
    pieces: Iterable["tokenizers.AddedToken"] = (),
    has_text: bool = True,
) -> Tokenizer:
    """Add the tokens of the config files to a tokenizer, and turn it into a `Tokenizer`."""
    end, beginning = add_tokens(fast, paths, defaults=defaults, pieces=pieces)
    vocabulary = fast.get_vocab(with_added_tokens=True)
    # A tokenizer.json may set truncation and padding. These are for model inputs, not for data.
    fast.no_truncation()
    fast.no_padding()
    _remove_sampling(fast, paths[0])

    vocab_size = max(vocabulary.values()) + 1
    adds_bos = settings(paths).get("add_bos_token")
    if adds_bos is None:
        adds_bos = bool(beginning) and fast.encode("").ids[:1] == [vocabulary[beginning]]

    def encode_batch(texts: list[str], /, *, workers: int = 1) -> list[list[int]]:
        try:
            return [e.ids for e in fast.encode_batch_fast(texts, add_special_tokens=False)]
        except BaseException as error:  # the package raises bare Exception, or panics
            reason = failure(error)
            if not has_text:
                reason = f"write token ids below {vocab_size:,}, separated by spaces"
            raise UserError(
                f"tokenizer {paths[0]}: cannot encode a text ({reason}); remove the text, or "
                "give another tokenizer"
            ) from None

    return Tokenizer(
        vocab_size=vocab_size,
        has_text=has_text,
        eod=vocabulary[end],
        bos=vocabulary[beginning] if beginning else None,
        adds_bos=adds_bos,
        special_tokens=frozenset(
            number for number, token in fast.get_added_tokens_decoder().items() if token.special
        ),
        encode_batch=encode_batch,
        decode=lambda ids: fast.decode(ids, skip_special_tokens=False),
        package="tokenizers",
        definition=cache(lambda: _definition(fast)),
        word_rules=lambda: word_rules(fast),
        read_special_tokens_as_text=lambda: setattr(fast, "encode_special_tokens", True),
    )


def _remove_sampling(fast: "tokenizers.Tokenizer", path: Path) -> None:
    """Turn off BPE dropout and the sampling of Unigram, which give other tokens each time."""
    for name in ("dropout", "alpha"):
        if getattr(fast.model, name, None):
            setattr(fast.model, name, None)
            print(
                f"tokenizer {path}: its {name} is turned off: data must not be random",
                file=sys.stderr,
            )


def _definition(fast: "tokenizers.Tokenizer") -> bytes:
    """Text of tokenizer.json. It lacks special tokens that are read as text.

    Not the file's text: `tokenizers` may renumber added tokens.
    """
    text = fast.to_str()
    if not fast.encode_special_tokens:
        return text.encode()
    definition = json.loads(text)
    definition["added_tokens"] = [t for t in definition["added_tokens"] if not t["special"]]
    return json.dumps(definition).encode()
