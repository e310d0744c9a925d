"""Tokenizers that `train_tokenizer` trains, one file per kind. The same texts give the same bytes.

A kind defines `MINIMUM`, its smallest vocabulary; `SPECIAL_TOKENS`, the names in
tokenizer_config.json of its own special tokens; and `train(texts, vocab_size, special_tokens)`.
The result is a folder that transformers can load. The trainers of `tokenizers` visit words in an
order that changes from run to run. WordPiece has workarounds, explained at their functions.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokamake import plugins
from tokamake._csrc import WordCounts
from tokamake.config.data import MIN_VOCAB_SIZE
from tokamake.data.tokenizers import IDS_KEY
from tokamake.data.tokenizers._byte_level import GPT2
from tokamake.data.tokenizers._patterns import compile_pattern
from tokamake.errors import UserError
from tokamake.files import atomic_folder, write_json

if TYPE_CHECKING:
    import tokenizers

FOLDER = "data/tokenizers/trained"
EOD_TOKEN = "<|endoftext|>"
_BATCH = 1 << 20
"""Characters of the texts that are counted together."""
ReadTexts = Callable[[], Iterator[str]]
"""Function that iterates over the texts, each time from the first."""


class TooLittleTextError(Exception):
    """The texts give fewer entries than the vocabulary should have."""

    def __init__(self, num_entries: int) -> None:
        self.num_entries = num_entries


def train(
    kind: str,
    texts: ReadTexts,
    *,
    vocab_size: int,
    special_tokens: Sequence[str] = (),
    source: str = "the text",
) -> "tokenizers.Tokenizer":
    """Train a tokenizer; `vocab_size` is at least the kind's minimum plus the special tokens."""
    if not any(texts()):
        raise UserError(f"{source}: no text to train the tokenizer on; add text")
    try:
        tokenizer: tokenizers.Tokenizer = plugins.load(FOLDER, kind).train(
            texts, vocab_size, special_tokens=special_tokens
        )
        num_entries = tokenizer.get_vocab_size()
    except TooLittleTextError as error:
        num_entries = error.num_entries
    if num_entries < vocab_size:
        smallest = max(MIN_VOCAB_SIZE, minimum(kind) + len(special_tokens))
        remedy = "lower it or add text" if num_entries >= smallest else "add text"
        raise UserError(
            f"tokenizer.vocab_size: {vocab_size}: {source} gives only {num_entries} entries; "
            f"{remedy}"
        )
    return tokenizer


def minimum(kind: str) -> int:
    """Return the smallest vocabulary of a kind, with its own special tokens."""
    number: int = plugins.constant(FOLDER, kind, "MINIMUM")
    return number


def check_special_tokens(kind: str, special_tokens: Sequence[str]) -> None:
    """Refuse special tokens that are empty, repeated, end in spaces, or are the kind's own."""
    own = plugins.load(FOLDER, kind).SPECIAL_TOKENS.values()
    known = {*own} or {EOD_TOKEN}
    for token in special_tokens:
        if token != token.strip() or not token:
            raise UserError(f"special_tokens: {token!r}: give text without spaces around it")
        if token in known:
            raise UserError(f"special_tokens: {token!r}: is one already; leave it out")
        known.add(token)


def write(
    kind: str,
    tokenizer: "tokenizers.Tokenizer",
    *,
    output: Path,
    special_tokens: Sequence[str] = (),
    eod: int | None = None,
) -> None:
    """Write tokenizer.json and tokenizer_config.json, which names the special tokens.

    `eod` is the end-of-document token of the kind ids.
    """
    own = plugins.load(FOLDER, kind).SPECIAL_TOKENS
    with atomic_folder(output) as folder:
        tokenizer.save(str(folder / "tokenizer.json"))
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **(own if eod is None else {"eos_token": str(eod), IDS_KEY: True}),
        }
        if special_tokens:
            config["additional_special_tokens"] = [*special_tokens]
        write_json(folder / "tokenizer_config.json", config)


def byte_level_tokenizer(model: Any) -> "tokenizers.Tokenizer":
    """Make a tokenizer of bytes that splits text into GPT-2's words."""
    import tokenizers
    from tokenizers import decoders, pre_tokenizers

    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def count_words(texts: Iterator[str]) -> WordCounts:
    """Count the words into which GPT-2's pre-tokenizer splits texts."""
    words = WordCounts(*compile_pattern(GPT2))
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= _BATCH:
            words.add(batch)
            batch, size = [], 0
    words.add(batch)
    return words
