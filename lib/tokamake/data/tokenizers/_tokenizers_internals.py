"""The only place that touches private names of the package tokenizers. Checked with version 0.23.

tests/data/tokenizers/test_tokenizers_internals.py fails if a version changes one of them.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers


def inner_tokenizer(implementation: Any) -> "tokenizers.Tokenizer":
    """The `Tokenizer` that a class such as `ByteLevelBPETokenizer` builds."""
    tokenizer: tokenizers.Tokenizer = implementation._tokenizer
    return tokenizer
