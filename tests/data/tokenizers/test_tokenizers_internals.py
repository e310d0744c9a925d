"""Private names of the package tokenizers. A version that changes one fails by name."""

import pytest
import tokenizers

from tokamake.data.tokenizers._tokenizers_internals import inner_tokenizer


@pytest.mark.parametrize("name", ["ByteLevelBPETokenizer", "BertWordPieceTokenizer"])
def test_inner_tokenizer(name: str) -> None:
    tokenizer = inner_tokenizer(getattr(tokenizers, name)())
    assert type(tokenizer) is tokenizers.Tokenizer
    assert tokenizer.get_vocab_size() == 0
