"""Training of tokenizers of each kind. The same texts give the same bytes.

`train_tokenizer` supplies the texts. The result is a folder that transformers can load. The
trainers of `tokenizers` visit words in an order that changes from run to run. Byte-level BPE does
not depend on it. The other kinds have workarounds, explained at their functions.
"""

import io
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokamake.config.data import MIN_VOCAB_SIZE
from tokamake.data.tokenizers import IDS_KEY
from tokamake.errors import UserError
from tokamake.files import atomic_folder, write_json

if TYPE_CHECKING:
    import tokenizers

EOD_TOKEN = "<|endoftext|>"

_BERT_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]

SPECIAL_TOKENS: dict[str, dict[str, str]] = {
    "bpe": {"bos_token": EOD_TOKEN, "eos_token": EOD_TOKEN},
    "unigram": {"bos_token": EOD_TOKEN, "eos_token": EOD_TOKEN},
    "wordpiece": {
        "pad_token": "[PAD]",
        "unk_token": "[UNK]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "mask_token": "[MASK]",
        "bos_token": "[CLS]",
        "eos_token": "[SEP]",
    },
}

# Words arrive split and as bytes, so sentencepiece must not change or split them.
_UNIGRAM_OPTIONS: dict[str, Any] = {
    "model_type": "unigram",
    "input_format": "tsv",
    "num_threads": 8,  # fixed, because sums depend on it
    "character_coverage": 1.0,
    "normalization_rule_name": "identity",
    "add_dummy_prefix": False,
    "remove_extra_whitespaces": False,
    "split_by_whitespace": False,
    "split_by_unicode_script": False,
    "split_by_number": False,
    "max_sentence_length": 1_000_000_000,
    "unk_id": 0,
    "bos_id": -1,
    "eos_id": -1,
    "pad_id": -1,
    "minloglevel": 2,
}

MINIMUM = {"bpe": 257, "unigram": 257, "wordpiece": 261, "ids": 2}
"""Minimum vocabulary of each kind: all bytes (wordpiece: some characters) and special tokens."""

_MAX_BERT_CHARACTERS = 1000


ReadTexts = Callable[[], Iterator[str]]
"""Function that iterates over the texts, each time from the first."""


def train(
    kind: str,
    texts: ReadTexts,
    vocab_size: int,
    *,
    special_tokens: Sequence[str] = (),
    source: str = "the text",
) -> "tokenizers.Tokenizer":
    """Train a tokenizer; `vocab_size` is at least MINIMUM[kind] plus the special tokens."""
    trainers = {"bpe": _train_bpe, "wordpiece": _train_wordpiece, "unigram": _train_unigram}
    if not any(texts()):
        raise UserError(f"{source}: no text to train the tokenizer on; add text")
    try:
        tokenizer = trainers[kind](texts, vocab_size, [*special_tokens])
        num_entries = tokenizer.get_vocab_size()
    except _TooLittleTextError as error:
        num_entries = error.num_entries
    if num_entries < vocab_size:
        smallest = max(MIN_VOCAB_SIZE, MINIMUM[kind] + len(special_tokens))
        remedy = "lower it or add text" if num_entries >= smallest else "add text"
        raise UserError(
            f"tokenizer.vocab_size: {vocab_size}: {source} gives only {num_entries} entries; "
            f"{remedy}"
        )
    return tokenizer


def ids_tokenizer(vocab_size: int, eod: int) -> "tokenizers.Tokenizer":
    """Make a tokenizer whose text is token ids and spaces, like Megatron's NullTokenizer."""
    import tokenizers
    from tokenizers import models, pre_tokenizers

    tokenizer = tokenizers.Tokenizer(models.WordLevel({str(id): id for id in range(vocab_size)}))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # Without single_word, the token 2 would be found in 12.
    tokenizer.add_special_tokens([tokenizers.AddedToken(str(eod), single_word=True)])
    return tokenizer


class _TooLittleTextError(Exception):
    def __init__(self, num_entries: int) -> None:
        self.num_entries = num_entries


def check_special_tokens(kind: str, special_tokens: Sequence[str]) -> None:
    """Refuse special tokens that are empty, repeated, end in spaces, or are the kind's own."""
    known = set(_BERT_TOKENS if kind == "wordpiece" else [EOD_TOKEN])
    for token in special_tokens:
        if token != token.strip() or not token:
            raise UserError(f"special_tokens: {token!r}: give text without spaces around it")
        if token in known:
            raise UserError(f"special_tokens: {token!r}: is one already; leave it out")
        known.add(token)


def write(
    kind: str,
    tokenizer: "tokenizers.Tokenizer",
    output: Path,
    *,
    special_tokens: Sequence[str] = (),
    eod: int | None = None,
) -> None:
    """Write tokenizer.json and tokenizer_config.json, which names the special tokens.

    `eod` is the end-of-document token of the kind ids.
    """
    with atomic_folder(output) as folder:
        tokenizer.save(str(folder / "tokenizer.json"))
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **(SPECIAL_TOKENS[kind] if eod is None else {"eos_token": str(eod), IDS_KEY: True}),
        }
        if special_tokens:
            config["additional_special_tokens"] = [*special_tokens]
        write_json(folder / "tokenizer_config.json", config)


