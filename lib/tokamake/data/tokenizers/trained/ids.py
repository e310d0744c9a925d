"""Token ids separated by spaces; nothing is trained."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tokenizers

MINIMUM = 2
SPECIAL_TOKENS: dict[str, str] = {}


def make(vocab_size: int, eod: int) -> "tokenizers.Tokenizer":
    """Make a tokenizer whose text is token ids and spaces, like Megatron's NullTokenizer."""
    import tokenizers
    from tokenizers import models, pre_tokenizers

    tokenizer = tokenizers.Tokenizer(models.WordLevel({str(id): id for id in range(vocab_size)}))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # Without single_word, the token 2 would be found in 12.
    tokenizer.add_special_tokens([tokenizers.AddedToken(str(eod), single_word=True)])
    return tokenizer
