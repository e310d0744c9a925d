"""Wrapper of tokenizers of the `tokenizers` package."""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from tokamake.data.tokenizers import Tokenizer, failure
from tokamake.data.tokenizers._word_rules import word_rules
from tokamake.errors import UserError

if TYPE_CHECKING:
    import tokenizers


def wrap(
    fast: "tokenizers.Tokenizer",
    path: Path,
    *,
    eos: str,
    bos: str = "",
    adds_bos: bool | None = None,
    has_text: bool = True,
) -> Tokenizer:
    """Turn a `tokenizers.Tokenizer` into a `Tokenizer`.

    Args:
        fast: the loaded tokenizer.
        path: its file, for messages.
        eos: text of the end-of-document token; must be in the vocabulary.
        bos: text of the token that begins documents, or empty.
        adds_bos: whether `bos` begins prompts; None: as the post-processor does.
        has_text: False: text is token ids.

    Raises:
        UserError: `eos` or `bos` is not in the vocabulary.
    """
    vocabulary = fast.get_vocab(with_added_tokens=True)
    for role, token in (("end", eos), ("beginning", bos)):
        if token not in vocabulary and (token or role == "end"):
            raise UserError(
                f'tokenizer {path}: its {role} token "{token}" is not in its vocabulary; '
                "fetch all of its files again"
            )
    # A tokenizer.json may set truncation and padding. These are for model inputs, not for data.
    fast.no_truncation()
    fast.no_padding()

    vocab_size = max(vocabulary.values()) + 1
    if adds_bos is None:
        adds_bos = bool(bos) and fast.encode("").ids == [vocabulary[bos]]

    def encode_batch(texts: list[str], /, *, workers: int = 1) -> list[list[int]]:
        try:
            return [e.ids for e in fast.encode_batch_fast(texts, add_special_tokens=False)]
        except BaseException as error:  # the package raises bare Exception, or panics
            reason = failure(error)
            if not has_text:
                reason = f"write token ids below {vocab_size:,}, separated by spaces"
            raise UserError(f"tokenizer {path}: cannot encode a text ({reason})") from None

    return Tokenizer(
        vocab_size=vocab_size,
        has_text=has_text,
        eod=vocabulary[eos],
        bos=vocabulary[bos] if bos else None,
        adds_bos=adds_bos,
        special_tokens=frozenset(
            number for number, token in fast.get_added_tokens_decoder().items() if token.special
        ),
        encode_batch=encode_batch,
        decode=lambda ids: fast.decode(ids, skip_special_tokens=False),
        package="tokenizers",
        # Not the file's text: `tokenizers` may renumber added tokens.
        definition=cache(lambda: fast.to_str().encode()),
        word_rules=lambda: word_rules(fast),
    )
