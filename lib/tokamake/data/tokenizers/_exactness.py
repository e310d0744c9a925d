"""Checks of a tokenizer.json that all fast encoders share.

A reason is a clause whose subject "it" is the tokenizer.
"""

from collections.abc import Iterator
from typing import Any

from tokamake._csrc import Vocabulary

Json = dict[str, Any]
_ALLOWED = {
    "BPE": {
        "dropout": (None, 0),
        "continuing_subword_prefix": (None, ""),
        "end_of_word_suffix": (None, ""),
    },
    "WordPiece": {},
    "Unigram": {},
}


class Unsupported(Exception):
    """Why something cannot be compiled: a clause whose subject "it" is the tokenizer."""


def flat_steps(step: Json | None, key: str) -> Iterator[Json]:
    """Yield the steps of a Sequence of normalizers or pre-tokenizers, and of those in it."""
    if step and step["type"] == "Sequence":
        for part in step[key]:
            yield from flat_steps(part, key)
    elif step:
        yield step


def byte_alphabet() -> dict[int, str]:
    """Return the character of each byte in GPT-2's and all later byte-level vocabularies."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + rank) for rank, byte in enumerate(hidden)
    }


def check_model(model: Json) -> None:
    """Raise Unsupported unless the tokens of a model depend on the words alone."""
    if (kind := model["type"]) not in _ALLOWED:
        raise Unsupported(f"the model's type is {kind!r}")
    for key, allowed in _ALLOWED[kind].items():
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
        if spaces and token.get("rstrip"):
            raise Unsupported(f'the added token "{token["content"]}" has rstrip')
