"""Masking of sentence data, as `index` notes it in index.json.

`index` makes a `SentenceMasking` from the settings of a run and a tokenizer. The classes that read
samples (`masked`, `span_corruption`) take it from index.json.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tokamake.data.tokenizers import Tokenizer
from tokamake.data.tokenizers._sentinels import DECODER_TOKENS, SENTINEL
from tokamake.errors import UserError

KEY = "objective"
"""Key of index.json; an index of the objective causal has none."""
PIECES = "pieces.npy"
"""File of the index folder: kind of each token, see `piece_kinds`."""
WORD, CONTINUATION, BOUNDARY, ABSENT = range(4)
_SPECIAL = {"pad": "[PAD]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}
_OF_DECODER = dict(zip(("bos", "eos"), DECODER_TOKENS, strict=True))


class SentenceMasking(NamedTuple):
    """Everything that decides the samples of the objectives masked and span_corruption."""

    name: str
    """masked or span_corruption."""
    target_tokens: int
    """Most tokens of a sample, without special ones."""
    min_sentences: int
    """Fewest sentences of a sample."""
    probability: float
    """Share of the tokens to mask."""
    max_ngram: int
    """Most words that are masked as one."""
    short_sequence_probability: float
    """Share of the samples that are shorter than possible."""
    tokenizer: str
    """Fingerprint of the tokenizer."""
    tokens: dict[str, int]
    """Special tokens by their use: pad, cls, sep, mask, bos, eos."""
    sentinels: list[int]
    """Tokens that replace spans, in order."""
    sentence_order: bool = False
    """masked: samples have two parts, which are swapped in half of them."""
    decoder_sequence_length: int = 0
    """span_corruption: tokens of the decoder."""


def make_masking(settings: dict[str, Any], tokenizer: Tokenizer, *, path: Path) -> SentenceMasking:
    """Add the special tokens of a tokenizer to the settings of a run."""
    vocabulary = _vocabulary(tokenizer, path)
    has_decoder = "decoder_sequence_length" in settings
    wanted = {**_SPECIAL, **_OF_DECODER} if has_decoder else _SPECIAL
    tokens = special_tokens(tokenizer, wanted, path=path)
    sentinels: list[int] = []
    while has_decoder and SENTINEL.format(len(sentinels)) in vocabulary:
        sentinels.append(vocabulary[SENTINEL.format(len(sentinels))])
    if has_decoder and not sentinels:
        missing = [SENTINEL.format(0)]
        raise UserError(f"tokenizer {path}: has no {missing[0]}; {_remedy(missing)}")
    return SentenceMasking(
        **settings,
        min_sentences=2 if settings.get("sentence_order") else 1,
        tokenizer=tokenizer.fingerprint,
        tokens=tokens,
        sentinels=sentinels,
    )


def special_tokens(tokenizer: Tokenizer, uses: Iterable[str], *, path: Path) -> dict[str, int]:
    """Special tokens by their use: pad, cls, sep, mask, bos, eos."""
    vocabulary, texts = _vocabulary(tokenizer, path), {**_SPECIAL, **_OF_DECODER}
    wanted = {use: texts[use] for use in uses}
    if missing := [text for text in wanted.values() if text not in vocabulary]:
        raise UserError(f"tokenizer {path}: has no {', '.join(missing)}; {_remedy(missing)}")
    return {use: vocabulary[text] for use, text in wanted.items()}


def _remedy(missing: Sequence[str]) -> str:
    if {*missing} & {*_SPECIAL.values()}:
        return "give the tokenizer of a BERT, or train one with tokenizer.kind wordpiece"
    return "append them with tokenizer.sentinels, or `tokamake extend-tokenizer`"


def piece_kinds(tokenizer: Tokenizer, *, path: Path) -> npt.NDArray[np.uint8]:
    """Kind of each token, (vocabulary,) uint8: where words begin, for masking whole words.

    `WORD` begins a word, `CONTINUATION` has the prefix ## and continues one, `BOUNDARY` separates
    texts, and no token of the tokenizer has an `ABSENT` id.
    """
    vocabulary = _vocabulary(tokenizer, path)
    kinds = np.full(tokenizer.vocab_size, ABSENT, np.uint8)
    for text, token in vocabulary.items():
        kinds[token] = CONTINUATION if text.startswith("##") else WORD
    for use in ("cls", "sep"):
        if _SPECIAL[use] in vocabulary:
            kinds[vocabulary[_SPECIAL[use]]] = BOUNDARY
    return kinds


def _vocabulary(tokenizer: Tokenizer, path: Path) -> dict[str, int]:
    definition = json.loads(tokenizer.definition()) if tokenizer.package == "tokenizers" else {}
    model = definition.get("model", {})
    if model.get("type") != "WordPiece" or model.get("continuing_subword_prefix", "##") != "##":
        raise UserError(
            f"tokenizer {path}: no WordPiece tokenizer, which alone marks whole words (with ##) "
            "and has [CLS] and [SEP]; give the tokenizer of a BERT, or train one with "
            "tokenizer.kind wordpiece"
        )
    added = {token["content"]: token["id"] for token in definition["added_tokens"]}
    vocabulary: dict[str, int] = {**model["vocab"], **added}
    return vocabulary


def ngram_probabilities(max_ngram: int) -> npt.NDArray[np.float64]:
    """Cumulative probabilities, (max_ngram,), of 1 to `max_ngram` words: in proportion to 1 / n.

    The operations are the same as in megatron-core and numpy's `choice`: all bits are equal.
    """
    lengths = np.arange(max_ngram, dtype=np.int64) + 1
    shares = 1.0 / lengths
    shares = shares / shares.sum(keepdims=True)
    shares = shares / shares.sum(keepdims=True)
    cumulative: npt.NDArray[np.float64] = shares.cumsum()
    cumulative /= cumulative[-1]
    return cumulative
