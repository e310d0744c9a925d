"""WordPiece as arguments of lib/csrc, with the normalizer and the pre-tokenizer of BERT.

Words are looked up as they are in the text. Only new words are normalized: the normalizer changes
each character by itself, and no mark is sorted across a space or a sign of punctuation.
tests/data/tokenizers/test_word_pieces.py compares the tokens.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokamake._csrc import Vocabulary, WordPieces
from tokamake.data.tokenizers._exactness import Json, Unsupported
from tokamake.data.tokenizers._normalization import Map, Normalization
from tokamake.data.tokenizers._patterns import CHARACTERS, compile_sets, matching, of_all_points

_SPACE, _ALONE = 1, 2  # kinds of characters, as in lib/csrc/word_pieces.hpp
_WORDS = " ?\0Inside+| ?\0Alone|\0Space"


def arguments(
    tokenizer: Json, vocabulary: Vocabulary, normalization: Normalization
) -> dict[str, Any]:
    """Arguments of lib/csrc for a tokenizer.json; Unsupported if it may not be exact."""
    model = tokenizer["model"]
    unknown = vocabulary.id(model["unk_token"])
    if unknown is None:
        raise Unsupported("its vocabulary has no token for unknown words")
    if tokenizer.get("pre_tokenizer") != {"type": "BertPreTokenizer"}:
        raise Unsupported("its pre_tokenizer is not BERT's")
    if normalization.arguments["marks"].size:
        raise Unsupported("its normalizer changes several characters together")
    kinds = np.where(matching("\0Visible"), matching("\0Punctuation") * _ALONE, _SPACE)
    later = any(token.get("normalized") for token in tokenizer.get("added_tokens") or [])
    in_text = kinds if later else _kinds_in_text(normalization.arguments["before"], kinds)
    sets = {f"\0{name}": in_text == kind for kind, name in enumerate(("Inside", "Space", "Alone"))}
    pieces = WordPieces(
        vocabulary,
        prefix=model["continuing_subword_prefix"],
        unknown=unknown,
        longest=model["max_input_chars_per_word"],
        kinds=of_all_points(kinds.astype(np.uint8)),
    )
    return {
        "model": pieces,
        "splits": [(*compile_sets(_WORDS, sets), True, True)],
        "normalizes_words": not later,
    }


def _kinds_in_text(changes: Map | None, kinds: NDArray[Any]) -> NDArray[Any]:
    """Kind of each of CHARACTERS before it is normalized."""
    if changes is None:
        return kinds
    known = dict(zip(CHARACTERS, kinds.tolist(), strict=True))
    found = kinds.copy()
    numbers = changes.numbers[[*map(ord, CHARACTERS)]]
    for place in np.flatnonzero(numbers):
        text = [known.get(character, 0) for character in changes.texts[numbers[place]]]
        word = [kind for kind in text if kind != _SPACE]
        if text and not word:
            found[place] = _SPACE
        elif word == [_ALONE] or (len(word) == 1 and text[0] == text[-1] == _SPACE):
            found[place] = _ALONE
        else:
            found[place] = 0
    return found
