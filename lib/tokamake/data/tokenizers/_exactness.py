"""Checks of a tokenizer.json that all fast encoders share.

A reason is a clause whose subject "it" is the tokenizer.
"""

from typing import Any

from tokamake._csrc import Vocabulary

Json = dict[str, Any]
_ALLOWED_MODEL = {
    "type": ("BPE",),
    "dropout": (None, 0),
    "continuing_subword_prefix": (None, ""),
    "end_of_word_suffix": (None, ""),
}


class Unsupported(Exception):
    """Why something cannot be compiled: a clause whose subject "it" is the tokenizer."""


def byte_alphabet() -> dict[int, str]:
    """Return the character of each byte in GPT-2's and all later byte-level vocabularies."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + rank) for rank, byte in enumerate(hidden)
    }


def check_model(model: Json) -> None:
    """Raise Unsupported unless a model is a BPE whose tokens depend on the words alone."""
    for key, allowed in _ALLOWED_MODEL.items():
        if model.get(key) not in allowed:
            raise Unsupported(f"the model's {key} is {model.get(key)!r}")


def check_added(added: list[Json], vocabulary: Vocabulary) -> None:
    """Raise Unsupported if added tokens may be found in another way than by their texts alone."""
    if any(vocabulary.id(token["content"]) not in (None, token["id"]) for token in added):
        raise Unsupported("an added token has another number in the vocabulary")
    spaces = any(token["content"][:1].isspace() for token in added)
    for token in added:
        if not token["content"]:
            raise Unsupported("an added token is empty")
        # After rstrip, tokenizers finds a token of spaces a second time.
        for flag in ("single_word", *["rstrip"] * spaces):
            if token.get(flag):
                raise Unsupported(f'the added token "{token["content"]}" has {flag}')
