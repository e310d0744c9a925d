"""Settings of fill-in-the-middle, its special tokens in a tokenizer, and whether text can be cut.

`fim` rearranges samples by them.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tokamake.data.tokenizers import Tokenizer
from tokamake.errors import UserError

_PROBE = "  def f(x):\n\treturn  x1 # naïve e\u0301 ☃ 日本語\U0001f600.\n\nA b"
_ALIKE = re.compile(r"fim|pre|suf|mid|begin|hole", re.IGNORECASE)


@dataclass(frozen=True)
class Fim:
    """How documents are rearranged.

    Raises:
        UserError: a rate is out of range.
    """

    rate: float = 0.0
    """Share of documents that are rearranged; a document is what a sample holds of it."""
    spm_rate: float = 0.5
    """Share of the rearranged whose suffix comes first (SPM), before the prefix (PSM)."""
    split_token: str = ""
    """Special token that parts a document, as a repository into files; empty: nothing does."""
    fragment_rate: float = 0.5
    """Share of the parts of a document so parted that are rearranged, each by itself; `rate` is
    then the share of documents whose parts may be."""
    prefix: str = "<fim_prefix>"
    """Special token before the prefix."""
    suffix: str = "<fim_suffix>"
    """Special token before the suffix."""
    middle: str = "<fim_middle>"
    """Special token before the middle."""

    def __post_init__(self) -> None:
        for name in ("rate", "spm_rate", "fragment_rate"):
            if not 0 <= getattr(self, name) <= 1:
                raise UserError(f"fim.{name}: {getattr(self, name)}: give 0 to 1")


class FimTokens(NamedTuple):
    """Numbers of special tokens."""

    prefix: int
    suffix: int
    middle: int
    split: int | None
    special: list[int]
    """All that the tokenizer has, those of other uses included."""


def find_tokens(fim: Fim, tokenizer: Tokenizer, path: Path) -> FimTokens:
    """Look up the special tokens, and make sure that the tokenizer keeps text that is cut.

    Args:
        fim: their texts.
        tokenizer: the loaded tokenizer.
        path: where it is, for messages.

    Raises:
        UserError: a token is missing or has two uses, or the tokenizer changes text.
    """
    special = _special_tokens(tokenizer, path)
    texts = {name: getattr(fim, name) for name in ("prefix", "suffix", "middle")}
    if fim.split_token:
        texts["split_token"] = fim.split_token
    for name, text in texts.items():
        if text not in special:
            raise _missing(f"fim.{name}: {text!r}", path, special, list(texts.values()))
    _check_uses({name: special[text] for name, text in texts.items()}, tokenizer)
    _check_cuts(tokenizer, path)
    return FimTokens(
        prefix=special[fim.prefix],
        suffix=special[fim.suffix],
        middle=special[fim.middle],
        split=special[fim.split_token] if fim.split_token else None,
        special=[*special.values()],
    )


def _special_tokens(tokenizer: Tokenizer, path: Path) -> dict[str, int]:
    if tokenizer.package != "tokenizers":
        raise UserError(
            f"tokenizer {path}: fill-in-the-middle needs one whose special tokens are told apart "
            "from text; give one with a tokenizer.json"
        )
    added = json.loads(tokenizer.definition())["added_tokens"]
    # Some do not call theirs special; only runs of spaces are text like any other.
    return {token["content"]: token["id"] for token in added if token["content"].strip()}


def _missing(what: str, path: Path, special: dict[str, int], texts: list[str]) -> UserError:
    alike = [text for text in special if _ALIKE.search(text)]
    found = f"it has {', '.join(alike[:12])}" if alike else "it has none like it"
    options = " ".join(f"--special-tokens '{text}'" for text in texts)
    return UserError(
        f"{what}: not a special token of tokenizer {path}; {found}: name those, or train a "
        f"tokenizer with `tokamake train-tokenizer {options}`"
    )


def _check_uses(numbers: dict[str, int], tokenizer: Tokenizer) -> None:
    known = {tokenizer.eod: "the end of a document"}
    if tokenizer.bos is not None:
        known.setdefault(tokenizer.bos, "the beginning of a document")
    for name, number in numbers.items():
        if number in known:
            raise UserError(f"fim.{name}: the same token as {known[number]}; name another")
        known[number] = f"fim.{name}"


def _check_cuts(tokenizer: Tokenizer, path: Path) -> None:
    """Cut a text anywhere, between letters and spaces of all kinds: its pieces must make it up."""
    (ids,) = tokenizer.encode_batch([_PROBE])
    text = tokenizer.decode(ids)
    heads = tokenizer.encode_batch([text[:cut] for cut in range(len(text) + 1)])
    tails = tokenizer.encode_batch([text[cut:] for cut in range(len(text) + 1)])
    for cut, (head, tail) in enumerate(zip(heads, tails, strict=True)):
        if (made := tokenizer.decode(head + tail)) != text:
            raise UserError(
                f"tokenizer {path}: changes text that is cut, {text[:cut][-9:]!r} and "
                f"{text[cut:][:9]!r}, as fill-in-the-middle does (it makes {made[:20]!r}...); give "
                "one over bytes that adds no space, as GPT-2's"
            )