def _train_bpe(
    texts: ReadTexts, vocab_size: int, special_tokens: list[str]
) -> "tokenizers.Tokenizer":
    from tokenizers import models, pre_tokenizers, trainers

    tokenizer = _byte_level_tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOD_TOKEN, *special_tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(texts(), trainer)
    return tokenizer


def _byte_level_tokenizer(model: Any) -> "tokenizers.Tokenizer":
    """Make a tokenizer of bytes that splits text into GPT-2's words."""
    import tokenizers
    from tokenizers import decoders, pre_tokenizers

    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _train_wordpiece(
    texts: ReadTexts, vocab_size: int, special_tokens: list[str]
) -> "tokenizers.Tokenizer":
    """Train BERT's WordPiece.

    The trainer gets the entries for single characters. Its own choice among equally frequent
    characters, and the ids of characters inside words, would depend on the order of words.
    """
    from tokenizers import models, trainers

    special = [*_BERT_TOKENS, *special_tokens]
    # A quarter of the vocabulary: a character can take two entries, one at the beginning of words
    # and one inside words.
    limit = min(_MAX_BERT_CHARACTERS, (vocab_size - len(special)) // 4)
    characters = _frequent_characters(texts(), limit)
    # The trainer keeps the order of special tokens, so the entries inside words pose as such.
    inner = ["##" + character for character in characters if _can_be_inside_word(character)]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=[*special, *inner],
        initial_alphabet=characters,
        limit_alphabet=len(characters),
        show_progress=sys.stderr.isatty(),
    )
    trained = _bert_tokenizer(models.WordPiece(unk_token="[UNK]"))
    trained.train_from_iterator(texts(), trainer)
    # A second tokenizer with the same vocabulary, where `inner` is not special.
    tokenizer = _bert_tokenizer(models.WordPiece(trained.get_vocab(), unk_token="[UNK]"))
    tokenizer.add_special_tokens(special)
    return tokenizer


def _bert_tokenizer(model: Any) -> "tokenizers.Tokenizer":
    """Make a tokenizer of lower-cased text without accents, split at spaces and punctuation."""
    import tokenizers
    from tokenizers import decoders, normalizers, pre_tokenizers, processors

    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    sep, cls = ((token, _BERT_TOKENS.index(token)) for token in ("[SEP]", "[CLS]"))
    tokenizer.post_processor = processors.BertProcessing(sep, cls)
    return tokenizer


def _frequent_characters(texts: Iterator[str], limit: int) -> list[str]:
    """Return the most frequent characters of normalized text; at a tie, the lowest code points."""
    from tokenizers import normalizers

    raw_counts: Counter[str] = Counter()
    for text in texts:
        raw_counts.update(text)
    # The normalizer changes each character by itself: normalize each distinct one once.
    normalizer = normalizers.BertNormalizer(lowercase=True)
    counts: Counter[str] = Counter()
    for character, count in raw_counts.items():
        for normal in normalizer.normalize_str(character).strip():
            counts[normal] += count
    return sorted(sorted(counts, key=lambda c: (-counts[c], c))[:limit])


def _can_be_inside_word(character: str) -> bool:
    from tokenizers import normalizers, pre_tokenizers

    text = normalizers.BertNormalizer(lowercase=True).normalize_str(f"a{character}a")
    return len(pre_tokenizers.BertPreTokenizer().pre_tokenize_str(text)) == 1


def _train_unigram(
    texts: ReadTexts, vocab_size: int, special_tokens: list[str]
) -> "tokenizers.Tokenizer":
    """Train a unigram model over bytes with sentencepiece.

    The trainer of `tokenizers` sums probabilities in the order of words, which changes.
    """
    from tokenizers import models, pre_tokenizers

    words: Counter[str] = Counter(dict.fromkeys(pre_tokenizers.ByteLevel.alphabet(), 1))
    split = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str
    for text in texts():
        words.update(word for word, _ in split(text))
    pieces = _unigram_pieces(words, vocab_size, num_special=len(special_tokens))
    special = [EOD_TOKEN, *special_tokens]
    entries = [*((token, 0.0) for token in special), *pieces]
    tokenizer = _byte_level_tokenizer(models.Unigram(entries, None, False))
    tokenizer.add_special_tokens(special)
    return tokenizer


def _unigram_pieces(
    words: Counter[str], vocab_size: int, *, num_special: int
) -> list[tuple[str, float]]:
    """Train on counted words; return the pieces with their log-probabilities.

    sentencepiece's unknown piece, which is left out, takes the place of the end-of-document token.
    So `vocab_size` - `num_special` - 1 pieces remain.
    """
    import sentencepiece

    model = io.BytesIO()
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".tsv") as table:
        table.writelines(f"{word}\t{count}\n" for word, count in sorted(words.items()))
        table.flush()
        try:
            sentencepiece.SentencePieceTrainer.train(
                input=table.name,
                model_writer=model,
                vocab_size=vocab_size - num_special,
                **_UNIGRAM_OPTIONS,
            )
        except RuntimeError as error:
            # Too little text: the message ends with the largest possible size, "<= 123."
            message = str(error)
            if "<= " not in message:
                raise
            largest = int(message.rpartition("<= ")[2].rstrip(".")) + num_special
            raise _TooLittleTextError(largest) from None
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    ids = range(1, processor.get_piece_size())
    return [(processor.id_to_piece(id), processor.get_score(id)) for id in ids]
