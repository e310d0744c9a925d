"""Special tokens of fill-in-the-middle, and a check that the tokenizer keeps text that is cut."""

import json
import re
from pathlib import Path
from typing import NamedTuple

from tokamake.config.train_sections import FimSettings
from tokamake.data.tokenizers import Tokenizer
from tokamake.errors import UserError

_PROBE = "  def f(x):\n\treturn  x1 # naïve e\u0301 ☃ 日本語\U0001f600.\n\nA b"
"""Code, repeated spaces, and characters of 1 to 4 bytes."""
_SIMILAR = re.compile(r"fim|pre|suf|mid|begin|hole", re.IGNORECASE)


class FimTokens(NamedTuple):
    """Special tokens of a tokenizer."""

    prefix: int
    suffix: int
    middle: int
    split: int | None
    special: list[int]
    """All special tokens of the tokenizer, also for other purposes."""


def find_tokens(fim: FimSettings, tokenizer: Tokenizer, *, path: Path) -> FimTokens:
    """Look up the special tokens, and check that the tokenizer keeps text that is cut."""
    special = _special_tokens(tokenizer, path)
    texts = {name: getattr(fim, name) for name in ("prefix", "suffix", "middle")}
    if fim.split_token:
        texts["split_token"] = fim.split_token
    for name, text in texts.items():
        if text not in special:
            raise _missing(
                f"train.fim.{name}: {text!r}", path, special=special, texts=list(texts.values())
            )
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
            f"tokenizer {path}: fill-in-the-middle needs a tokenizer that separates special tokens "
            "from text; give one with a tokenizer.json"
        )
    added = json.loads(tokenizer.definition())["added_tokens"]
    # Ignore the flag "special": Qwen's tokens lack it. Repeated spaces (GPT-NeoX) are plain text.
    return {token["content"]: token["id"] for token in added if token["content"].strip()}


def _missing(setting: str, path: Path, *, special: dict[str, int], texts: list[str]) -> UserError:
    similar = [text for text in special if _SIMILAR.search(text)]
    has = f"it has {', '.join(similar[:12])}" if similar else "it has no similar ones"
    options = " ".join(f"--special-tokens '{text}'" for text in texts)
    return UserError(
        f"{setting}: not a special token of tokenizer {path}; {has}: use them, or train a "
        f"tokenizer with `tokamake train-tokenizer {options}`"
    )


def _check_uses(ids: dict[str, int], tokenizer: Tokenizer) -> None:
    uses = {tokenizer.eod: "the end of a document"}
    if tokenizer.bos is not None:
        uses.setdefault(tokenizer.bos, "the beginning of a document")
    for name, token in ids.items():
        if token in uses:
            raise UserError(f"train.fim.{name}: the same token as {uses[token]}; use another")
        uses[token] = f"train.fim.{name}"


def _check_cuts(tokenizer: Tokenizer, path: Path) -> None:
    """Cut the probe at each character and check that both parts decode to the same text."""
    (ids,) = tokenizer.encode_batch([_PROBE])
    text = tokenizer.decode(ids)
    heads = tokenizer.encode_batch([text[:cut] for cut in range(len(text) + 1)])
    tails = tokenizer.encode_batch([text[cut:] for cut in range(len(text) + 1)])
    for cut, (head, tail) in enumerate(zip(heads, tails, strict=True)):
        if (decoded := tokenizer.decode(head + tail)) != text:
            raise UserError(
                f"tokenizer {path}: fill-in-the-middle cuts text, and this tokenizer changes text "
                f"cut into {text[:cut][-9:]!r} and {text[cut:][:9]!r} (to {decoded[:20]!r}...); "
                "give a byte-level one without prefix space, such as GPT-2's"
            )
