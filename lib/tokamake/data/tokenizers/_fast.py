"""Wraps a tokenizer of the `tokenizers` package."""

from pathlib import Path
from typing import TYPE_CHECKING

from tokamake.data.tokenizers import Tokenizer
from tokamake.errors import UserError

if TYPE_CHECKING:
    import tokenizers


def wrap(fast: "tokenizers.Tokenizer", eod_token: str, source: Path) -> Tokenizer:
    """Give a `tokenizers.Tokenizer` our interface; `eod_token` must be in its vocabulary."""
    vocabulary = fast.get_vocab(with_added_tokens=True)
    if eod_token not in vocabulary:
        raise UserError(f'tokenizer {source}: its end token "{eod_token}" is not in its vocabulary')

    def encode_batch(texts: list[str]) -> list[list[int]]:
        return [e.ids for e in fast.encode_batch_fast(texts, add_special_tokens=False)]

    return Tokenizer(
        vocab_size=max(vocabulary.values()) + 1,
        eod=vocabulary[eod_token],
        encode_batch=encode_batch,
        decode=lambda ids: fast.decode(ids, skip_special_tokens=False),
    )
